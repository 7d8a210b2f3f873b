"""Crashes of a training on two ranks, drawn from seeds; the continued run must equal one that never crashed, bit for bit.

    python benchmarks/crash_loop.py [--trials 50] [--seed 1]
    python benchmarks/crash_loop.py --stage grpo --model FOLDER [--lora]    # of post-training: posttrain_crashes.py

A trial trains a very small GPT with a checkpoint after every step (asynchronous or not, in our format or upstream's), ends
it in one of the ways of `KINDS`, and continues it. Checked: the newest complete checkpoint is not older than it may be and
its check sums are right; the continued run starts from it, without crc_check it stops with a message that names the damage or
is not touched by it; losses and gradient norms of all steps, and every tensor and counter of the last checkpoint, equal
those of a run that was never interrupted, bit for bit. Prints a line per trial; exit code 1 if one fails, and its folder stays.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from mindspeed_ms.config.sections.posttrain import STAGES
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing import checkpoint_crashes as crash
from mindspeed_ms.tools.checkpoint.diff import differences

STEPS = crash.runs.STEPS
FORMATS = (None, None, "ckpt", "safetensors")


# ---- in the ranks ----------------------------------------------------------------------------------------------------


def quietly(name, folder, *arguments, **training):
    """Run a function of this module or of the crash tests; the ranks' output goes to a file beside the checkpoints."""
    os.makedirs(folder, exist_ok=True)
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    return (globals().get(name) or getattr(crash, name))(folder, *arguments, **training)


def dies_after(folder, seconds, victim, **training):
    """SIGKILL of a rank, or of all (victim None), some seconds after the first step."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.trainer import Trainer
    from mindspeed_ms.training.utils import set_parallel_context

    set_parallel_context(crash.runs.make_config(folder).parallel_config)
    crash.note_progress(folder)
    count, timer = Trainer._count, threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))

    def starting_the_timer(trainer, report):
        if trainer.train_state.iteration == 0 and victim in (None, comm.get_rank()):
            timer.start()
        count(trainer, report)

    Trainer._count = starting_the_timer
    return crash.train(folder, **training)


# ---- crashes; each returns (what happened, the oldest iteration that the newest good checkpoint may have) ------------------


class Trial:
    """One crash: `seed` draws its kind and everything else."""

    def __init__(self, seed, root, seconds):
        self.seed, self.choice, self.seconds = seed, random.Random(seed), seconds
        self.folder = Path(root) / f"seed{seed}"
        self.kind = self.choice.choice(sorted(KINDS))
        self.options = {"async_save": self.choice.random() < 0.5, "ckpt_format": self.choice.choice(FORMATS)}

    def run(self, world, function, *arguments, **options):
        """Outcomes of the ranks."""
        return world.outcomes(quietly, function, self.folder, *arguments, **{**self.options, **options})

    def killed(self, world, function, *arguments):
        """A kill, perhaps a second one of the run that continues."""
        outcomes = self.run(world, function, *arguments)
        world.close()  # what was changed in the ranks must not stay
        progress = self.folder / "progress"
        done = int(progress.read_text()) if progress.exists() else 0
        died = [rank for rank, outcome in enumerate(outcomes) if outcome.exit_status == -signal.SIGKILL]
        return f"ranks {died} died after step {done}", done - 1 - self.options["async_save"]

    def killed_in_a_save(self, world):
        first = self.killed(world, "dies", self.seed)
        return self.killed(world, "dies", self.seed + 1000) if self.choice.random() < 0.3 else first

    def killed_at_any_time(self, world):
        victim = self.choice.choice((None, 0, 1))
        return self.killed(world, "dies_after", self.choice.uniform(0.0, self.seconds), victim)

    def trained_until(self, world, step):
        """A run that ended well after a step; list of its checkpoints' folders, the newest last."""
        outcomes = self.run(world, "train", exit_interval=step)
        assert all(outcome.succeeded for outcome in outcomes), outcomes
        return sorted(self.folder.glob("iter_*"))

    def full_disk(self, world):
        self.trained_until(world, 2)
        rank, limit = self.choice.randrange(2), self.choice.randrange(200, 100_000)
        for outcome in self.run(world, "full_disk", rank, limit):
            assert outcome.succeeded and "the checkpoint was not written" in outcome.value, outcome
        return f"rank {rank} could write {limit} bytes", 2

    def shard(self, world):
        """(newest checkpoint's folder, one of its files with tensors)."""
        path = self.trained_until(world, 3)[-1]
        return path, self.choice.choice(sorted([*path.rglob("*.safetensors"), *path.rglob("*.ckpt")]))

    def truncated(self, world):
        path, file = self.shard(world)
        size = self.choice.randrange(file.stat().st_size)
        os.truncate(file, size)
        return f"{file.relative_to(path)} cut to {size} bytes", 2

    def flipped(self, world):
        path, file = self.shard(world)
        data = bytearray(file.read_bytes())
        position = self.choice.randrange(len(data))
        data[position] ^= 1 << self.choice.randrange(8)
        file.write_bytes(data)
        self.without_crc_check(world, file)
        return f"byte {position} of {file.relative_to(path)} flipped", 2

    def without_crc_check(self, world, file):
        """A run that does not look at everything first must notice when it reads the byte, or not need it."""
        copy = Path(f"{self.folder}.copy")
        shutil.copytree(self.folder, copy)
        for outcome in world.outcomes(quietly, "train", copy, **self.options):
            if outcome.succeeded:
                self.compare(outcome.value, copy)
            else:
                text = str(outcome.exception)
                assert file.name in text and "is damaged" in text, text
        shutil.rmtree(copy)
        os.remove(f"{copy}.log")

    def manifest_missing(self, world):
        os.remove(self.trained_until(world, 3)[-1] / "manifest.json")
        return "manifest.json removed", 2

    def tracker_wrong(self, world):
        self.trained_until(world, 3)
        wrong = self.choice.randrange(4, 1000)
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(wrong))
        return f"the tracker names {wrong}", 3

    def compare(self, found, folder):
        """AssertionError if a step's loss or norm, or a tensor of the last checkpoint, is another one."""
        for name in ("losses", "norms"):
            assert found[name] == self.expected[name], f"{name} {found[name]} instead of {self.expected[name]}"
        paths = [folders.checkpoint_folder(str(path), STEPS) for path in (folder, self.folder.parent / "whole")]
        with CheckpointReader(paths[0]) as last, CheckpointReader(paths[1]) as whole:
            assert last.verify() == [], f"{paths[0]} is damaged"
            wrong = next(differences(last, whole), None)
            assert wrong is None, f"{paths[0]} is not what it must be: {wrong.key}: {wrong.text}"

    def check(self, world, expected):
        """Crash, continue, compare. Returns a text; AssertionError says what is wrong."""
        self.expected = expected
        happened, oldest = KINDS[self.kind](self, world)
        good = [
            path
            for path in folders.candidates(str(self.folder))
            if folders.problem_of(path) is None and CheckpointReader(path).verify() == []
        ]
        newest = int(good[0].rpartition("_")[2]) if good else 0
        assert newest >= oldest, f"{happened}: the newest good checkpoint is of iteration {newest}, expected {oldest} or later"
        for outcome in self.run(world, "train", crc_check=True):
            assert outcome.succeeded, f"{happened}: {outcome.traceback or outcome}"
            resumed = any(f"at iteration {newest}" in line for line in outcome.value["log"])
            assert newest == 0 or resumed, f"{happened}: the run did not resume from iteration {newest}"
        self.compare(outcome.value, self.folder)
        return f"{happened}; resumed from iteration {newest}"


