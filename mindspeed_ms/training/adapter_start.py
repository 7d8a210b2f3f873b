"""Start of a training with adapters: which base, which adapters, and whether they belong together."""

from dataclasses import dataclass
from typing import Any

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.layout.describers.lora import is_lora
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.models.adapter_files import base_of, read_adapters
from mindspeed_ms.models.adapters import SETTINGS, adapters_of_checkpoint, has_adapters, has_base


@dataclass(frozen=True)
class AdapterStart:
    """What a training with adapters loads beside its starting point.

    Attributes:
        base (Optional[str]): folder of the base, where the starting point holds adapters alone.
        adapters (Optional[Adapters]): of `lora_load`; None: they start anew, or come with the starting point.
    """

    base: str | None = None
    adapters: Any = None


def find_adapter_start(path, manifest, all_config, resumes):
    """The `AdapterStart` of a run.

    Args:
        path (Optional[str]), manifest (Optional[Manifest]): of the checkpoint that it starts from; None: there is none.
        all_config (AllConfig): of the run.
        resumes (bool): the training goes on.

    Raises:
        CheckpointError: adapters without `use_lora`, of another base or with other settings; a base that is not there.
    """
    lora = all_config.lora_config
    if not lora.use_lora:
        if manifest is not None and has_adapters(manifest):
            raise CheckpointError(
                f"{path} holds adapters, and the run has none: set use_lora (--lora-target-modules), or merge them first: "
                "python -m mindspeed_ms.tools.lora merge."
            )
        return AdapterStart()
    base = None
    if manifest is not None and has_adapters(manifest):
        adapters = adapters_of_checkpoint(path, manifest)
        _check_settings(adapters, lora, all_config)
        if not has_base(manifest):
            base, found = base_of(path, manifest, all_config.training_config.pretrained_checkpoint)
            adapters.check_base({key: stored.shape for key, stored in found.tensors.items()}, found.args, base)
    if not lora.lora_load or resumes:
        return AdapterStart(base)
    adapters = read_adapters(lora.lora_load, lambda: describe_model(all_config))
    own = {one.name: one.sharding.global_shape for one in describe_whole_model(describe_model(all_config))}
    adapters.check_base(own, all_config.to_dict(), "the model of this run")
    _check_settings(adapters, lora, all_config)
    return AdapterStart(base, adapters)


def _check_settings(adapters, lora, all_config):
    """Refuse adapters with another rank, scale or other cells than the run has."""
    described = describe_whole_model(describe_model(all_config))
    own = {one.name: one.sharding.global_shape for one in described if is_lora(one.name)}
    shapes = {key: tensor.shape for key, tensor in adapters.tensors.items()}
    other = sorted(key for key in {*own, *shapes} if own.get(key) != shapes.get(key))
    given = adapters.settings
    wrong = [name for name in SETTINGS if name in given and name != "lora_dropout" and given[name] != lora[name]]
    if other or (wrong and wrong != ["target_cells"]):
        listed = "; ".join(f"{name} is {lora[name]!r} here and {given[name]!r} there" for name in wrong)
        listed = listed or f"{other[0]} is {_shape(own, other[0])} here and {_shape(shapes, other[0])} there"
        raise CheckpointError(f"{adapters.source} holds adapters with other settings: {listed}. Set them in lora_config.")


def _shape(shapes, key):
    return list(shapes[key]) if key in shapes else "missing"
