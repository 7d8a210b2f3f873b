"""Command line that shows a pipeline schedule; `schedule_order` builds it.

    python -m mindspeed_ms.layout.pipeline_plan --pp 4 --vpp 2 --micro 8 --png out.png

prints the schedule with its bubble fraction and the peak number of live activations of each stage.
"""

import sys

from mindspeed_ms.layout.pipeline_drawing import describe, draw_png, draw_text
from mindspeed_ms.layout.pipeline_simulator import PlanDeadlock, Simulation, peak_live_activations, simulate
from mindspeed_ms.layout.schedule_order import BACKWARD, FORWARD, Communicate, Compute, PipelinePlan, Transfer, build_plan

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Communicate",
    "Compute",
    "PipelinePlan",
    "PlanDeadlock",
    "Simulation",
    "Transfer",
    "build_plan",
    "describe",
    "draw_png",
    "draw_text",
    "peak_live_activations",
    "plan_of",
    "simulate",
]


def plan_of(model, micro_batches):
    """PipelinePlan of a ModelDescription for `micro_batches` micro-batches per step. Errors as `build_plan`."""
    stages = model.stages
    group_size = model.parallel.microbatch_group_size_per_virtual_pipeline_stage
    return build_plan(stages.pp, micro_batches, stages.vpp, group_size)


def _arguments():
    from mindspeed_ms.spelling import SuggestingParser  # the room itself imports nothing else

    parser = SuggestingParser(prog="python -m mindspeed_ms.layout.pipeline_plan", description="Show a pipeline schedule.")
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="chunks per stage")
    parser.add_argument("--micro", type=int, required=True, help="micro-batches per step")
    parser.add_argument("--group-size", type=int, help="micro-batches that one chunk runs in a row (default: pp)")
    parser.add_argument("--forward-only", action="store_true", help="evaluation: no backward")
    parser.add_argument("--overlap", action="store_true", help="transfers overlap with computation")
    parser.add_argument("--forward-time", type=float, default=1.0, help="time of one chunk's forward")
    parser.add_argument("--backward-time", type=float, default=2.0, help="time of one chunk's backward")
    parser.add_argument("--transfer-time", type=float, default=0.0, help="time of one transfer")
    parser.add_argument("--buffering", type=int, help="tensors that fit between two stages (default: no limit)")
    parser.add_argument("--png", help="also write a picture to this file")
    return parser


def main(arguments=None):
    """Entry point of the command line; returns the exit code."""
    options = _arguments().parse_args(arguments)
    try:
        plan = build_plan(options.pp, options.micro, options.vpp, options.group_size, options.forward_only, options.overlap)
        simulation = simulate(plan, options.forward_time, options.backward_time, options.transfer_time, options.buffering)
        lines = [describe(plan), draw_text(simulation), simulation.summary()]
        if options.png:
            draw_png(simulation, options.png)
            lines.append(f"picture: {options.png}")
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
