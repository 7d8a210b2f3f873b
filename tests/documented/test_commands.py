"""Every shell command of README and docs, pasted page by page as it is printed; trainings are interrupted after some steps."""

import json

import pytest

from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.documented.pages import PAGES, ROOT, blocks
from tests.documented.sandbox import (
    Sandbox,
    write_chat_model,
    write_conversations,
    write_indexed,
    write_records,
    write_texts,
    write_tokenizer,
)

pytestmark = [pytest.mark.documented, pytest.mark.slow]

# what .ci/run runs itself, in its fresh environment, and what loads a model of 93 MB
ELSEWHERE = ("pip install -e", "python -m venv", "bash examples/smollm2")


def _readme(sandbox):
    write_texts(sandbox, "my_texts")
    write_records(sandbox, "my_texts.jsonl")
    write_tokenizer(sandbox, "my_tokenizer")
    write_indexed(sandbox, "other_text_document")
    _own_configuration(sandbox)


def _own_configuration(sandbox):
    for name in ("model", "train"):
        text = (ROOT / "configs" / "cpu_default" / f"{name}.yaml").read_text(encoding="utf-8")
        sandbox.path(f"my/{name}.yaml").write_text(text, encoding="utf-8")


def _getting_started(sandbox):
    write_texts(sandbox, "books")
    _own_configuration(sandbox)


def _data(sandbox):
    for name in ("books_text_document", "books", "web", "code", "held_out"):
        write_indexed(sandbox, f"data/{name}")


def _templates(sandbox):
    write_tokenizer(sandbox, "Qwen3-0.6B")
    write_conversations(sandbox, "PREFIX")


def _conversion(sandbox):
    folder = sandbox.path("models/Qwen2.5")
    write_folder(folder, {**CONFIGS["qwen2"], "torch_dtype": "bfloat16"}, dtype="bfloat16")
    write_tokenizer(sandbox, "models/Qwen2.5")


def _inference(sandbox):
    write_chat_model(sandbox, "models/Qwen2.5")
    sandbox.path("prompts.txt").write_text("one\n\ntwo\n", encoding="utf-8")


def _finetuning(sandbox):
    write_chat_model(sandbox, "models/Qwen2.5")


def _serving(sandbox):
    write_chat_model(sandbox, "models/SmolLM2")


def _evaluation(sandbox):
    write_chat_model(sandbox, "models/SmolLM2")
    sandbox.path("my_text.txt").write_text("import os\n", encoding="utf-8")
    question = json.dumps({"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "law"})
    for folder in ("test", "dev"):
        sandbox.path(f"mmlu/{folder}/law.jsonl").write_text(f"{question}\n{question}\n")
    sandbox.path("gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))


def _lora(sandbox):
    write_chat_model(sandbox, "models/SmolLM2")
    write_texts(sandbox, "my_texts")


def _launching(sandbox):
    write_chat_model(sandbox, "models/Qwen2.5")
    write_texts(sandbox, "my_texts")


def _profiling(sandbox):
    settings = blocks("docs/profiling.md", "yaml")[0].text
    sandbox.path("profile.yaml").write_text(settings, encoding="utf-8")
    sizes = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32 --train-iters 8"
    done = sandbox.run(
        "/bin/bash gpt/pretrain_gpt.sh --config configs/cpu_default/*.yaml profile.yaml --mock-data --eval-iters 0 "
        f"--no-sample {sizes}"
    )
    assert done.returncode == 0, done.stdout


def _checkpoints(sandbox):
    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
    from mindspeed_ms.testing.megatron_checkpoints import MadeUpReader
    from mindspeed_ms.testing.small_trainings import UNTIED

    config = init_configs_from_dict(
        {"model_config": {**UNTIED, "vocab_size": 1024}, "parallel_config": {"tensor_model_parallel_size": 2}}
    )
    reader = MadeUpReader(config)
    for values in reader.arrays.values():
        values *= 0.1
    MegatronTarget(reader, config, distributed=True).write(str(sandbox.folder / "megatron_run"))


PREPARATION = {
    "README.md": _readme,
    "docs/conversion.md": _conversion,
    "docs/checkpoints.md": _checkpoints,
    "docs/data.md": _data,
    "docs/getting-started.md": _getting_started,
    "docs/inference.md": _inference,
    "docs/evaluation.md": _evaluation,
    "docs/finetuning.md": _finetuning,
    "docs/launching.md": _launching,
    "docs/lora.md": _lora,
    "docs/post-training.md": _lora,
    "docs/profiling.md": _profiling,
    "docs/serving.md": _serving,
    "docs/tokenizers-and-templates.md": _templates,
}


# texts that the commands of a page print, and how often
EXPECTED = {"docs/finetuning.md": dict.fromkeys(("\nParis.\n", "\nShakespeare.\n", "\nHoney.\n"), 2)}


def _own_blocks(page):
    return [block for block in blocks(page, "bash") if not block.text.startswith(ELSEWHERE)]


@pytest.mark.parametrize("page", [page for page in PAGES if _own_blocks(page)])
def test_commands_of_a_page(page, tmp_path):
    """In order, in one folder, as a reader does it; each block ends with exit code 0."""
    sandbox = Sandbox(tmp_path)
    PREPARATION.get(page, lambda sandbox: None)(sandbox)
    failed, printed = [], ""
    for block in _own_blocks(page):
        done = sandbox.run(block.text)
        printed += done.stdout
        if done.returncode:
            failed.append(f"{page}:{block.line} ended with exit code {done.returncode}:\n{block.text}\n{done.stdout[-3000:]}")
    assert not failed, "\n\n".join(failed)
    for text, count in EXPECTED.get(page, {}).items():
        assert printed.count(text) == count, printed[-3000:]


def test_both_readmes_show_the_same_commands():
    """The Chinese README differs in comments only."""

    def commands(page):
        return [line.partition("  #")[0].rstrip() for block in blocks(page, "bash") for line in block.text.splitlines()]

    assert [line.partition("     #")[0].rstrip() for line in commands("README_zh.md")] == commands("README.md")


def test_all_shell_blocks_are_marked():
    """A fenced block with a command says `bash`, or it would not be run."""
    unmarked = [
        f"{page}: {line}"
        for page in PAGES
        for block in blocks(page, "")
        for line in block.text.splitlines()
        if line.startswith(("bash ", "python ", "pip ", "msrun "))
    ]
    assert not unmarked
