"""Whole jobs of gpt/pretrain_gpt.sh on a model so small that only the start takes time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "gpt" / "pretrain_gpt.sh"
CPU_DEFAULT = [str(REPOSITORY / "configs" / "cpu_default" / f"{name}.yaml") for name in ("model", "accelerate", "train")]
TINY = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--padded-vocab-size 320 --vocab-size 320 --micro-batch-size 4 --eval-iters 1 --no-sample"
).split()


class Job:
    """One call of the script in `folder`, with a text file made there and the tiny model.

    Args:
        folder (Path): its working directory.
        arguments (list[str]): further flags.
        terminal (Optional[int]): file descriptor of a terminal to run on, in a session of its own.
    """

    def __init__(self, folder, arguments, terminal=None):
        self.folder = Path(folder)
        text = self.folder / "text.txt"
        if not text.exists():
            text.write_text(Path(os.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        self.output = self.folder / "printed.txt"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), "--config", *CPU_DEFAULT, *TINY, "--data-path", str(text), *arguments],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )

    def wait(self, seconds=150):
        """The exit code; a job that does not end is killed and fails the test."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job did not end within {seconds} s:\n{self.printed()[-4000:]}") from None

    def kill(self):
        """End everything this job started, by process id."""
        for process in [*self.ranks().values(), *self.launchers(), self.process.pid]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def printed(self):
        """What the script has printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def log(self, rank):
        """The log of a rank so far."""
        path = self.folder / "msrun_log" / f"worker_{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_for(self, text, ranks=(0, 1), seconds=150):
        """Return as soon as the logs of these ranks hold `text`."""
        end = time.monotonic() + seconds
        while not all(text in self.log(rank) for rank in ranks):
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no {text!r} in the logs:\n{self.log(0)[-4000:]}")
            time.sleep(0.1)

    def launchers(self):
        """Process ids of msrun: children of the script that run it."""
        return [
            process
            for process, parent in _parents().items()
            if parent == self.process.pid and b"msrun" in _read(f"/proc/{process}/cmdline")
        ]

    def ranks(self):
        """{rank: process id} of the ranks that are running."""
        found, launchers = {}, self.launchers()
        for process, parent in _parents().items():
            if parent not in launchers or b"pretrain_gpt.py" not in _read(f"/proc/{process}/cmdline"):
                continue  # msrun also starts processes that show logs
            variables = _read(f"/proc/{process}/environ").split(b"\0")
            if b"MS_ROLE=MS_WORKER" in variables:
                rank = next(item for item in variables if item.startswith(b"RANK_ID="))
                found[int(rank.partition(b"=")[2])] = process
        return found

    def metrics(self):
        """All lines of output/metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "output" / "metrics.jsonl").read_text().splitlines()]

    def losses(self):
        """{iteration: training loss} of output/metrics.jsonl."""
        return {line["iteration"]: line["loss"] for line in self.metrics() if "loss" in line}


def _heed_interrupts():
    """A background job, as a test in CI may be, starts with SIGINT ignored, which a shell then cannot trap."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment():
    """The variables of a job: this interpreter first, this checkout importable, nothing of an outer launch."""
    result = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "RANK_", "MINDSPEED_MS_"))}
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), result["PATH"]])
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), result.get("PYTHONPATH")]))
    result["MINDSPEED_MS_DEVICE"] = "CPU"
    return result


def _parents():
    """{process id: that of its parent} of all processes."""
    result = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            words = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(words) > 1:
                result[int(name)] = int(words[1])
    return result


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
