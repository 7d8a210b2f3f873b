"""What each pipeline stage keeps at its peak, counted from live objects: 1F1B and interleaved, with and without recomputation.

    python benchmarks/pipeline_memory.py            # 4 stages, 8 layers, 8 micro-batches
    python benchmarks/pipeline_memory.py --stages 2 --layers 8 --micro 6 --hidden 256

Tensors are counted where operators pack them for the backward (saved-tensor hooks), bytes once per memory; outputs are those
that were sent to the next stage. Exits 1 if 1F1B ever has more than pp - r micro-batches in flight on stage r, or full
recomputation keeps another number of tensors than one per recomputed group of layers.
"""

import math
import sys

from mindspeed_ms.core.logging import logger
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.live_tensors import measure
from mindspeed_ms.testing.worlds import World, close_nursery

MIB = 1 << 20
HEADER = (
    "schedule",
    "recomputed",
    "stage",
    "in flight",
    "bound",
    "layer tensors per micro-batch",
    "saved tensors",
    "saved MiB",
    "sent outputs MiB",
    "buffers MiB",
    "VmRSS + MiB",
)


def quietly_measure(fields, layout, micro_batches):
    """`measure` without log lines, after a step of a tiny model, so that VmRSS grows by the model and not by code."""
    logger.setLevel("ERROR")
    tiny = {"hidden_size": 32, "ffn_hidden_size": 64, "seq_length": 16}
    measure({**fields, **tiny}, layout, micro_batches)
    return measure(fields, layout, micro_batches)


def cases(options):
    """(schedule, what is recomputed, model fields, layout fields, group of layers that keeps one tensor or None)."""
    pp = options.stages
    chunks = options.layers // pp // 2  # layers of a chunk with two chunks
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    yield "1F1B", "nothing", {}, {}, None
    yield "1F1B, outputs kept", "nothing", {}, {"deallocate_pipeline_outputs": False}, None
    yield "1F1B", "core attention", {"recompute_granularity": "selective"}, {}, None
    yield "1F1B", "each layer", {**full, "recompute_num_layers": 1}, {}, 1
    yield "1F1B", "2 layers at once", {**full, "recompute_num_layers": 2}, {}, 2
    yield "1F1B", "list: first of each stage", {}, {"recompute": [1] * pp}, None
    if chunks:
        virtual = {"virtual_pipeline_model_parallel_size": 2}
        yield "interleaved x2", "nothing", {}, virtual, None
        yield "interleaved x2", "each layer", {**full, "recompute_num_layers": 1}, virtual, 1


def bound(stage, options, interleaved):
    """Micro-batches (of a chunk) that may be in flight on a stage."""
    behind = options.stages - stage - 1
    return min(2 * behind + options.stages + 1, 2 * options.micro) if interleaved else min(behind + 1, options.micro)


def row(case, result, options):
    """(cells of the table, whether a limit is broken)."""
    schedule, recomputed, _, layout, group = case
    interleaved = "virtual_pipeline_model_parallel_size" in layout
    layers = options.layers // options.stages // (2 if interleaved else 1)
    limit, peak = bound(result["stage"], options, interleaved), result["peak"]
    broken = result["most_micro_batches"] > limit or result["left"] > 0
    if group is not None:
        broken = broken or result["layer_tensors"] != [math.ceil(layers / group)]
    cells = (
        schedule,
        recomputed,
        result["stage"],
        result["most_micro_batches"],
        limit,
        "/".join(map(str, result["layer_tensors"])),
        peak["tensors"],
        f"{peak['saved_bytes'] / MIB:.2f}",
        f"{peak['output_bytes'] / MIB:.2f}",
        f"{result['buffer_bytes'] / MIB:.2f}",
        f"{result['resident_bytes'] / MIB:.1f}",
    )
    return cells, broken


def main():
    """Print the table; exit code 1 if a limit is broken."""
    parser = SuggestingParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages")
    parser.add_argument("--layers", type=int, default=8, help="transformer layers, a multiple of the stages")
    parser.add_argument("--micro", type=int, default=8, help="micro-batches per step, a multiple of the stages")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--sequence", type=int, default=512, help="sequence length")
    options = parser.parse_args()
    if options.stages < 2 or options.layers % options.stages or options.micro % options.stages:
        parser.error("--stages must be above 1 and divide --layers and --micro")
    # without the final norm nothing but transformer layers saves tensors inside the block
    fields = {
        **job.UNTIED,
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "seq_length": options.sequence,
        "ffn_hidden_size": 2 * options.hidden,
        "use_final_norm": False,
    }
    missed = False
    sys.stdout.write("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|\n")
    for case in cases(options):
        layout = {"pipeline_model_parallel_size": options.stages, **case[3]}
        with World(options.stages) as world:  # new processes: memory of the case before would be used again
            results = world(quietly_measure, {**fields, **case[2]}, layout, options.micro)
        for result in results:
            cells, broken = row(case, result, options)
            missed = missed or broken
            sys.stdout.write("| " + " | ".join(map(str, cells)) + (" | BROKEN\n" if broken else " |\n"))
        sys.stdout.flush()
    close_nursery()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
