"""Drawing of a simulated pipeline schedule, as text and as a picture."""

from mindspeed_ms.layout.pipeline_simulator import peak_live_activations
from mindspeed_ms.layout.schedule_order import FORWARD

_EDGE = 1e-9


def _label(step, vpp):
    """Label of a micro-batch and chunk: "3" for micro-batch 3, "3b" for its second chunk."""
    chunk = _chunk_letters(step.chunk) if vpp > 1 else ""
    return f"{step.micro_batch}{chunk}"


def _chunk_letters(chunk):
    """Letters of a chunk number: 0 is a, 25 is z, 26 is aa."""
    letters = ""
    chunk += 1
    while chunk:
        chunk, rest = divmod(chunk - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters


def draw_text(simulation, unit=1.0):
    """Text drawing: a row per stage, a column per `unit` of time; F3b is micro-batch 3 forward on chunk b, B is backward.

    Args:
        simulation (Simulation): result of `simulate`.
        unit (float): time per column.

    Returns:
        str
    """
    plan = simulation.plan
    columns = int(-(-simulation.total // unit))
    width = 2 + max(len(_label(step, plan.vpp)) for row in simulation.spans for step, _, _ in row)
    lines = []
    for stage, row in enumerate(simulation.spans):
        cells = ["."] * columns
        for step, start, stop in row:
            first, last = int((start + _EDGE) // unit), int(-(-(stop - _EDGE) // unit))
            name = ("F" if step.kind == FORWARD else "B") + _label(step, plan.vpp)
            for column in range(first, last):
                cells[column] = name if column == first else "="
        lines.append(f"stage {stage} " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def draw_png(simulation, path):
    """Draw the plan as a PNG, with bubble fraction and peak live activations.

    Args:
        simulation (Simulation): result of `simulate`.
        path (str): file to write; its ending chooses the format.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("drawing a picture needs matplotlib: pip install matplotlib.") from None
    plan = simulation.plan
    figure = Figure(figsize=(min(40.0, 3 + 0.28 * simulation.total), 1.4 + 0.45 * plan.pp))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stage, row in enumerate(simulation.spans):
        for step, start, stop in row:
            _draw_box(axes, plan, stage, step, start, stop)
    peaks = peak_live_activations(plan)
    axes.set_yticks(range(plan.pp), [f"stage {stage} (peak {peak})" for stage, peak in enumerate(peaks)])
    axes.set_ylim(plan.pp - 0.5, -0.5)
    axes.set_xlim(0, simulation.total)
    axes.set_xlabel("time; blue: forward, green: backward, darker: later chunks")
    axes.set_title(f"{describe(plan)}: bubble {simulation.bubble:.2%} of the compute time, peak = live activations")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _draw_box(axes, plan, stage, step, start, stop):
    shade = 0.45 + 0.45 * (plan.vpp - step.chunk) / plan.vpp
    color = (0.45 * shade, 0.65 * shade, shade) if step.kind == FORWARD else (0.45 * shade, shade, 0.5 * shade)
    axes.barh(stage, stop - start, left=start, height=0.9, color=color, edgecolor="white", linewidth=0.5)
    axes.text((start + stop) / 2, stage, _label(step, plan.vpp), ha="center", va="center", fontsize=6)


def describe(plan):
    """Summary of the plan in one line."""
    if plan.pp == 1:
        name = "no pipeline"
    elif plan.vpp == 1:
        name = "1F1B"
    else:
        name = f"interleaved 1F1B, groups of {plan.group_size}"
    if plan.forward_only:
        name = "forward only" if plan.vpp == 1 else f"forward only, groups of {plan.group_size}"
    return f"{name}, pp {plan.pp}, vpp {plan.vpp}, {plan.micro_batches} micro-batches"
