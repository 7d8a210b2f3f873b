"""Targets of adapters: the linears that patterns name, and what is wrong with patterns that name none."""

import re
from dataclasses import replace

from mindspeed_ms.layout.describers.lora import is_linear
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.spelling import nearest_word

_WHY_NOT = {
    "expert": "experts get no low-rank adapters yet; name linears outside of the experts",
    "vocab": "embeddings and output layer get no low-rank adapters; name linears of the layers",
    "other": "it is no linear layer; name linears of the layers",
}


def linear_cells(model):
    """Global names of the linears of the whole model that may get an adapter: list[str]."""
    return [name for name, kind in _cells(model).items() if kind == "linear"]


def target_problems(model):
    """What is wrong with the targets of the adapters: (pattern, message) of each that no linear fits (generator).

    Args:
        model (ModelDescription): read: `adapters`.
    """
    cells = _cells(model) if model.adapters else {}
    for pattern in dict.fromkeys(pattern for adapter in model.adapters for pattern in adapter.targets):
        kinds = {cells[cell]: cell for cell in cells if re.fullmatch(pattern, cell)}
        if "expert" in kinds:
            yield pattern, f"matches {kinds['expert']}: {_WHY_NOT['expert']}"
        elif kinds and "linear" not in kinds:
            kind, cell = next(iter(kinds.items()))
            yield pattern, f"matches {cell} alone: {_WHY_NOT[kind]}"
        elif not kinds:
            yield pattern, f"matches no linear layer of the model; {_near(pattern, linear_cells(model))}"


def _near(pattern, names):
    """Names of linears near to a pattern, and all of their last parts."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    wanted = re.sub(r"[^A-Za-z0-9_]", "", re.split(r"\\?\.", pattern)[-1])
    near = nearest_word(wanted, ends) or ends[0]
    example = next(name for name in names if name.endswith(f".{near}"))
    return f"its linears end in {', '.join(ends)}; near is {example!r}"


def _cells(model):
    """{global name: "linear", "expert", "vocab" or "other"} of all cells with a weight."""
    result = {}
    for one in describe_whole_model(replace(model, adapters=())):
        cell, _, name = one.name.rpartition(".")
        if name in ("weight", "weight1", "gamma"):
            kind = "expert" if one.expert else "vocab" if one.grouping == "vocab" else "other"
            result[cell] = "linear" if is_linear(one) else kind
    return result
