"""Family: a description of a family of models, which conversion in both directions and all sides read.

A family holds data: which of its tensors make up each of ours (`weights`), and how the fields of its config.json and our
settings follow from each other (`rules`, see `rules`). Shapes, cuts and the meaning of rows come from our own description of
the model (`layout.describers`); `tensors` joins both.
"""

from dataclasses import dataclass, field

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.spelling import did_you_mean


@dataclass(frozen=True)
class Weight:
    """One of our tensors and the tensors of the family that make it up.

    `{layer}` and `{expert}` stand for global indices. Rows that our description groups are put together here: of "qkv"
    from three tensors (query, key, value) or one that holds them one after another, of "gate_up" from two (gate, up) or
    one.

    Attributes:
        ours (str): our key.
        theirs (tuple[str]): their names.
        transposed (bool): theirs are stored as [in, out].
        stacked (bool): theirs hold all experts, along a first axis.
        alternating (bool): rows of gate and up alternate in theirs.
    """

    ours: str
    theirs: tuple
    transposed: bool = False
    stacked: bool = False
    alternating: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of models.

    Attributes:
        name (str): `model_type` in config.json, and the value of `--model-type-hf`.
        architecture (str): class of the causal language model in config.json's `architectures`.
        weights (tuple[Weight]): every tensor that a model of the family can have.
        settings (dict): our settings (`section.field`) that all models of the family have.
        rules (tuple): fields of config.json and our settings, see `rules`.
        prefix (str): start of their names that some files leave out.
        computed (tuple[str]): names (with `{layer}`) of stored tensors that follow from the configuration; they are not read.
        further_layers (str): field of config.json with the number of layers of multi-token prediction, which are stored behind
            the model's own if at all; "" without.
        further_copies (dict[str, str]): our tensors, and the names of the copies that each of these layers has of them.
    """

    name: str
    architecture: str
    weights: tuple
    settings: dict
    rules: tuple
    prefix: str = ""
    computed: tuple = field(default=())
    further_layers: str = ""
    further_copies: dict = field(default_factory=dict)


_FAMILIES = {}


def register_family(family):
    """Register a family under its name; returns it.

    Raises:
        ValueError: the name has another family already.
    """
    if _FAMILIES.setdefault(family.name, family) is not family:
        raise ValueError(f"model_type '{family.name}' has a family already: choose another name.")
    return family


def families():
    """All registered families by name: dict."""
    return dict(_FAMILIES)


def family_of(config, path):
    """The Family of a config.json.

    Args:
        config (dict): its content.
        path (str): of the file, for messages.

    Raises:
        CheckpointError: it names no family, or an unknown one.
    """
    name, classes = config.get("model_type"), config.get("architectures") or []
    if name is None:
        found = [family for family in _FAMILIES.values() if family.architecture in classes]
        if len(found) == 1:
            return found[0]
        name = ", ".join(map(str, classes)) if isinstance(classes, list) and classes else None
    others = [family.architecture for family in _FAMILIES.values() if family.name != name]
    own = getattr(_FAMILIES.get(name) if isinstance(name, str) else None, "architecture", None)
    wrong = [one for one in classes if one in others] if isinstance(classes, list) and own not in classes else []
    if wrong and own:
        raise CheckpointError(
            f"{path}: model_type is {name!r}, but architectures names {wrong[0]}: they contradict each other."
        )
    if name is None:
        raise CheckpointError(f"{path} has no model_type: expected one of {', '.join(sorted(_FAMILIES))}.")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {name!r} is of no known family: expected one of {', '.join(sorted(_FAMILIES))}."
            f"{did_you_mean(name, _FAMILIES)} docs/new-model-family.md says how to add one."
        )
    return _FAMILIES[name]
