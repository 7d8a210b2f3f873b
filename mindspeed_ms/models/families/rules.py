"""Rules of config.json: how its fields and our settings follow from each other, in both directions.

A rule has

    paths               our settings that it is about (`section.field`)
    names               {path: field of config.json}, for messages
    fields              further fields of config.json that it reads (where there are any)
    read(config)        {path: value} from the fields of a config.json; raises ValueError with a text about a field
    write(settings)     {name: value} of config.json from our settings {path: value}; a value of REMOVED takes a field out

    respelled(written, base)
                        what `write` gave in the spelling of the config.json that it goes into (where there are several)

`read` of the fields that `write` gives is the identity: a file whose fields say the same already is left as it is.
"""

import math
import typing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mindspeed_ms.config.schema import field_info

REQUIRED = object()
REMOVED = object()
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
_MOST = {"model_config.num_layers": 10_000, "moe_config.num_experts": 10_000}  # no file makes us describe more


def m(*names):
    """Paths of fields of `model_config`."""
    return tuple(f"model_config.{name}" for name in names)


def checked(name, value, path):
    """`value` of a field of config.json, which must be of the kind of our setting `path`: no number as text, no true as 1.

    Raises:
        ValueError: naming field and value.
    """
    kind = _kind(path)
    is_number = type(value) in (int, float) and math.isfinite(value)
    fits = {bool: isinstance(value, bool), int: type(value) is int, float: is_number, str: isinstance(value, str)}
    if value is not None and not fits.get(kind, True):
        raise ValueError(f"{name} is {value!r}: expected {_KINDS[kind]}")
    if type(value) is int and value > _MOST.get(path, value):
        raise ValueError(f"{name} is {value}: expected {_MOST[path]} at most")
    return value


def _kind(path):
    """Python type of our setting; None if it has none of `_KINDS`."""
    info = field_info(path)
    kinds = [getattr(one, "__origin__", one) for one in (info.annotation, *typing.get_args(info.annotation))] if info else ()
    return next((kind for kind in kinds if kind in (bool, int, float)), None)


@dataclass(frozen=True)
class Field:
    """One field of config.json that is one of our settings, or several with the same value.

    Attributes:
        name (str): in config.json.
        paths (tuple[str]): our settings.
        default: what the field means where it is left out or null; REQUIRED: it must be there.
        values (dict): their value -> ours, where they differ.
        also (str): another name of the field, in files of other versions of transformers.
    """

    name: str
    paths: tuple
    default: Any = REQUIRED
    values: dict = field(default_factory=dict)
    also: str = ""

    @property
    def names(self):
        return dict.fromkeys(self.paths, self.name)

    @property
    def fields(self):
        return (self.also,) if self.also else ()

    def read(self, config):
        value = config.get(self.name)
        if self.also and config.get(self.also) is not None:
            if value not in (None, config[self.also]):
                raise ValueError(f"{self.name} is {value!r}, but {self.also} is {config[self.also]!r}: they must be equal")
            value = checked(self.also, config[self.also], self.paths[0])
        if value is None:
            value = self.default(config) if callable(self.default) else self.default
        if value is REQUIRED:
            raise ValueError(f"has no {self.name}")
        if self.values:
            if not isinstance(value, (str, bool)) or value not in self.values:
                raise ValueError(f"{self.name} is {value!r}: expected {' or '.join(repr(one) for one in self.values)}")
            value = self.values[value]
        elif self.name in config:
            checked(self.name, value, self.paths[0])
        return dict.fromkeys(self.paths, value)

    def write(self, settings):
        given = {str(settings[path]): settings[path] for path in self.paths}
        if len(given) > 1:
            texts = ", ".join(f"{path} = {settings[path]!r}" for path in self.paths)
            raise ValueError(f"has one field {self.name} for {texts}: they must be equal")
        (value,) = given.values()
        if self.values:
            theirs = [one for one, ours in self.values.items() if ours == value and type(ours) is type(value)]
            if not theirs:
                raise ValueError(f"cannot say {self.paths[0]} = {value!r}: it knows {list(self.values.values())}")
            value = theirs[0]
        return {self.name: value}

    def respelled(self, written, base):
        has = [name for name in (self.name, self.also) if name in base] or [self.name]
        return dict.fromkeys(has, written[self.name])


