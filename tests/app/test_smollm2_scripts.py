"""Scripts of examples/smollm2 on a tiny model: fine-tuning, preferences, chat before and after, export."""

import json
import subprocess

import pytest

from mindspeed_ms.training.metrics import read_metrics
from tests.app.job import REPOSITORY, environment
from tests.documented.sandbox import Sandbox, write_chat_model

FOLDER = REPOSITORY / "examples" / "smollm2"


def _run(name, folder, *words, code=0, **variables):
    done = subprocess.run(
        ["/bin/bash", str(FOLDER / name), *words],
        cwd=folder,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def test_what_is_missing_is_named_with_the_script_that_makes_it(tmp_path):
    for name in ("sft.sh", "dpo.sh", "chat.sh"):
        line = f"{name}: error: there is no "
        printed = _run(name, tmp_path, "here", code=2)
        assert printed.startswith(line) and printed.endswith("run examples/smollm2/convert.sh here\n")
    write_chat_model(Sandbox(tmp_path), "here/hf")
    printed = _run("chat.sh", tmp_path, "here", "dpo", code=2)
    assert printed == (
        "chat.sh: error: there is no here/dpo/latest_checkpointed_iteration.txt: run examples/smollm2/dpo.sh here\n"
    )
    assert "--load-dir here/sft does not exist" in _run("export.sh", tmp_path, "here", code=2)
    for name in ("chat.sh", "export.sh"):
        assert _run(name, tmp_path, "here", "Which?", code=2).endswith(" the second word is 'Which?': expected sft or dpo\n")


@pytest.mark.slow
def test_a_tiny_model_goes_all_the_way(tmp_path):
    write_chat_model(Sandbox(tmp_path), "here/hf")
    _run("sft.sh", tmp_path, "here", STEPS="4")
    assert len((tmp_path / "here" / "sft" / "records.jsonl").read_text().splitlines()) == 64
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"instruction": "a", "chosen": "b", "rejected": "c"}) + "\n")
    for words in (("here", "--exit-interval", "2"), ("here",)):  # the second call goes on
        _run("dpo.sh", tmp_path, *words, "--log-interval", "1", STEPS="4")
    iterations = [
        line["iteration"] for line in read_metrics(str(tmp_path / "here" / "dpo" / "metrics.jsonl")) if "loss" in line
    ]
    assert iterations == [1, 2, 3, 4]
    printed = _run("dpo.sh", tmp_path, "here", "nowhere.jsonl", code=2)
    assert "nowhere.jsonl" in printed.splitlines()[-1]
    said = _run("chat.sh", tmp_path, "here", "sft", "Which?", "Who?", MAX_NEW_TOKENS="4")
    assert said.index("== before") < said.index("== after sft.sh") and said.count(" tokens in ") == 4
    _run("export.sh", tmp_path, "here", "sft")
    assert (tmp_path / "here" / "sft-hf" / "model.safetensors").exists()
    assert (tmp_path / "here" / "sft-peft" / "adapter_config.json").exists()
    assert "export.sh: error: here/sft-hf exists already: move or delete it" in _run(
        "export.sh", tmp_path, "here", "sft", code=2
    )
