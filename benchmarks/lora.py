"""Seconds of a step and peak memory of a training with low-rank adapters, beside PEFT and torch.

    bash examples/smollm2/convert.sh FOLDER
    python benchmarks/lora.py FOLDER                        # ours
    python benchmarks/lora.py FOLDER --peer-python PATH     # PATH: Python of an environment with [peer]

SmolLM2-135M, fp32, adapters of rank 8 on all linears of the layers, sequences of 256 tokens, micro-batch 2, global batch 4.
Each side is a process of its own, and they take turns; the median of a step counts. Exits 1 above 0.9 of the peer's seconds or
1.0 of its memory.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mindspeed_ms.spelling import SuggestingParser

HERE = Path(__file__).parent
MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
THEIR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MICRO, ACCUMULATED, LENGTH = 2, 2, 256
LIMITS = {"seconds": 0.9, "peak": 1.0}


class Rows:
    """Samples of the batches, by index."""

    def __init__(self, data):
        self.tokens, self.labels = (data[name].reshape(-1, LENGTH) for name in ("tokens", "labels"))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        mask = np.ones(LENGTH, np.float32)
        return {"tokens": self.tokens[index], "labels": self.labels[index], "loss_mask": mask}


def serve(folder, batches, rank, steps):
    """Our side: numbers of steps on standard input, a JSON line for each, as `peer_lora.py`."""
    from mindspeed_ms.config import argument_parser, init_configs_from_args
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.testing.memory import resident_bytes
    from mindspeed_ms.training import initialize
    from mindspeed_ms.training.training import build_trainer, training_run

    data = np.load(batches)
    with tempfile.TemporaryDirectory() as output:
        words = (
            f"--use-checkpoint-args --load {folder} --finetune --save {output} --seq-length {LENGTH} --micro-batch-size {MICRO}"
        )
        words += f" --global-batch-size {MICRO * ACCUMULATED} --train-iters {steps} --lr 1e-3 --lr-decay-style constant"
        words += f" --weight-decay 0 --clip-grad 1.0 --lora-r {rank} --lora-alpha {2 * int(rank)}"
        words += f" --lora-target-modules {' '.join(MODULES)} --use-flash-attn"
        config = init_configs_from_args(argument_parser().parse_args(words.split()))
        initialize.set_all_config(config)

        def provider(pre_process=True, post_process=True):
            return GPTModel(config.model_config, pre_process=pre_process, post_process=post_process)

        with training_run(config):
            trainer = build_trainer(config, provider, loaders=(Rows(data), None, None))
            trainer.checkpoints.load()
            done = 0
            for line in sys.stdin:
                seconds, losses = [], []
                for _ in range(int(line)):
                    begin, done = time.perf_counter(), done + 1
                    report, _ = trainer.train_step(trainer.data.of_step(), done, False)
                    seconds.append(time.perf_counter() - begin)
                    losses.append(report.loss)
                answer = {"seconds": seconds, "losses": losses, "peak": resident_bytes("VmHWM")}
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()


class Side:
    """Process that makes steps on demand."""

    def __init__(self, command):
        self.command = list(map(str, command))
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds, self.losses, self.peak = [], [], 0

    def steps(self, count):
        """Make `count` steps."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                break
        else:
            raise SystemExit(f"{' '.join(self.command)} ended with code {self.process.wait()}: run it by hand to see why.")
        self.seconds += answer["seconds"]
        self.losses += answer["losses"]
        self.peak = answer["peak"]


def main(arguments=None):
    """Print the table; exit code 1 if a limit is missed."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/smollm2/convert.sh made")
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each side (default %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default %(default)s)")
    parser.add_argument("--serve", type=Path, help="batches: be our side")
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.folder, options.serve, options.rank, 2 * options.steps)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder, "batches.npz")
        ids = np.random.default_rng(0).integers(0, 40000, (4, ACCUMULATED, MICRO, LENGTH + 1))
        np.savez(batches, tokens=ids[..., :-1], labels=ids[..., 1:])
        own = [sys.executable, HERE / "lora.py", options.folder / "hf", "--serve", batches, "--steps", options.steps]
        sides = {"ours": Side([*own, "--rank", options.rank])}
        if options.peer_python:
            peer = [options.peer_python, HERE / "peer_lora.py", options.folder / "hf", batches, options.rank]
            sides["peer"] = Side([*peer, ",".join(THEIR_MODULES)])
        for side in sides.values():
            side.steps(2)
            side.seconds.clear()
        for _ in range(options.steps):
            for side in sides.values():
                side.steps(1)
        for side in sides.values():
            side.process.stdin.close()
            side.process.wait()
    sys.stdout.write("| side | seconds of a step | peak memory | loss of the last step |\n|---|---|---|---|\n")
    found = {name: {"seconds": statistics.median(side.seconds), "peak": side.peak} for name, side in sides.items()}
    for name, one in found.items():
        sys.stdout.write(f"| {name} | {one['seconds']:.3f} | {one['peak'] / 1e9:.3f} GB | {sides[name].losses[-1]:.4f} |\n")
    if "peer" not in found:
        return 0
    ratios = {name: found["ours"][name] / found["peer"][name] for name in LIMITS}
    sys.stdout.write(f"\nours / peer: {ratios['seconds']:.2f} of the seconds, {ratios['peak']:.2f} of the memory\n")
    return int(any(ratios[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
