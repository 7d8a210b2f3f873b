"""Runs that end too early: killed workers, full disks, errors. The same command continues, with the same bytes in the end."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_ms.tasks.preprocess import pipeline, readers
from mindspeed_ms.tasks.preprocess import unfinished as unfinished_module
from tests.preprocess.runs import all_bytes, run, texts, write_jsonl
from tests.preprocess.toy_tokenizer import write_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHAT = [
    "--handler-name",
    "AlpacaStyleInstructionHandler",
    "--prompt-type",
    "qwen",
    "--pack",
    "--neat-pack",
    "--seq-length",
    "200",
]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 2000)
    return [
        write_jsonl(
            tmp_path / f"{number}.jsonl",
            [{"text": text, "instruction": "how", "output": text[:99]} for text in texts(60, number)],
        )
        for number in range(3)
    ]


@pytest.mark.parametrize("words", [["--append-eod"], CHAT])
def test_interrupted_anywhere(tmp_path, capsys, monkeypatch, corpus, words):
    run(capsys, tmp_path, "--input", *corpus, *words, prefix="whole/set")
    real = unfinished_module.Unfinished.append
    monkeypatch.setattr(unfinished_module, "SECONDS_BETWEEN_ENTRIES", 0)
    calls, stops = 0, []

    def append(self, key, tokens, lengths):
        nonlocal calls
        calls += 1
        real(self, key, tokens, lengths)
        if calls in (2, 5, 6, 17, 30):  # between the keys of a batch too
            stops.append(calls)
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished_module.Unfinished, "append", append)
    while True:
        code, printed = run(capsys, tmp_path, "--input", *corpus, *words)
        if code != 130:
            break
        assert not list((tmp_path / "out").glob("*.idx"))
    assert code == 0 and len(stops) >= 4 and "continuing the unfinished run" in printed, printed
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


@pytest.mark.parametrize("at", range(4))
def test_interrupted_while_files_get_their_names(tmp_path, capsys, monkeypatch, corpus, at):
    words = ["--input", *corpus, "--json-keys", "text", "output"]
    run(capsys, tmp_path, *words, prefix="whole/set")
    real, calls = unfinished_module._move, []

    def move(source, target):
        calls.append(target)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(unfinished_module, "_move", move)
    assert run(capsys, tmp_path, *words)[0] == 130
    monkeypatch.setattr(pipeline, "_tokenize", None)  # nothing is read again
    assert run(capsys, tmp_path, *words)[0] == 0
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


def test_other_settings_or_input_do_not_continue(tmp_path, capsys, monkeypatch, corpus):
    with open(corpus[2], "ab") as file:
        file.write(b"{broken\n")
    words = ["--input", *corpus]
    code, printed = run(capsys, tmp_path, *words)
    assert code == 1 and "2.jsonl, line 61: broken JSON" in printed
    code, printed = run(capsys, tmp_path, *words, "--append-eod")
    assert code == 1 and "other settings" in printed and "--overwrite-cache" in printed
    corpus[0].write_bytes(corpus[0].read_bytes() + b"\n")
    code, printed = run(capsys, tmp_path, *words)
    assert code == 1 and "0.jsonl was changed" in printed
    corpus[2].write_bytes(corpus[2].read_bytes().removesuffix(b"{broken\n"))
    code, printed = run(capsys, tmp_path, *words, "--overwrite-cache")
    assert code == 0, printed


@pytest.mark.parametrize("place", [1000, 3_000_000, -20])
def test_changed_input_of_equal_size_and_time_does_not_continue(tmp_path, capsys, monkeypatch, place):
    monkeypatch.setattr(readers, "BATCH_BYTES", 1 << 20)
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how are you? " * 8}] * 30_000)  # hashed whole
    with open(path, "ab") as file:
        file.write(b"{broken\n")
    numbers = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-model", write_tokenizer(tmp_path) + "/tokenizer.json"]
    assert run(capsys, tmp_path, "--input", path, tokenizer=numbers)[0] == 1
    status, content = os.stat(path), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    code, printed = run(capsys, tmp_path, "--input", path, tokenizer=numbers)
    assert code == 1 and "data.jsonl was changed since" in printed and "--overwrite-cache" in printed


@pytest.mark.parametrize("step", ["pack", "publish"])
def test_changed_input_does_not_continue_behind_the_last_token_either(tmp_path, capsys, monkeypatch, corpus, step):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, step, interrupt)
        assert run(capsys, tmp_path, "--input", *corpus, *CHAT)[0] == 130
    before = corpus[1].read_bytes()
    corpus[1].write_bytes(before.replace(b"how", b"who"))
    code, printed = run(capsys, tmp_path, "--input", *corpus, *CHAT)
    assert code == 1 and "1.jsonl was changed since" in printed, printed
    assert run(capsys, tmp_path, "--input", *corpus, *CHAT, "--overwrite-cache", "--overwrite-output")[0] == 0


def test_another_tokenizer_or_template_in_the_same_place_does_not_continue(tmp_path, capsys, corpus):
    with open(corpus[2], "ab") as file:
        file.write(b"{broken\n")
    templates = tmp_path / "templates.json"
    templates.write_text('[{"name": "mine", "format_user": {"slots": ["Q: {{content}}"]}}]')
    words = [*CHAT[:2], "--prompt-type", "mine", "--prompt-type-path", templates]
    assert "line 61: broken JSON" in run(capsys, tmp_path, "--input", *corpus, *words)[1]
    for path in (templates, tmp_path / "tokenizer_config.json"):
        before = path.read_bytes()
        path.write_bytes(before.replace(b"Q: ", b"F: ").replace(b"</s>", b"<s>"))
        assert path.read_bytes() != before
        code, printed = run(capsys, tmp_path, "--input", *corpus, *words)
        assert code == 1 and "different: content of tokenizer and templates" in printed, printed
        path.write_bytes(before)
    assert "line 61: broken JSON" in run(capsys, tmp_path, "--input", *corpus, *words)[1]


def command(folder, *words):
    return [
        sys.executable,
        "preprocess_data.py",
        *map(str, words),
        "--tokenizer-name-or-path",
        str(folder),
        "--output-prefix",
        str(folder / "out" / "set"),
    ]


def test_full_disk(tmp_path, capsys, corpus):
    """A limit on the size of files stands for the disk: writing fails half-way."""
    write_tokenizer(tmp_path)
    words = command(tmp_path, "--input", *corpus)
    full = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
    )
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert "File too large" in full.stderr and "repeat the command" in full.stderr
    assert not list((tmp_path / "out").glob("*_document.*"))
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0
    run(capsys, tmp_path, "--input", *corpus, prefix="whole/set")
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


def test_killed_worker(tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in texts(200)] * 300)  # about 10 MB
    write_tokenizer(tmp_path)
    words = command(tmp_path, "--input", path, "--workers", "2")
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        os.kill(_working_child(process.pid), signal.SIGKILL)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1 and "was killed" in errors and "Traceback" not in errors, errors
    assert not list((tmp_path / "out").glob("*_document.*"))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run(capsys, tmp_path, "--input", path, prefix="whole/set")
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


def test_names_of_files_that_are_no_utf8(tmp_path):
    """They are kept in the journal of an interrupted run, and shown in the report."""
    path = tmp_path / os.fsdecode(b"data-\xff.jsonl")
    write_jsonl(path, [{"text": "how"}, {"text": ""}])
    with open(path, "ab") as file:
        file.write(b"{broken\n")
    write_tokenizer(tmp_path)
    for words, code in (([], 1), ([], 1), (["--on-invalid", "skip", "--overwrite-cache"], 0)):
        words = command(tmp_path, *words, "--input", path)
        utf8 = os.environ | {"PYTHONIOENCODING": "utf-8"}  # as in most locales: what is no UTF-8 cannot be printed
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=utf8)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert "line 3" in done.stdout + done.stderr


def _working_child(pid):
    """A child of the process that has worked for a moment."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
            for child in file.read().split():
                words, counts = (Path(f"/proc/{child}/{name}").read_text(encoding="utf-8") for name in ("cmdline", "stat"))
                if "spawn_main" in words and int(counts.rsplit(")")[-1].split()[11]) > 60:  # ticks of user time
                    return int(child)
        time.sleep(0.05)
    raise TimeoutError("no worker started")
