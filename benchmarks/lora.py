"""Low-rank adapters on SmolLM2-135M beside PEFT and torch: seconds and memory of a step, and what comes of a training.

    bash examples/smollm2/convert.sh FOLDER
    python benchmarks/lora.py FOLDER                            # ours
    python benchmarks/lora.py FOLDER --peer-python PATH         # PATH: Python of an environment with [peer]
    python benchmarks/lora.py FOLDER --peer-python PATH --only steps

64 question-answer pairs, fp32, adapters of rank 8 on all linears of the layers, sequences of 256 tokens, micro-batch 2, global
batch 4.

Answers: `examples/smollm2/sft.sh` trains and `export.sh` exports in a folder of its own. Exits 1 unless the loss halves in 50
steps, at least 60 of the 64 answers come back greedily, the logits of the trained model and of the merged weights agree
within 1e-5 of the largest, and PEFT answers the same with the exported adapters.

Steps: each side is a process of its own with the same tokens, labels and threads, and they take turns; the median counts. First
a pair in each sequence, padded, the loss on its answer; then random tokens, the loss on all. Exits 1 for pairs above 0.9 of the
peer's seconds or 1.0 of its memory, if the losses of the first step differ, or if a step has changed the base.
"""

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lora_answers
import numpy as np

from mindspeed_ms.spelling import SuggestingParser

HERE = Path(__file__).parent
MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
THEIR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MICRO, ACCUMULATED, LENGTH = 2, 2, 256
LIMITS = 0.9, 1.0  # seconds, peak memory
KINDS = ("pairs", "all tokens")
WARM_UP = 2
HALVED_IN, RIGHT_ANSWERS, LOGITS_WITHIN = 50, 60, 1e-5


class Rows:
    """Samples of the batches, by index."""

    def __init__(self, data):
        self.rows = {name: data[name].reshape(-1, LENGTH) for name in ("tokens", "labels", "loss_mask")}

    def __len__(self):
        return len(self.rows["tokens"])

    def __getitem__(self, index):
        return {name: rows[index] for name, rows in self.rows.items()}


def batches_of(pairs, steps):
    """Arrays [steps of both kinds, micro-batches, samples, tokens]: a pair in each sequence, then random tokens."""
    shape = steps, ACCUMULATED, MICRO, LENGTH
    tokens, labels = (np.zeros((steps * ACCUMULATED * MICRO, LENGTH), np.int64) for _ in range(2))
    mask = np.zeros(tokens.shape, np.float32)
    for row in range(len(tokens)):
        prompt, answer = pairs[row % len(pairs)]
        ids = np.array(prompt + answer)
        tokens[row, : len(ids) - 1], labels[row, : len(ids) - 1] = ids[:-1], ids[1:]
        mask[row, len(prompt) - 1 : len(ids) - 1] = 1
    drawn = np.random.default_rng(0).integers(0, 40000, (*shape[:-1], LENGTH + 1))
    second = {"tokens": drawn[..., :-1], "labels": drawn[..., 1:], "loss_mask": np.ones(shape, np.float32)}
    first = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    return {name: np.concatenate([values.reshape(shape), second[name]]) for name, values in first.items()}


def digest(model):
    """Digest of the weights that are frozen."""
    from mindspeed_ms.core import autograd, storage

    total = hashlib.blake2b()
    for _, parameter in sorted(model.parameters_and_names()):
        if not autograd.requires_grad(parameter):
            total.update(storage.host_array(parameter).view(np.uint8).data)
    return total.hexdigest()


def serve(folder, batches, rank, steps):
    """Our side: numbers of steps on standard input, a JSON line for each, as `peer_lora.py`; at the end whether the base is as
    it was."""
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
            done, before = 0, digest(trainer.model[0])
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
            sys.stdout.write(json.dumps({"is_base_equal": digest(trainer.model[0]) == before}) + "\n")


