"""Small preprocessing runs for tests."""

import json
import os

import numpy as np

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.tasks.preprocess.__main__ import main
from tests.preprocess.toy_tokenizer import write_tokenizer

NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]


def run(capsys, folder, *words, prefix="out/set", tokenizer=None):
    """`preprocess_data.py` on `folder`/words; returns (exit code, text that it printed)."""
    if tokenizer is None:
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(folder)
        tokenizer = ["--tokenizer-name-or-path", str(folder)]
    code = main([*map(str, words), *tokenizer, "--output-prefix", os.path.join(folder, prefix)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def write_jsonl(path, records, end="\n"):
    """JSON lines in UTF-8, characters written as they are; returns the path."""
    path.write_bytes("".join(json.dumps(record, ensure_ascii=False) + end for record in records).encode())
    return path


def stored(folder, name):
    """The samples (list of list of int) of an output."""
    return [sample.tolist() for sample in IndexedDataset(str(folder / name))]


def pair_bytes(folder, name):
    """Bytes of both files of an output."""
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


def all_bytes(folder):
    """Bytes of all output files, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(count, seed=0):
    """Texts with everything that a line must survive: U+2028, CR, emoji, quotes."""
    random = np.random.default_rng(seed)
    words = [
        "how",
        "are",
        "you?",
        "fine\u2028and",
        "new\nline",
        "\u0085next",
        "tab\tbed",
        '"quoted"',
        "日本",
        "🙂",
        "cr\rcr",
        "\\n",
    ]
    return [" ".join(random.choice(words, random.integers(1, 60))) for _ in range(count)]