KINDS = {
    "killed in a save": Trial.killed_in_a_save,
    "killed in a save ": Trial.killed_in_a_save,
    "killed at any time": Trial.killed_at_any_time,
    "killed at any time ": Trial.killed_at_any_time,
    "disk full": Trial.full_disk,
    "shard truncated": Trial.truncated,
    "byte flipped": Trial.flipped,
    "manifest missing": Trial.manifest_missing,
    "tracker wrong": Trial.tracker_wrong,
}


def of_posttraining(arguments):
    """Run the trials of a stage of post-training; returns the exit code."""
    from posttrain_crashes import PosttrainTrial

    root, failed = Path(tempfile.mkdtemp(prefix="crash_loop.")), []
    trial = PosttrainTrial(arguments.stage, os.path.abspath(arguments.model), arguments.lora, root)
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        try:
            text = trial.check(seed)
        except AssertionError as error:
            failed.append(seed)
            text = f"FAILED: {error}"
        print(f"{arguments.stage}{' with adapters' * arguments.lora}, seed {seed:4}  {text}", flush=True)
    print(f"{arguments.trials - len(failed)} of {arguments.trials} as they must be" + (f"; failed: {failed}" if failed else ""))
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


def main():
    """Run the trials; returns the exit code."""
    parser = SuggestingParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; the others count on")
    parser.add_argument("--stage", choices=STAGES, help="of post-training, by its command line")
    parser.add_argument("--model", help="with --stage: a small checkpoint with a tokenizer that has a chat template")
    parser.add_argument("--lora", action="store_true", help="with --stage: train adapters")
    arguments = parser.parse_args()
    if arguments.stage:
        if not arguments.model:
            parser.error("--stage needs --model FOLDER")
        return of_posttraining(arguments)
    from mindspeed_ms.testing.worlds import World, close_nursery

    root = tempfile.mkdtemp(prefix="crash_loop.")
    world, failed, counts = World(2), [], {}
    world(quietly, "train", Path(root) / "warm")
    started = time.monotonic()
    expected = world(quietly, "train", Path(root) / "whole")[0]
    seconds = time.monotonic() - started
    print(
        f"{arguments.trials} trials, seeds {arguments.seed} to {arguments.seed + arguments.trials - 1}; a whole run takes "
        f"{seconds:.1f} s",
        flush=True,
    )
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        trial = Trial(seed, root, seconds)
        counts[trial.kind.strip()] = counts.get(trial.kind.strip(), 0) + 1
        settings = "asynchronous" if trial.options["async_save"] else "synchronous"
        settings += f", {trial.options['ckpt_format'] or 'our format'}"
        try:
            text = trial.check(world, expected)
            shutil.rmtree(trial.folder)
        except AssertionError as error:
            failed.append(seed)
            text = f"FAILED: {error} (see {trial.folder})"
        print(f"seed {seed:4}  {trial.kind.strip():18}  {settings:26}  {text}", flush=True)
    world.close()
    close_nursery()
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    print(f"{arguments.trials - len(failed)} of {arguments.trials} as they must be" + (f"; failed: {failed}" if failed else ""))
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
