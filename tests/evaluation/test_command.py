"""evaluation.py: figures equal a direct computation, on one rank and on two; mistakes are one line before a model is loaded."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from tests.documented.pages import ROOT
from tests.documented.sandbox import Sandbox, write_chat_model

TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model, text and questions."""
    sandbox = Sandbox(tmp_path_factory.mktemp("evaluation"))
    write_chat_model(sandbox, "model")
    sandbox.path("text.txt").write_text(TEXT, encoding="utf-8")
    questions = [{"question": f"{n}?", "choices": ["import", "class", "return x"], "answer": n % 3} for n in range(5)]
    sandbox.path("questions.jsonl").write_text("\n".join(json.dumps(one) for one in questions), encoding="utf-8")
    sandbox.path("problems.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}), encoding="utf-8")
    return sandbox.folder


def run(folder, *arguments):
    command = [sys.executable, str(ROOT / "evaluation.py"), "--load", "model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def direct(folder):
    """Log-probabilities of the text, and of each choice of each question, by whole forwards; in a world."""
    from mindspore import Tensor

    from mindspeed_ms.core.autograd import no_grad
    from mindspeed_ms.inference.loading import load

    loaded = load(str(folder / "model"), max_sequence_length=64)

    def log_probabilities(ids):
        (chunk,) = loaded.runner._chunks
        with no_grad():
            logits = chunk(Tensor.from_numpy(np.array([ids], np.int32))).asnumpy()[0].astype(np.float64)
        table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return table[np.arange(len(ids) - 1), ids[1:]]

    encode = loaded.tokenizer.tokenize
    records = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    sums = []
    for record in records:
        length = len(encode(record["question"]))
        totals = [
            log_probabilities(encode(record["question"] + " " + choice))[length - 1 :].sum() for choice in record["choices"]
        ]
        sums.append([float(total) for total in totals])
    return float(-log_probabilities(encode(TEXT)).mean()), sums


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_figures_are_those_of_direct_forwards(folder, world, ranks):
    ((mean_nll, sums),) = world(1)(direct, folder)
    size = ("--tensor-model-parallel-size", str(ranks), "--output", "out.json")
    done = run(folder, "--task", "perplexity", "--task-data-path", "text.txt", *size)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "out.json").read_text())["results"]["text.txt"]
    assert math.isclose(result["perplexity"], math.exp(mean_nll), rel_tol=1e-5)
    task = ("--task", "multiple_choice", "--task-data-path", "questions.jsonl", "--evaluation-batch-size", "4")
    done = run(folder, *task, "--max-new-tokens", "1", *size)
    assert done.returncode == 0 and done.stderr.count("--max-new-tokens has no effect") == 1, done.stderr
    written = json.loads((folder / "out.json").read_text())
    for detail, totals in zip(written["details"], sums):
        np.testing.assert_allclose(detail["logprobs"], totals, rtol=1e-5)
    right = sum(int(np.argmax(totals)) == n % 3 for n, totals in enumerate(sums)) / 5
    assert written["results"]["all"]["acc"] == right
    assert done.stdout.splitlines()[-1].split()[:3] == ["all", "5", f"{right:.4f}"]


@pytest.mark.slow
def test_generation(folder):
    done = run(folder, "--task", "gsm8k", "--task-data-path", "problems.jsonl", "--max-new-tokens", "4", "--output", "out.json")
    assert done.returncode == 0, done.stderr
    (detail,) = json.loads((folder / "out.json").read_text())["details"]
    assert detail["text"] and detail["answer"] == "2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "perplexity", "--task-data-path", "nowhere"], "nowhere"),
        (["--task", "nonsense", "--task-data-path", "text.txt"], "invalid choice: 'nonsense'"),
        (["--task", "mmlu", "--task-data-path", "problems.jsonl"], "line 1: expected a list 'choices'"),
        (["--task", "mmlu", "--task-data-path", "questions.jsonl", "--stride", "4"], "--stride has no effect on --task mmlu"),
        (["--task", "mmlu", "--task-data-path", "questions.jsonl", "--num-shots", "2"], "--few-shot-path"),
        (["--task", "gsm8k", "--task-data-path", "problems.jsonl", "--prompt-type-path", "x"], "needs --prompt-type"),
        (["--task", "gsm8k", "--task-data-path", "problems.jsonl", "--bf16", "--fp16"], "--bf16 and --fp16"),
        (["--task", "gsm8k", "--task-data-path", "problems.jsonl", "--output", "no/where.json"], "--output is no/where.json"),
        (["--task", "gsm8k", "--task-data-path", "problems.jsonl", "--max-new-tokens", "0"], "expected an integer > 0"),
        (["--task", "gsm8k", "--task-data-path", "problems.jsonl", "--max-new-tokens", "4000"], "context"),
        (["--task", "perplexity", "--task-data-path", "text.txt", "--window", "4000"], "--window is 4000"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, words):
    done = run(folder, *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