class Side:
    """Process that makes steps on demand."""

    def __init__(self, command):
        self.command = list(map(str, command))
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds, self.losses, self.peak = {kind: [] for kind in KINDS}, [], {}

    def steps(self, kind, count, is_timed=True):
        """Make `count` steps."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                break
        else:
            raise SystemExit(f"{' '.join(self.command)} ended with code {self.process.wait()}: run it by hand to see why.")
        self.seconds[kind] += answer["seconds"] if is_timed else []
        self.losses += answer["losses"]
        self.peak[kind] = answer["peak"]

    def end(self):
        """End the process; returns its last line as JSON, {} if there is none."""
        self.process.stdin.close()
        lines = [line for line in self.process.stdout if line.startswith("{")]
        self.process.wait()
        return json.loads(lines[-1]) if lines else {}


def say(text=""):
    """A line of the report."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(command, log, **environment):
    """Run a command to its end; returns its last line.

    Raises:
        SystemExit: it failed; its last lines.
    """
    with open(log, "w+", encoding="utf-8") as file:
        ended = subprocess.run(
            list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        file.seek(0)
        lines = file.read().splitlines()
    if ended.returncode:
        raise SystemExit("\n".join([*lines[-20:], f"{' '.join(map(str, command))} ended with code {ended.returncode}."]))
    return lines[-1] if lines else ""


def run_example(folder, name, **environment):
    """Run a script of `examples/smollm2` in `folder`."""
    path = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    run(["bash", HERE.parent / "examples" / "smollm2" / name, folder], folder / f"{name}.log", PYTHONPATH=path, **environment)


def answers(folder, peer, train_steps):
    """Train by the example in `folder` and look at what comes of it; returns whether all limits are kept."""
    begin, own = time.perf_counter(), HERE / "lora_answers.py"
    run_example(folder, "sft.sh", STEPS=str(train_steps))
    run_example(folder, "export.sh")
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    found = {}
    for kind in ("live", "adapter", "merged"):
        run([sys.executable, own, folder, folder / f"{kind}.npz", kind], folder / f"{kind}.log")
        found[kind] = np.load(folder / f"{kind}.npz")
    texts = {kind: json.loads(str(found[kind]["answers"])) for kind in ("adapter", "merged")}
    pairs = lora_answers.pairs_of(folder)
    right = sum(text == answer for text, (_, answer) in zip(texts["adapter"], pairs, strict=True))
    size = min(one["logits"].shape[1] for one in found.values())
    live, merged = (found[kind]["logits"][:, :size] for kind in ("live", "merged"))
    apart = float(np.abs(live - merged).max() / np.abs(live).max())
    lines = (folder / "sft" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    first, later = statistics.mean(losses[:5]), statistics.mean(losses[HALVED_IN - 5 : HALVED_IN])
    rows = [
        (f"loss of steps 1-5 and {HALVED_IN - 4}-{HALVED_IN}", f"{first:.3f}, {later:.3f}", "half", later <= first / 2),
        (f"greedy answers after {train_steps} steps", f"{right} of {len(pairs)}", RIGHT_ANSWERS, right >= RIGHT_ANSWERS),
        ("logits of adapters and of merged weights, apart", f"{apart:.1e}", LOGITS_WITHIN, apart <= LOGITS_WITHIN),
        ("greedy answers of merged weights", "the same" if texts["merged"] == texts["adapter"] else "others", "the same",
         texts["merged"] == texts["adapter"]),
    ]  # fmt: skip
    if peer:
        (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
        command = [peer, HERE / "peer_lora_answers.py", folder / "hf", folder / "sft-peft", folder / "pairs.json"]
        theirs = json.loads(run(command, folder / "peer.log"))
        same = sum(one == other for one, other in zip(theirs, texts["adapter"], strict=True))
        rows.append(("of PEFT with the exported adapters the same", f"{same} of {len(pairs)}", "all", same == len(pairs)))
    say(f"examples/smollm2: {seconds:.0f} s from the records to the exported folders, peak memory {peak / 1e9:.2f} GB\n")
    say("| of the training | found | limit |\n|---|---|---|")
    for name, value, limit, is_kept in rows:
        say(f"| {name} | {value} | {limit}{'' if is_kept else ' MISSED'} |")
    return all(row[-1] for row in rows)


def steps(folder, options):
    """Time steps of both sides on the pairs in `folder`; returns whether all limits are kept."""
    batches = folder / "batches.npz"
    np.savez(batches, **batches_of(lora_answers.pairs_of(folder), WARM_UP + options.steps))
    own = [
        sys.executable,
        HERE / "lora.py",
        folder / "hf",
        "--serve",
        batches,
        "--steps",
        options.steps,
        "--rank",
        options.rank,
    ]
    sides = {"ours": Side(own)}
    if options.peer_python:
        peer = [options.peer_python, HERE / "peer_lora.py", folder / "hf", batches, options.rank]
        sides["peer"] = Side([*peer, ",".join(THEIR_MODULES)])
    say("\n| steps | side | seconds | peak memory |\n|---|---|---|---|")
    kept = True
    for kind in KINDS:
        for side in sides.values():
            side.steps(kind, WARM_UP, is_timed=False)
        for _ in range(options.steps):
            for side in sides.values():
                side.steps(kind, 1)
        found = {name: (statistics.median(side.seconds[kind]), side.peak[kind]) for name, side in sides.items()}
        for name, (seconds, peak) in found.items():
            say(f"| {kind} | {name} | {seconds:.3f} | {peak / 1e9:.3f} GB |")
        if "peer" in found:
            ratios = [own / other for own, other in zip(*found.values())]
            is_within = all(ratio <= limit for ratio, limit in zip(ratios, LIMITS))
            kept &= is_within or kind != KINDS[0]
            missed = "" if is_within or kind != KINDS[0] else " MISSED"
            say(f"| {kind} | ours / peer | {ratios[0]:.2f} | {ratios[1]:.2f}{missed} |")
    is_equal = {name: side.end() for name, side in sides.items()}["ours"].get("is_base_equal", False)
    kept &= is_equal
    if "peer" in sides:
        first = [side.losses[0] for side in sides.values()]
        kept &= abs(first[0] - first[1]) < 1e-4 * first[1]
        say(f"\nloss of the first step: {first[0]:.5f}, peer {first[1]:.5f}")
    say(f"base after {2 * (WARM_UP + options.steps)} steps: {'bit-equal' if is_equal else 'CHANGED'}")
    return kept


def main(arguments=None):
    """Print the tables; exit code 1 if a limit is missed."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/smollm2/convert.sh made")
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--only", choices=("answers", "steps"), help="one half of the benchmark")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each side and kind (default %(default)s)")
    parser.add_argument("--train-steps", type=int, default=100, help="of the training (default %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters in the timed steps (default %(default)s)")
    parser.add_argument("--serve", type=Path, help="batches: be our side")
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.folder, options.serve, options.rank, 2 * (WARM_UP + options.steps))
        return 0
    with tempfile.TemporaryDirectory() as work:
        folder, kept = Path(work), True
        (folder / "hf").symlink_to((options.folder / "hf").resolve())
        if options.only != "steps":
            kept &= answers(folder, options.peer_python, options.train_steps)
        else:
            run_example(folder, "sft.sh", STEPS="1")  # for its data
        if options.only != "answers":
            kept &= steps(folder, options)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
