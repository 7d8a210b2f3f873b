"""Largest relative difference from recorded Megatron-LM runs over all steps, per recording and layout.

    python benchmarks/parity.py [--recordings single_llama ...] [--layouts tp1 tp2 ...]

Recordings are those of the folder MINDSPEED_MS_GOLDEN, or the figures in tests/parity/figures. Prints loss and gradient-norm
differences; exits 1 above 1e-5 (loss) or 2e-5 (gradient norm).
"""

import sys

import numpy as np

from mindspeed_ms.core.logging import logger
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import LAYOUTS, padded_vocabulary, tensor_parallel_limit
from mindspeed_ms.testing.worlds import World, close_nursery

LIMITS = {"loss": 1e-5, "grad_norm": 2e-5}


def quiet_run(*arguments):
    """`runner.run` without log lines in the table."""
    logger.setLevel("ERROR")
    return runner.run(*arguments)


def difference(world, recording, layout):
    """{"loss": ..., "grad_norm": ...}: the largest relative difference over the steps and ranks."""
    size = layout.tensor_parallel_size
    flags = [*layout.flags, "--padded-vocab-size", str(padded_vocabulary(recording, size))]
    weights = runner.our_arrays(recording.arrays("w0")) if recording.path is not None else None
    results = world(quiet_run, recording.flags, flags, recording.batches, weights)
    return {key: max(np.abs(np.array(result[key]) / recording.figures[key] - 1).max() for result in results) for key in LIMITS}


def main():
    """Print the table; exit code 1 if a limit is missed."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recordings", nargs="+", default=recordings.available("single_"), metavar="NAME", help="default: all")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="default: all")
    options = parser.parse_args()
    layouts = [LAYOUTS[name] for name in options.layouts]
    missed = False
    sys.stdout.write("| recording | " + " | ".join(options.layouts) + " |\n|---|" + "---|" * len(layouts) + "\n")
    worlds = {layout.world: World(layout.world) for layout in layouts}
    for name in options.recordings:
        recording = recordings.load(name)
        cells = []
        for layout in layouts:
            if layout.tensor_parallel_size > tensor_parallel_limit(recording):
                cells.append("refused")
                continue
            found = difference(worlds[layout.world], recording, layout)
            missed = missed or any(not found[key] <= limit for key, limit in LIMITS.items())
            cells.append(f"{found['loss']:.1e} / {found['grad_norm']:.1e}")
        sys.stdout.write(f"| {name.removeprefix('single_')} | " + " | ".join(cells) + " |\n")
        sys.stdout.flush()
    for world in worlds.values():
        world.close()
    close_nursery()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
