"""A folder like a clone of the repository with a user's files beside it, in which documented commands run."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.documented.pages import ROOT

TEXTS = ("os", "argparse", "ast", "inspect", "tarfile", "typing")  # modules whose sources are the user's texts


class Sandbox:
    """Runs commands as a user does who pastes them: in a folder with the repository's files, and the real launcher.

    Args:
        folder (Path): an empty folder.
    """

    def __init__(self, folder):
        self.folder = folder
        for name in (
            "gpt",
            "configs",
            "preprocess_data.py",
            "convert_ckpt.py",
            "posttrain_gpt.py",
            "inference.py",
            "evaluation.py",
            "benchmarks",
            "examples",
        ):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        shim = folder / "bin" / "bash"
        shim.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "shim.py").read_text(encoding="utf-8"))
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)

    def run(self, script):
        """Run `script` (bash); the finished process with its output as text."""
        names = ("MS_", "RANK_", "MINDSPEED_MS_DEVICE")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        path = os.pathsep.join([str(self.folder / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]])
        variables |= {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(self.folder), "MINDSPEED_MS_DEVICE": "CPU"}
        return subprocess.run(
            ["/bin/bash", "-e", "-c", script],
            cwd=self.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def path(self, name):
        """The path of a file below the sandbox, its folder made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def sources():
    """{name: text} of the user's texts."""
    library = Path(os.__file__).parent
    return {name: (library / f"{name}.py").read_text(encoding="utf-8") for name in TEXTS}


def write_texts(sandbox, folder):
    """UTF-8 files in `folder`."""
    for name, text in sources().items():
        sandbox.path(f"{folder}/{name}.txt").write_text(text, encoding="utf-8")


def write_records(sandbox, name):
    """A jsonl file of documents."""
    with open(sandbox.path(name), "w", encoding="utf-8") as file:
        for text in sources().values():
            for part in text.split("\n\n\n"):  # between top-level definitions
                file.write(json.dumps({"text": part}) + "\n")


def write_tokenizer(sandbox, folder):
    """A small byte-level BPE as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(list(sources().values())[:2], trainer)
    tokenizer.save(str(sandbox.path(f"{folder}/tokenizer.json")))
    settings = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    sandbox.path(f"{folder}/tokenizer_config.json").write_text(json.dumps(settings))


def write_chat_model(sandbox, folder):
    """A tiny model as a Hugging Face folder, with a tokenizer and a chat template."""
    write_folder(sandbox.path(folder), {**CONFIGS["qwen2"], "vocab_size": 512, "max_position_embeddings": 1024})
    write_tokenizer(sandbox, folder)
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    sandbox.path(f"{folder}/chat_template.jinja").write_text(template, encoding="utf-8")


def write_indexed(sandbox, prefix):
    """Megatron's `.bin` and `.idx` with random tokens of a small vocabulary."""
    import numpy as np

    from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(len(prefix))
    with IndexedDatasetBuilder(str(sandbox.path(f"{prefix}.bin")), np.uint16) as builder:
        for length in random.integers(20, 200, size=20000):
            builder.add_document(random.integers(3, 500, size=length))
        builder.finalize(str(sandbox.path(f"{prefix}.idx")))


def write_conversations(sandbox, prefix):
    """The files that preprocessing writes of instruction data."""
    import numpy as np

    from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder

    lengths = np.random.default_rng(1).integers(20, 100, size=400)
    for field in ("input_ids", "attention_mask", "labels"):
        name = f"{prefix}_packed_{field}_document"
        with IndexedDatasetBuilder(str(sandbox.path(f"{name}.bin")), np.int32) as builder:
            for length in lengths:
                builder.add_document(np.ones(length, np.int32) if field == "attention_mask" else np.arange(3, 3 + length))
            builder.finalize(str(sandbox.path(f"{name}.idx")))
