"""Every divisibility rule of a model and its layout, stated once: `config` reports them together, `read_sizes` raises."""

from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.experts import expert_pattern, expert_width, has_experts, shared_expert_width
from mindspeed_ms.layout.options import OTHER_POSITIONS, Options, uses_sequence_parallel
from mindspeed_ms.layout.sequence import sequence_unit, ulysses_degree, ulysses_problem

_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"


@dataclass(frozen=True)
class Misfit:
    """A size that something does not divide.

    Attributes:
        name (str): the field (`options.FIELDS`), with `value`.
        by (tuple[str]): the fields that must divide it.
        unit (int): what it must be a multiple of.
        hint (str): what one may do, or why; starts with ", " or "; ".
    """

    name: str
    value: int
    by: tuple
    unit: int
    hint: str = ""

    def __str__(self):
        return f"{self.name} {self.value} must be divisible by {' x '.join(self.by)} {self.unit}{self.hint}."


def size_misfits(options):
    """Sizes of parameters that the heads, tensor or expert parallelism do not divide: generator of Misfit.

    Args:
        options (Options): the configuration.
    """
    rules = []
    if not options.kv_channels:
        rules.append(("hidden_size", "num_attention_heads", ", or kv_channels must be given"))
    if options.group_query_attention:
        rules.append(("num_attention_heads", "num_query_groups", ""))
    rules.append(("num_attention_heads", _TP, ""))
    if options.group_query_attention:
        rules.append(("num_query_groups", _TP, ""))
    rules.append(("vocab_size", _TP, "; pad it, or set make_vocab_size_divisible_by and the unpadded size"))
    if options.parallel_position_embedding and options.position_embedding_type not in OTHER_POSITIONS:
        rules.append(("max_position_embeddings", _TP, ""))
    if not all(expert_pattern(options)):
        rules.append(("ffn_hidden_size", _TP, ""))
    for name, by, hint in rules:
        yield from _misfit(name, getattr(options, name), (by,), getattr(options, by), hint)
    if has_experts(options):
        yield from _expert_misfits(options)


def _expert_misfits(options):
    by = "expert_model_parallel_size"
    yield from _misfit("num_experts", options.num_experts, (by,), getattr(options, by), "")
    name, width = expert_width(options)
    by = "expert_tensor_parallel_size" if options.expert_tensor_parallel_size else _TP
    yield from _misfit(name, width, (by,), getattr(options, by), ", the tensor parallel size of experts")
    name, width = shared_expert_width(options)
    tp = options.tensor_model_parallel_size
    if width % tp:
        yield Misfit(name, getattr(options, name), (_TP,), tp, f": the shared experts are {width} wide")


def sequence_misfits(options):
    """Sequence length and heads that sequence and context parallelism do not divide: generator of Misfit.

    Args:
        options (Options): the configuration.
    """
    tp, cp = options.tensor_model_parallel_size, options.context_parallel_size
    by = (_TP, _CP) if uses_sequence_parallel(options) else (_CP,)
    reasons = [" under sequence parallelism"] * (_TP in by) + [f" for {options.context_parallel_algo}"] * (cp > 1)
    yield from _misfit("seq_length", options.seq_length, by, sequence_unit(options), " and".join(reasons))
    if cp == 1 or ulysses_problem(options):
        return
    degree = ulysses_degree(options)
    if degree > 1:
        hint = f" = tp * ulysses degree {degree}"
        yield from _misfit("num_attention_heads", options.num_attention_heads, (_TP, _CP), tp * degree, hint)


def _misfit(name, value, by, unit, hint):
    if value and unit and value % unit:
        yield Misfit(name, value, by, unit, hint)


def require_fit(config):
    """Raise the first misfit of the parameters' sizes.

    Raises:
        LayoutError: names both sizes.
    """
    for misfit in size_misfits(Options(config)):
        raise LayoutError(str(misfit))
