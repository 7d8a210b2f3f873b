"""Crashes of `posttrain_gpt.py` on two ranks, for `crash_loop.py --stage`.

A trial starts a training of a stage on raw records, kills the launcher, a rank or all of them by SIGKILL, and repeats the
command until it succeeds. The moment is drawn: some milliseconds after the n-th change of the names in the output folder (while
data are prepared, log-probabilities of the reference or a rollout are written, a checkpoint is saved), or any time. Checked:
all processes of the killed job end; the repeated command succeeds; losses and other values of all steps, and every tensor and
counter of the last checkpoint, equal those of a run that was never interrupted, bit for bit; no other files are left.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.tools.checkpoint.diff import differences
from mindspeed_ms.training.metrics import read_metrics

HERE = Path(__file__).parent
STEPS = 6
LAYOUTS = ((), ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2"))
ADAPTERS = "--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-r 4".split()
ROLLOUTS = "--num-generations 2 --max-new-tokens 8 --rollout-batch-size 8 --ppo-epochs 2".split()
_TIMES = ("time_ms", "tokens_per_second")
_WORDS = "one two three red blue how are you what is it well then the end".split()
_EXPECTED = r"loss_curve\.png|metrics\.[\d-]+\.jsonl"
_AT_ONCE = 60.0  # seconds in which all processes of a killed job have ended


def write_records(folder, stage):
    """Options (list[str]) of raw records of a stage, which are written to a folder."""
    choice = random.Random(3)

    def text(count):
        return " ".join(choice.choice(_WORDS) for _ in range(count))

    records = []
    for number in range(13):
        if stage == "prm":
            records.append({"input": f"{text(2)} @ {text(3)} @", "value": choice.choice([["+", "-"], ["-", "+"]])})
        elif stage in ("dpo", "simpo", "orm"):
            records.append({"instruction": text(3), "chosen": f"{text(2)} a", "rejected": f"{text(1 + number % 3)} b"})
        else:
            records.append({"instruction": text(3), "output": text(1 + number % 4) if stage == "sft" else ""})
    data = folder / f"{stage}.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    options = ["--data-path", str(data)]
    if stage == "prm":
        return [*options, "--placeholder-token", "@", "--reward-tokens", "+", "-"]
    if stage in ("grpo", "trl_ppo"):
        rewards = folder / "rewards.py"
        rewards.write_text(
            "def mean(answer_ids):\n    return [sum(ids) / len(ids) / 1000 for ids in answer_ids]\n", encoding="utf-8"
        )
        options += [*ROLLOUTS, "--reward-function", f"{rewards}:mean"]
    return [*options, "--prompt-type", "chat_template"]


def processes_of(session):
    """Ids (list[int]) of the living processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(name))
    return found


def names_in(folder):
    """Names of all files below a folder, relative to it."""
    return {os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names}


