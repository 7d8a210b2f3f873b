"""Bytes per rank of weights, gradients, master weights and moments at each ZeRO level, counted and by formula.

    python benchmarks/optimizer_memory.py [--layers 6] [--hidden 512] [--ranks 1 2 4] [--precision bf16]

Counted: the sizes of the buffers that a rank holds between steps. Formula: elements (without padding) times bytes per
element, divided by the ranks that share them. RSS: growth of the process (VmRSS) from before the model was built to after
two steps, freed memory given back; "rest" is what it has beyond the counted sum: code, caches of operators, memory pools.
It is nearly the same in all cases, so differences between levels are those of the buffers.
"""

import argparse
import ctypes
import gc
import json
import sys

import numpy as np

from mindspeed_ms.core.logging import logger
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing.memory import resident_bytes
from mindspeed_ms.testing.worlds import World, close_nursery

FLAGS = [
    "--num-attention-heads",
    "8",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--micro-batch-size",
    "1",
    "--lr",
    "1e-3",
    "--train-iters",
    "4",
    "--vocab-size",
    "4095",
    "--tokenizer-type",
    "NullTokenizer",
    "--swiglu",
    "--disable-bias-linear",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--untie-embeddings-and-output-weights",
    "--seed",
    "1",
]
KINDS = ("weights", "gradients", "masters", "moments")


def settled_bytes():
    """VmRSS of this process after freed memory was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def measure(sizes, level, precision):
    """Build a model, train two steps and count; runs in a rank of a forked world."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.config.arguments import argument_parser
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    logger.setLevel("ERROR")  # no log lines in the table
    flags = [
        *FLAGS,
        "--num-layers",
        str(sizes["layers"]),
        "--hidden-size",
        str(sizes["hidden"]),
        "--ffn-hidden-size",
        str(4 * sizes["hidden"]),
        "--global-batch-size",
        str(comm.get_world_size()),
    ]
    flags += [f"--{precision}"] if precision != "fp32" else []
    all_config = init_configs_from_args(argument_parser().parse_args(flags))
    all_config.parallel_config.zero_level = level
    set_parallel_context(all_config.parallel_config)
    set_seed(1)
    before = settled_bytes()
    chunk, optimizer = train(all_config)
    after = settled_bytes()
    buffers = chunk.buffers
    held = {
        "weights": sum(buffer.param_buffer.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_buffer.nbytes for buffer in buffers),
        "masters": sum(shard.nbytes for shard in optimizer.shards),
        "moments": optimizer.update.nbytes,
    }
    padded = sum(buffer.layout.numel for buffer in buffers)
    return {
        "held": held,
        "numel": sum(buffer.layout.numel_unpadded for buffer in buffers),
        "padded": padded,
        "rss": after - before,
    }


def train(all_config):
    """Two steps on made-up tokens; returns the chunk and its optimizer."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.data import init_batch_sizes
    from mindspeed_ms.training.forward_step import forward_step
    from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
    from mindspeed_ms.training.train_step import TrainOneStep

    init_batch_sizes(all_config)

    def model_provider(pre_process=True, post_process=True):
        return GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)

    model = get_model(model_provider, all_config)
    optimizer = get_optimizer(all_config, model)
    scheduler = get_optimizer_param_scheduler(optimizer, all_config, 4)
    step = TrainOneStep(model, optimizer, scheduler, forward_step)
    tokens = np.arange(32, dtype=np.int32).reshape(1, 32)
    batch = {"tokens": Tensor(tokens), "labels": Tensor(tokens + 1), "loss_mask": Tensor(np.ones((1, 32), np.float32))}
    for number in range(2):
        step(iter([batch]), number + 1)
    return model[0], optimizer


def formula(numel, size, level, precision):
    """Bytes of each kind by the formula."""
    rank = int(level[1]) if level else 0
    width = 4 if precision == "fp32" else 2
    return {
        "weights": width * numel / (size if rank >= 3 else 1),
        "gradients": (4 if precision != "fp16" else 2) * numel / (size if rank >= 2 else 1),
        "masters": (0 if precision == "fp32" else 4) * numel / (size if rank >= 1 else 1),
        "moments": 8 * numel / (size if rank >= 1 else 1),
    }


def main():
    """Print a table, or with --json one line per case; exit code 1 if a kind of buffer is not what the formula says."""
    parser = SuggestingParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = []
    for size in options.ranks:
        for level in (None, "z1", "z2", "z3"):
            world = World(size)  # a fresh process for each case: its RSS starts low
            try:
                found = world(measure, {"layers": options.layers, "hidden": options.hidden}, level, options.precision)[0]
            finally:
                world.close()
            expected = formula(found["numel"], size, level, options.precision)
            padding = found["padded"] / found["numel"]
            lines.append(
                {
                    "dp": size,
                    "level": level or "none",
                    "held": found["held"],
                    "formula": expected,
                    "rss": found["rss"],
                    "padding": padding - 1,
                    "missed": [
                        kind
                        for kind in KINDS
                        if not expected[kind] <= found["held"][kind] <= expected[kind] * padding * (1 + 1e-9)
                    ],
                }
            )
    close_nursery()
    report(lines, options)
    return int(any(line["missed"] for line in lines))


def report(lines, options):
    """Print the cases."""
    if options.json:
        for line in lines:
            print(json.dumps(line))
        return
    print("MB per rank, counted (formula)")
    print("dp  level  " + "".join(f"{kind:>18}" for kind in KINDS) + f"{'sum':>18}{'RSS growth':>12}{'rest':>8}")
    for line in lines:
        pairs = [(line["held"][kind], line["formula"][kind]) for kind in KINDS]
        pairs.append((sum(held for held, _ in pairs), sum(expected for _, expected in pairs)))
        cells = "".join(f"{held / 1e6:9.2f} ({expected / 1e6:6.2f})" for held, expected in pairs)
        rss = line["rss"] / 1e6
        print(f"{line['dp']:2d}  {line['level']:5s}  {cells}{rss:12.1f}{rss - pairs[-1][0] / 1e6:8.1f}")
    for line in lines:
        if line["missed"]:
            print(
                f"MISSED  dp {line['dp']}, {line['level']}: {', '.join(line['missed'])} not between the formula and its padding"
            )
    print(f"padding: at most {max(line['padding'] for line in lines):.3%}")


if __name__ == "__main__":
    sys.exit(main())
