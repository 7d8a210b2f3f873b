"""The fenced code blocks of README and of the pages under docs/."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if "arguments" not in page.name))


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the line of its fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str


def blocks(page, language):
    """The blocks of `page` in `language`, in order."""
    source = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, source.count("\n", 0, found.start()) + 1, language, found[1])
        for found in re.finditer(rf"^```{language}\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    ]