class PosttrainTrial:
    """Crashes of one stage; `choice` (random.Random) draws layout, moment and victim.

    Args:
        stage (str): of posttrain_gpt.py.
        model (str): a folder to start from, with its tokenizer.
        adapters (bool): train adapters.
        root (Path): folder of everything.
    """

    def __init__(self, stage, model, adapters, root):
        self.stage, self.root = stage, Path(root)
        self.options = ["--stage", stage, "--use-checkpoint-args", "--pretrained-checkpoint", model]
        self.options += ["--tokenizer-name-or-path", model, "--seq-length", 96, "--micro-batch-size", 1, "--lr", 1e-3]
        self.options += ["--global-batch-size", 4, "--train-iters", STEPS, "--save-interval", 1]
        self.options += [*write_records(self.root, stage), *(ADAPTERS if adapters else ())]
        self.whole = {}

    def start(self, folder, layout):
        """The process of a training."""
        words = [sys.executable, "-m", "mindspeed_ms.launch", "-n", "2", "posttrain_gpt.py", *self.options, *layout]
        words += ["--load", folder, "--save", folder]
        with open(f"{folder}.log", "ab") as log:
            return subprocess.Popen(
                [str(word) for word in words], cwd=HERE.parent, stdout=log, stderr=log, start_new_session=True
            )

    def uninterrupted(self, layout):
        """(folder, its number of changes of names, seconds) of a run that nothing happened to."""
        if layout not in self.whole:
            folder = self.root / f"whole{len(self.whole)}"
            began = time.monotonic()
            process = self.start(folder, layout)
            changes = self.watch(process, folder)
            if process.wait() != 0:
                raise SystemExit(f"the training does not run at all: see {folder}.log")
            self.whole[layout] = folder, changes, time.monotonic() - began
        return self.whole[layout]

    @staticmethod
    def watch(process, folder, changes=None, seconds=None):
        """Wait for the end of a process, a number of changes of the names in a folder, or some seconds: changes (int)."""
        seen, count, began = set(), 0, time.monotonic()
        while process.poll() is None and (changes is None or count < changes):
            if seconds is not None and time.monotonic() - began > seconds:
                break
            now = names_in(folder)
            count += now != seen
            seen = now
            time.sleep(0.002)
        return count

    def crash(self, choice, folder, layout):
        """Start and kill; text of what happened."""
        _, changes, seconds = self.uninterrupted(layout)
        process = self.start(folder, layout)
        if choice.random() < 0.75:
            number = choice.randrange(1, changes)
            self.watch(process, folder, changes=number)
            time.sleep(choice.choice((0, 0, 0.003, 0.01, 0.05)))
            moment = f"change {number} of {changes}"
        else:
            limit = choice.uniform(0, seconds)
            self.watch(process, folder, seconds=limit)
            moment = f"{limit:.1f} of {seconds:.1f} s"
        others = [pid for pid in processes_of(process.pid) if pid != process.pid]
        kind = choice.choice(("launcher", "rank", "all"))
        victims = {"launcher": [process.pid], "rank": others and [choice.choice(others)], "all": [process.pid, *others]}[kind]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        began = time.monotonic()
        while process.poll() is None or processes_of(process.pid):
            assert time.monotonic() - began < _AT_ONCE, f"{moment}, {kind} killed: {processes_of(process.pid)} live on"
            time.sleep(0.05)
        return f"{moment}, {kind} killed"

    def check(self, seed):
        """One trial. Returns a text; AssertionError says what is wrong."""
        choice = random.Random(seed)
        layout = choice.choice(LAYOUTS)
        folder = self.root / f"seed{seed}"
        whole = self.uninterrupted(layout)[0]
        happened = " ".join(layout) + "; " + self.crash(choice, folder, layout)
        if choice.random() < 0.3:
            happened += "; " + self.crash(choice, folder, layout)
        process = self.start(folder, layout)
        assert process.wait() == 0, f"{happened}: the repeated command fails, see {folder}.log"
        self.compare(folder, whole, happened)
        shutil.rmtree(folder)
        os.remove(f"{folder}.log")
        return happened

    def compare(self, folder, whole, happened):
        """AssertionError unless two folders hold the same training."""
        found, expected = (self.steps(place) for place in (folder, whole))
        assert found == expected, f"{happened}: {folder}/metrics.jsonl is not that of {whole}"
        last = f"iter_{STEPS:07d}"
        with CheckpointReader(str(folder / last)) as one, CheckpointReader(str(whole / last)) as other:
            assert one.verify() == [], f"{happened}: {folder / last} is damaged"
            wrong = next(differences(one, other), None)
            assert wrong is None, f"{happened}: {folder / last} is not what it must be: {wrong.key}: {wrong.text}"
        # the picture is not drawn again where nothing is left to do; steps before the first checkpoint are put aside
        left = {name for name in names_in(folder) ^ names_in(whole) if not re.fullmatch(_EXPECTED, name)}
        assert not left, f"{happened}: other files than in {whole}: {sorted(left)}"

    @staticmethod
    def steps(folder):
        """Values of the steps, without times."""
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        return [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]
