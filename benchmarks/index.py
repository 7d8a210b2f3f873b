"""Time and memory of building the indices of large data, beside Megatron's C++ helper.

    python benchmarks/index.py [--peer-python PYTHON]    # a Python that has megatron-core

Ten million documents, blends of 1e8 samples; `--scale 0.01` for a quick look. With a peer, every array must be equal and no
builder slower than the C++ helper (beyond 5 % of noise), else it exits 1.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from mindspeed_ms.spelling import SuggestingParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NOISE = 1.05
REPEATS = 3


def documents(scale):
    """(lengths, shuffled documents, tokens) of ten million documents of 1 to 2000 tokens."""
    random, count = np.random.RandomState(0), int(10_000_000 * scale)
    lengths, order = random.randint(1, 2001, count).astype(np.int32), np.arange(count, dtype=np.int32)
    random.shuffle(order)
    return lengths, order, int(lengths.sum(dtype=np.int64))


def shares(parts):
    """Weights of a blend."""
    weights = np.random.RandomState(parts).rand(parts) + 0.01
    return (weights / weights.sum()).tolist()


def ours():
    """The three builders of this package."""
    from mindspeed_ms.core.datasets import helpers

    return helpers.build_sample_idx, helpers.build_blending_indices, helpers.build_exhaustive_blending_indices


def theirs():
    """The same of megatron-core."""
    from megatron.core.datasets import helpers

    def arrays(size):
        return np.zeros(size, np.int16), np.zeros(size, np.int64)

    def blend(weights, size):
        result = arrays(size)
        helpers.build_blending_indices(*result, np.array(weights), len(weights), size, False)
        return result

    def exhaustive(sizes):
        result = arrays(sum(sizes))
        helpers.build_exhaustive_blending_indices(*result, np.array(sizes, np.int64), len(sizes))
        return result

    return helpers.build_sample_idx, blend, exhaustive


def measure(builders, scale):
    """{name: [seconds, check sum]} of all cases; the shortest of some repetitions."""
    sample_idx, blend, exhaustive = builders
    lengths, order, tokens = documents(scale)
    sample_idx(lengths[:9], np.arange(9, dtype=np.int32), 5, 1, int(lengths[:9].sum()))  # compiles
    for parts in (2, 40):
        blend(shares(parts), 50)
        exhaustive([3] * parts)
    cases = {
        f"samples of {length} tokens": lambda length=length: sample_idx(lengths, order, length, 1, tokens)
        for length in (512, 4096)
    }
    cases |= {f"blend of {parts}": lambda parts=parts: blend(shares(parts), int(1e8 * scale)) for parts in (2, 8)}
    cases |= {f"blend of {parts}, 1/20": lambda parts=parts: blend(shares(parts), int(5e6 * scale)) for parts in (16, 100)}
    cases |= {
        f"all of {parts}": lambda parts=parts: exhaustive([int(1e7 * scale / parts) + part for part in range(parts)])
        for parts in (2, 30)
    }
    results = {}
    for name, case in cases.items():
        best = float("inf")
        for _ in range(REPEATS):
            arrays = None  # the arrays of the repetition before
            start = time.perf_counter()
            arrays = case()
            best = min(best, time.perf_counter() - start)
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        results[name] = [best, [f"{array.dtype} {array.shape} {zlib.crc32(array.data)}" for array in arrays]]
    return results


def main():
    """Print the table; exit code 1 if something differs or is slower than the C++ helper."""
    parser = SuggestingParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--peer-python", help="a Python that has megatron-core")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        sys.stdout.write(json.dumps(measure(theirs(), args.scale)))
        return
    mine, peer = measure(ours(), args.scale), {}
    if args.peer_python:
        printed = subprocess.run(
            [args.peer_python, __file__, "--as-peer", "--scale", str(args.scale)],
            check=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ""},
        ).stdout
        peer = json.loads(printed.splitlines()[-1])
    failed = False
    sys.stdout.write("| index | s | s, C++ helper | equal |\n|---|---|---|---|\n")
    for name, (seconds, sums) in mine.items():
        cells = ["", ""]
        if name in peer:
            failed = failed or sums != peer[name][1] or seconds > peer[name][0] * NOISE
            cells = [f"{peer[name][0]:.3f}", "yes" if sums == peer[name][1] else "NO"]
        sys.stdout.write(f"| {name} | {seconds:.3f} | {cells[0]} | {cells[1]} |\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stdout.write(f"\npeak memory {peak:.2f} GB, of which a blend of 1e8 samples is 1.00\n" if args.scale == 1 else "")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
