"""Enums: LayerType, AttnType, AttnMaskType, ModelType. A foreign enum with the same member names may be passed anywhere."""

import enum


class LayerType(enum.Enum):
    """Place of a layer in its model."""

    encoder = 1
    decoder = 2
    retro_encoder = 3
    retro_decoder = 4
    retro_decoder_with_retriever = 5


class AttnType(enum.Enum):
    """Kind of attention: self or cross."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Mask type of an attention, used when no mask is given; see `attention_mask`."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4


class ModelType(enum.Enum):
    """Architecture of a model."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


def to_enum(kind, value):
    """Member of the enum `kind` for `value`: a member, a member of another enum, or a name.

    Raises:
        ValueError: no member has that name.
    """
    if isinstance(value, kind):
        return value
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if name in kind.__members__:
        return kind[name]
    raise ValueError(f"{kind.__name__} {value!r} is unknown, choose one of {list(kind.__members__)}.")
