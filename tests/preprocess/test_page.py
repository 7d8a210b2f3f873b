"""The commands of docs/preprocess.md work when they are pasted in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]


def test_commands_of_the_page(tmp_path):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "preprocess.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "preprocess_data.py").symlink_to(ROOT / "preprocess_data.py")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    for name in (
        "corpus_text_document",
        "chat_packed_labels_document",
        "packed_packed_input_ids_document",
        "joined_text_document",
    ):
        assert len(IndexedDataset(str(tmp_path / "data" / name))) >= 1
