"""Milliseconds of one training step beside megatron-core's, alternating in one run; exits 1 above the stated ratio.

    python benchmarks/step.py                      # this package alone
    python benchmarks/step.py --peer-python PATH   # beside megatron-core (PATH: Python of an environment with `[peer]`)

A step is forward + backward + clip + AdamW in fp32: 4 layers, hidden 512, 8 heads, sequence 256, vocabulary 8192,
micro-batch 2, one rank, as many threads as the machine has cores (at most 2). Medians over alternating rounds; torch's
AdamW is timed plain and fused and the faster one counts.
"""

import os
import statistics
import sys
import time

import numpy as np
import shapes
from peer import Peer

from mindspeed_ms.spelling import SuggestingParser


def flags_of(name):
    """Megatron flags of a shape."""
    shape = shapes.SHAPES[name]
    flags = [
        "--num-layers",
        shapes.LAYERS,
        "--hidden-size",
        shapes.HIDDEN,
        "--num-attention-heads",
        shapes.HEADS,
        "--ffn-hidden-size",
        shape["ffn"],
        "--seq-length",
        shapes.SEQUENCE,
        "--max-position-embeddings",
        shapes.SEQUENCE,
        "--padded-vocab-size",
        shapes.VOCABULARY,
        "--micro-batch-size",
        shapes.MICRO_BATCH,
        "--global-batch-size",
        shapes.MICRO_BATCH,
        "--train-iters",
        1000,
        "--lr",
        shapes.LEARNING_RATE,
        "--lr-decay-style",
        "constant",
        "--adam-beta1",
        shapes.BETAS[0],
        "--adam-beta2",
        shapes.BETAS[1],
        "--adam-eps",
        shapes.EPSILON,
        "--weight-decay",
        shapes.WEIGHT_DECAY,
        "--clip-grad",
        shapes.CLIP,
        "--attention-dropout",
        0,
        "--hidden-dropout",
        0,
        "--seed",
        shapes.SEED,
        "--normalization",
        shape["norm"],
        "--position-embedding-type",
        "rope" if shape["rope"] else "learned_absolute",
    ]
    flags += ["--swiglu"] if shape["activation"] == "swiglu" else []
    flags += [] if shape["bias"] else ["--disable-bias-linear"]
    flags += [] if shape["tied"] else ["--untie-embeddings-and-output-weights"]
    return [str(flag) for flag in flags]


def build_step(name):
    """A function that runs one training step of this package and returns its loss."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.data import init_batch_sizes
    from mindspeed_ms.training.forward_step import forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    config = init_configs_from_args(argument_parser().parse_args(flags_of(name)))
    if not parallel_state.model_parallel_is_initialized():
        set_parallel_context(config.parallel_config)
    calculator.destroy_num_microbatches_calculator()
    init_batch_sizes(config)
    set_seed(shapes.SEED)
    model = get_model(
        lambda pre_process=True, post_process=True: GPTModel(
            config.model_config, pre_process=pre_process, post_process=post_process
        ),
        config,
    )
    optimizer = get_optimizer(config, model)
    scheduler = get_optimizer_param_scheduler(optimizer, config, 1000)
    run_step = TrainOneStep(model, optimizer, scheduler, forward_step)
    batch = make_batch()

    def step():
        report, _ = run_step(iter([batch]), 1)
        return next(iter(report.losses.values()))

    return step


def make_batch():
    """One random micro-batch."""
    from mindspore import Tensor

    generator = np.random.RandomState(shapes.SEED)
    tokens = generator.randint(0, shapes.VOCABULARY, (shapes.MICRO_BATCH, shapes.SEQUENCE + 1)).astype(np.int32)
    positions = np.tile(np.arange(shapes.SEQUENCE, dtype=np.int32), (shapes.MICRO_BATCH, 1))
    arrays = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": positions,
        "loss_mask": np.ones_like(positions, np.float32),
    }
    return {key: Tensor(np.ascontiguousarray(value)) for key, value in arrays.items()} | {"attention_mask": None}


def operators_per_layer(name):
    """Recorded operators that one more transformer layer adds to a forward."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser
    from mindspeed_ms.core import autograd
    from mindspeed_ms.legacy.model.gpt_model import GPTModel

    counts = []
    for layers in (1, 2):
        flags = [*flags_of(name), "--num-layers", str(layers)]
        model = GPTModel(init_configs_from_args(argument_parser().parse_args(flags)).model_config)
        counts.append(len(autograd.recorded_operators(model(**make_batch()))))
    return counts[1] - counts[0]


def time_steps(step, repeats):
    """Milliseconds of each of `repeats` steps."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(name, peer, rounds, repeats):
    """One row of the table: our median, the peer's (faster AdamW), their ratio, first losses."""
    step = build_step(name)
    first = step()
    ours, plain, fused, peer_loss = [], [], [], None
    for _ in range(rounds):
        ours += time_steps(step, repeats)
        if peer is not None:
            answer = peer(name, repeats)
            plain, fused, peer_loss = plain + answer["plain"], fused + answer["fused"], answer["loss"]
    row = {"shape": name, "loss": first, "ms": statistics.median(ours), "operators": operators_per_layer(name)}
    if peer is not None:
        row |= {"peer_loss": peer_loss, "plain": statistics.median(plain), "fused": statistics.median(fused)}
        row["ratio"] = row["ms"] / min(row["plain"], row["fused"])
    return row


def main():
    """Print the table; exit code 1 if a ratio is above `--at-most`."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of an environment with the [peer] extra")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--at-most", type=float, default=1.2, help="largest ratio ours / peer")
    parser.add_argument("--shapes", nargs="+", default=list(shapes.SHAPES), choices=list(shapes.SHAPES))
    options = parser.parse_args()
    from mindspeed_ms.core.logging import logger

    logger.setLevel("ERROR")  # no log lines in the table
    threads = str(min(2, os.cpu_count() or 1))
    os.environ.setdefault("MINDSPEED_MS_THREADS", threads)
    os.environ["OMP_NUM_THREADS"] = threads
    peer = Peer(options.peer_python, "peer_megatron.py") if options.peer_python else None
    rows = [measure(name, peer, options.rounds, options.repeats) for name in options.shapes]
    if peer is not None:
        peer.close()
    sys.stdout.write(
        "| shape | ours ms | megatron-core plain AdamW ms | fused ms | ratio | first loss ours / peer | "
        "operators per layer |\n|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        cells = [row["shape"], f"{row['ms']:.0f}"] + [f"{row[k]:.0f}" if k in row else "-" for k in ("plain", "fused")]
        cells += [
            f"{row['ratio']:.2f}" if "ratio" in row else "-",
            f"{row['loss']:.3f} / " + (f"{row['peer_loss']:.3f}" if "peer_loss" in row else "-"),
            str(row["operators"]),
        ]
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
    missed = [row["shape"] for row in rows if row.get("ratio", 0) > options.at_most]
    if missed:
        sys.stdout.write(f"above {options.at_most}: {', '.join(missed)}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
