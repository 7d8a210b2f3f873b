"""evaluation.py: figures equal a direct computation, on one rank and on two; mistakes are one line before a model is loaded."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from mindspeed_ms.tools.evaluate import command
from mindspeed_ms.tools.model_command.job import JobError, plan
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
    ],
)
def test_mistakes_are_one_line(folder, arguments, words):
    done = run(folder, *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


BEFORE_LOADING = [
    (["perplexity", "text.txt", "--window", "4000"], "--window is 4000: expected 2 to "),
    (["perplexity", "text.txt", "--window", "9", "--stride", "9"], "--stride is 9: expected 1 to 8"),
    (["perplexity", "questions.jsonl"], "questions.jsonl, line 1: the field 'text' or 'content' is missing"),
    (["perplexity", "foreign.bin"], "foreign"),
    (["multiple_choice", "long.jsonl"], "long.jsonl, line 1: a continuation has "),
    (["multiple_choice", "blank.jsonl"], "blank.jsonl, line 1: choice 1 is empty: expected some text."),
    (["gsm8k", "problems.jsonl", "--max-new-tokens", "4000"], "--max-new-tokens is 4000, but the context of "),
    (["gsm8k", "long_problem.jsonl", "--max-new-tokens", "8"], "long_problem.jsonl, line 1: prompt has "),
    (["gsm8k", "problems.jsonl", "--evaluation-batch-size", "99999999"], " with --evaluation-batch-size 99999999 needs "),
    (["perplexity", "text.txt", "--output", "text.txt"], "--output is text.txt, which holds no results of an evaluation"),
    (["perplexity", "text.txt", "--output", "/proc/out.json"], "--output is /proc/out.json: the folder cannot be written: "),
    (["perplexity", "text.txt", "--expert-tensor-parallel-size", "3"], "--expert-tensor-parallel-size is 3: the model has no"),
    (["perplexity", "text.txt", "--tensor-model-parallel-size", "7"], "tensor-model-parallel-size"),
    (["perplexity", "text.txt", "--context-parallel-size", "2"], "--context-parallel-size is 2: inference cuts no sequence"),
]


@pytest.mark.parametrize(
    ("words", "message"), BEFORE_LOADING, ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else ""
)
def test_found_before_ranks_start(folder, monkeypatch, words, message):
    """What data and flags get wrong is known without the model; a file that is no result of ours stays."""
    monkeypatch.chdir(folder)
    for name, record in {
        "long": {"context": "a", "choices": ["return x " * 4000, "y"], "answer": 0},
        "blank": {"context": "a", "choices": ["", "y"], "answer": 0},
        "long_problem": {"question": "return x " * 4000, "answer": "#### 1"},
    }.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(record), encoding="utf-8")
    (folder / "foreign.idx").write_bytes(b"0" * 10)
    task, path, *others = words
    with pytest.raises(JobError) as caught:
        plan(command.job_of(["--load", "model", "--task", task, "--task-data-path", path, *others]))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert (folder / "text.txt").read_text(encoding="utf-8") == TEXT


def test_earlier_results_may_be_replaced_and_a_byte_order_mark_is_no_text(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "old.json").write_text(json.dumps({"task": "perplexity"}, indent=1))
    (folder / "marked.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    words = ["--load", "model", "--task", "perplexity", "--task-data-path", "marked.txt", "--output", "old.json"]
    [document] = plan(command.job_of(words)).prepared["marked.txt"]
    assert document.size == len(TEXT.encode())
