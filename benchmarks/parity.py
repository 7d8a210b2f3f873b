"""Largest relative difference from recorded Megatron-LM runs over all steps, per recording and layout.

    python benchmarks/parity.py            # needs the recordings' folder or the committed figures, see tests/parity

Prints loss and gradient-norm differences; exits 1 above 1e-5 (loss) or 2e-5 (gradient norm).
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindspeed_ms.testing.worlds import World, close_nursery
from tests.parity import recordings, runner
from tests.parity.layouts import LAYOUTS, is_available, padded_vocabulary, tensor_parallel_limit

LIMITS = {"loss": 1e-5, "grad_norm": 2e-5}


def difference(world, recording, layout):
    """{"loss": ..., "grad_norm": ...}: the largest relative difference over the steps and ranks."""
    size = layout.tensor_parallel_size
    flags = [*layout.flags, "--padded-vocab-size", str(padded_vocabulary(recording, size))]
    weights = runner.our_arrays(recording.arrays("w0")) if recording.path is not None else None
    results = world(runner.run, recording.flags, flags, recording.batches, weights)
    return {key: max(np.abs(np.array(result[key]) / recording.figures[key] - 1).max() for result in results) for key in LIMITS}


def main():
    """Print the table; exit code 1 if a limit is missed."""
    missed = False
    sys.stdout.write("| recording | " + " | ".join(LAYOUTS) + " |\n|---|" + "---|" * len(LAYOUTS) + "\n")
    worlds = {layout.world: World(layout.world) for layout in LAYOUTS.values()}
    for name in recordings.available("single_"):
        recording = recordings.load(name)
        if not is_available(recording):
            continue
        cells = []
        for layout in LAYOUTS.values():
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