@dataclass(frozen=True)
class Fixed:
    """Field of config.json that must have one of some values, since our models compute no other.

    Attributes:
        name (str): in config.json.
        values (tuple): accepted; the first is what a left out field means.
    """

    name: str
    values: tuple
    paths: tuple = ()
    names = MappingProxyType({})

    @property
    def fields(self):
        return (self.name,)

    def read(self, config):
        value = config.get(self.name, self.values[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values):
            raise ValueError(f"{self.name} is {value!r}: expected {' or '.join(repr(one) for one in self.values)}")
        return {}

    def write(self, settings):
        del settings
        return {}


@dataclass(frozen=True)
class Heads:
    """Query heads, key-value heads and the width of a head.

    Attributes:
        width (Callable): `head_dim` that a config.json without one means, from the config.
        groups (Optional[int]): `num_key_value_heads` that is left out; None, and null in the file: one per query head.
    """

    width: Any = None
    groups: Any = None
    paths: tuple = m("num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels")

    fields = ("hidden_size",)

    @property
    def names(self):
        return dict(zip(self.paths, ("num_attention_heads", "num_key_value_heads", "num_key_value_heads", "head_dim")))

    def read(self, config):
        heads = _integer(config, "num_attention_heads")
        groups = config.get("num_key_value_heads", self.groups)
        groups = heads if groups is None else _integer({"num_key_value_heads": groups}, "num_key_value_heads")
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
        width = None if config.get("head_dim") is None else _integer(config, "head_dim")
        if width is None and self.width:
            width = self.width(config)
        elif width is None:
            size = _integer(config, "hidden_size")
            if size % heads:
                raise ValueError(
                    f"hidden_size {size} is not divisible by num_attention_heads {heads}, and there is no head_dim"
                )
            width = size // heads
        if width % 2:
            raise ValueError(f"head_dim is {width}: expected an even number, since rotary positions turn pairs")
        return dict(zip(self.paths, (heads, groups != heads, groups, width)))

    def write(self, settings):
        heads, is_grouped, groups, width = (settings[path] for path in self.paths)
        result = {"num_attention_heads": heads, "num_key_value_heads": groups if is_grouped else heads}
        usual = settings["model_config.hidden_size"] // heads
        return result if width == usual and not self.width else {**result, "head_dim": width}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds both (transformers 5).

    Attributes:
        theta (float): base where none is given.
    """

    theta: float = 10000.0
    paths: tuple = m("rotary_base", "rope_scaling")
    names = MappingProxyType(dict(zip(m("rotary_base", "rope_scaling"), ("rope_theta", "rope_scaling"))))

    fields = ("rope_parameters", "partial_rotary_factor")

    def read(self, config):
        given = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or {}
        for name, value in (("rope_parameters", given), ("rope_scaling", scaling)):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is {value!r}: expected a mapping")
        for name, value in (("rope_scaling", scaling), ("rope_theta", config.get("rope_theta"))):
            same = given.get("rope_theta") if name == "rope_theta" else _typed({**given, "rope_theta": None})
            value = _typed(value) if isinstance(value, dict) else value
            if given and value and same and value != same:
                raise ValueError(f"{name} is {config[name]!r}, but rope_parameters is {given!r}: they contradict each other")
        values = {**scaling, **given}
        theta = self.theta
        for found in (config.get("rope_theta"), values.pop("rope_theta", None)):
            theta = theta if found is None else checked("rope_theta", found, self.paths[0])
        for factor in (config.get("partial_rotary_factor"), values.pop("partial_rotary_factor", None)):
            if factor not in (None, 1) or isinstance(factor, bool):
                raise ValueError(f"partial_rotary_factor is {factor!r}, not 1.0: this family rotates whole heads")
        return dict(zip(self.paths, (float(theta), _scaling(values, config))))

    def write(self, settings):
        theta, scaling = (settings[path] for path in self.paths)
        theirs = None
        if scaling is not None:
            names = [name for name in _SCALING_FIELDS.get(scaling["type"], ()) if name != "mscale" or scaling["mscale_all_dim"]]
            theirs = {"rope_type": scaling["type"], **{name: scaling[name] for name in names if scaling.get(name) is not None}}
        return {"rope_theta": theta, "rope_scaling": theirs, "rope_parameters": REMOVED}

    def respelled(self, written, base):
        if not base.get("rope_parameters"):
            return written
        scaling = written["rope_scaling"] or {"rope_type": "default"}
        result = {"rope_parameters": {"rope_theta": written["rope_theta"], **scaling}}
        return {**result, **{name: written[name] for name in ("rope_theta", "rope_scaling") if name in base}}


def _typed(scaling):
    """Entries of a rope_scaling that say something, its type under one name."""
    values = {name: value for name, value in scaling.items() if value is not None}
    kind = values.pop("type", None)
    values.setdefault("rope_type", kind or "default")
    return {} if values == {"rope_type": "default"} else values


_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


def _scaling(values, config):
    """Our rope_scaling (dict) of theirs, or None."""
    values = dict(values)
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    if kind == "default":
        said = sorted(name for name, value in values.items() if value is not None)
        if said:
            raise ValueError(f"rope_scaling of the type default has {', '.join(said)}, which is not known here")
        return None
    if not isinstance(kind, str) or kind not in _SCALING_FIELDS:
        raise ValueError(f"rope_scaling has the type {kind!r}: expected {', '.join(_SCALING_FIELDS)} or default")
    unknown = sorted(name for name, value in values.items() if name not in _SCALING_FIELDS[kind] and value is not None)
    if unknown:
        raise ValueError(f"rope_scaling of the type {kind} has {', '.join(unknown)}, which is not known here")
    if values.get("factor") is None:
        raise ValueError("rope_scaling has no factor")
    for name, value in values.items():
        checked(f"{name} of rope_scaling", value, f"model_config.rope_scaling.{name}")
    if "original_max_position_embeddings" in _SCALING_FIELDS[kind]:
        values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if not values.get("mscale_all_dim"):  # without it, mscale has no effect there
        values.pop("mscale", None)
        values.pop("mscale_all_dim", None)
    return {"type": kind, **{name: value for name, value in values.items() if value is not None}}


@dataclass(frozen=True)
class DecoderSparseStep:
    """Which layers hold experts (Qwen): `decoder_sparse_step` and `mlp_only_layers`."""

    paths: tuple = ("moe_config.moe_layer_freq", "model_config.num_layers")
    names = MappingProxyType({"moe_config.moe_layer_freq": "decoder_sparse_step"})
    fields = ("mlp_only_layers",)

    def read(self, config):
        layers = _integer(config, "num_hidden_layers")
        step = 1 if config.get("decoder_sparse_step") is None else _integer(config, "decoder_sparse_step")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
            raise ValueError(f"mlp_only_layers is {dense!r}: expected numbers of layers from 0 to {layers - 1}")
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        return {self.paths[0]: None if all(pattern) else pattern, self.paths[1]: layers}

    def write(self, settings):
        pattern, layers = (settings[path] for path in self.paths)
        pattern = pattern or [1]
        if len(pattern) == 1 and layers > 1:  # every n-th layer
            pattern = [int(layer % pattern[0] == 0) for layer in range(layers)]
        return {
            "num_hidden_layers": layers,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, is_sparse in enumerate(pattern) if not is_sparse],
        }


def _integer(config, name):
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"has no {name}" if value is None else f"{name} is {value!r}: expected an integer above 0")
    return value
