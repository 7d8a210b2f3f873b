"""Divisibility rules of a model and its layout: `config` reports them together, `check_model` raises the first."""

from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.experts import expert_pattern, expert_problems, expert_width, has_experts, shared_expert_width
from mindspeed_ms.layout.model_description import LEARNED_POSITIONS, OTHER_POSITIONS
from mindspeed_ms.layout.sequence import sequence_unit, ulysses_degree, ulysses_problem
from mindspeed_ms.layout.windows import window_problems

_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"


@dataclass(frozen=True)
class Misfit:
    """Divisibility error: a size and the number that does not divide it.

    Attributes:
        name (str): the field of the configuration, with `value`.
        by (tuple[str]): the fields that must divide it.
        unit (int): number that must divide it.
        hint (str): what one may do, or why; starts with ", " or "; ".
    """

    name: str
    value: int
    by: tuple
    unit: int
    hint: str = ""

    def __str__(self):
        return f"{self.name} {self.value} must be divisible by {' x '.join(self.by)} {self.unit}{self.hint}."


def size_misfits(model):
    """Misfits of parameter sizes with heads, tensor or expert parallelism (generator).

    Args:
        model (ModelDescription): the model.
    """
    rules = []
    if not model.kv_channels and not model.is_latent:
        rules.append(("hidden_size", "num_attention_heads", ", or kv_channels must be given"))
    if model.group_query_attention:
        rules.append(("num_attention_heads", "num_query_groups", ""))
    rules.append(("num_attention_heads", _TP, ""))
    if model.group_query_attention:
        rules.append(("num_query_groups", _TP, ""))
    rules.append(("vocab_size", _TP, "; pad it, or set make_vocab_size_divisible_by and the unpadded size"))
    if model.parallel_position_embedding and model.position_embedding_type not in OTHER_POSITIONS:
        rules.append(("max_position_embeddings", _TP, ""))
    if not all(expert_pattern(model)):
        rules.append(("ffn_hidden_size", _TP, ""))
    for name, by, hint in rules:
        yield from _misfit(name, value_of(model, name), (by,), value_of(model, by), hint)
    if has_experts(model):
        yield from _expert_misfits(model)


def _expert_misfits(model):
    parallel = model.parallel
    by = "expert_model_parallel_size"
    yield from _misfit("num_experts", model.num_experts, (by,), parallel.expert_model_parallel_size, "")
    name, width = expert_width(model)
    by = "expert_tensor_parallel_size" if parallel.expert_tensor_parallel_size else _TP
    yield from _misfit(name, width, (by,), parallel.expert_tensor_size, ", the tensor parallel size of experts")
    name, width = shared_expert_width(model)
    tp = parallel.tensor_model_parallel_size
    if width % tp:
        yield Misfit(name, value_of(model, name), (_TP,), tp, f": the shared experts are {width} wide")


def sequence_misfits(model):
    """Misfits of sequence length and heads with sequence and context parallelism (generator).

    Args:
        model (ModelDescription): the model.
    """
    parallel = model.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    by = (_TP, _CP) if parallel.cuts_sequence else (_CP,)
    reasons = [" under sequence parallelism"] * (_TP in by) + [f" for {parallel.context_parallel_algo}"] * (cp > 1)
    unit = sequence_unit(parallel)
    padded = f"; pad it to {-(-model.seq_length // unit) * unit}" if model.seq_length and cp > 1 else ""
    yield from _misfit("seq_length", model.seq_length, by, unit, " and".join(reasons) + padded)
    if cp == 1 or ulysses_problem(parallel):
        return
    degree = ulysses_degree(parallel)
    if degree > 1:
        hint = f" = tp * ulysses degree {degree}"
        yield from _misfit("num_attention_heads", model.num_attention_heads, (_TP, _CP), tp * degree, hint)


def _misfit(name, value, by, unit, hint):
    if value and unit and value % unit:
        yield Misfit(name, value, by, unit, hint)


def value_of(model, name):
    """The field `name` of a ModelDescription or of its `parallel`; lists as the user wrote them."""
    value = getattr(model if hasattr(model, name) else model.parallel, name)
    return list(value) if isinstance(value, tuple) else value


def check_model(model):
    """Check sizes, kinds and experts of a ModelDescription.

    Raises:
        LayoutError: an unknown normalisation or position type, a size that its parallel size does not divide, or layers
            with experts or windows that do not suit the model.
    """
    kind, known = model.position_embedding_type, [*LEARNED_POSITIONS, *OTHER_POSITIONS]
    if kind not in known:
        raise LayoutError(f"position_embedding_type '{kind}' is unknown, choose one of {known}.")
    _ = model.norm, model.initializers
    for misfit in size_misfits(model):
        raise LayoutError(str(misfit))
    for name, problem, other in (*expert_problems(model), *window_problems(model)):
        raise LayoutError(f"{name} {value_of(model, name)} {problem} ({other} {value_of(model, other)}).")
