"""ModelDescription and ParallelDescription of a configuration, as read by `layout`, `core` and the model."""

import re
from dataclasses import dataclass, fields, replace

from mindspeed_ms.config.schema import AllConfig, ModelParallelConfig, TransformerConfig
from mindspeed_ms.layout.adapters import Adapter
from mindspeed_ms.layout.model_description import (
    POLICY_ARCHITECTURE,
    REWARD_ARCHITECTURE,
    ModelDescription,
    ParallelDescription,
)
from mindspeed_ms.layout.vocabulary import true_vocab_size


@dataclass(frozen=True, eq=False)
class DescribedConfig:
    """A configuration with the ModelDescription read from it: a model builds it once and passes it to its cells.

    Attributes:
        config (TransformerConfig): settings of the computation. A cell may be given another object.
        model (Optional[ModelDescription]): the model and its cut; None if `config` does not describe a model.
    """

    config: object
    model: ModelDescription | None


_ARCHITECTURES = {"orm": REWARD_ARCHITECTURE, "trl_ppo": POLICY_ARCHITECTURE}  # of a stage


def describe_config(config, **changes):
    """The DescribedConfig of what a cell was given: a TransformerConfig, a DescribedConfig, or an object without a model.

    Args:
        config: as above, or None.
        changes: fields of the ModelDescription that have other values than the configuration's.

    Raises:
        ValueError: changes to an object that does not describe a model.
    """
    if not isinstance(config, DescribedConfig):
        is_model = isinstance(config, TransformerConfig) or changes
        config = DescribedConfig(config, describe_model(config) if is_model else None)
    if all(getattr(config.model, name) == value for name, value in changes.items()):
        return config
    return replace(config, model=replace(config.model, **changes))


def describe_model(config, architecture=None, adapters=None, num_tokentypes=0):
    """The ModelDescription of an AllConfig or a TransformerConfig; one that exists already is returned as it is.

    Args:
        config (AllConfig | TransformerConfig | DescribedConfig | ModelDescription): the model.
        architecture (Optional[str]): see ModelDescription; None: "gpt_reward" for stage orm, "gpt_policy" for
            trl_ppo, else "gpt".
        num_tokentypes (int): field of the ModelDescription that no configuration has.
        adapters (Optional[tuple[Adapter]]): None: those of `lora_config`.

    Raises:
        ValueError: another object, or an AllConfig without a model.
    """
    if isinstance(config, DescribedConfig):
        config = config.model or config.config
    if isinstance(config, ModelDescription):
        return config
    model = config.model_config if isinstance(config, AllConfig) else config
    if not isinstance(model, TransformerConfig):
        raise ValueError(
            f"a {type(config).__name__} does not describe a model: expected a TransformerConfig, or an AllConfig with a "
            "model_config."
        )
    values = _values(ModelDescription, model, model.training_config, model.moe_config)
    if architecture is None:
        architecture = _ARCHITECTURES.get(model.training_config.stage, "gpt")
    if architecture == REWARD_ARCHITECTURE:
        values["untie_embeddings_and_output_weights"] = True  # its head is no vocabulary
    if "kv_channels" not in model.model_fields_set:
        values["kv_channels"] = None
    return ModelDescription(
        **values,
        architecture=architecture,
        adapters=describe_adapters(model.lora_config) if adapters is None else adapters,
        num_tokentypes=num_tokentypes,
        micro_batch_size=model.dataset_config.sequences_of_micro_batch,
        parallel=describe_parallel(model.parallel_config),
    )


def describe_adapters(lora):
    """Adapters of a LoraConfig: tuple[Adapter]; cells with settings of their own come first."""
    if not lora.use_lora:
        return ()
    common = {"dropout": lora.lora_dropout, "is_rank_stabilized": lora.use_rslora}
    cells = [cell for cell in lora.target_cells or () if isinstance(cell, dict)]  # rules say what is wrong with others
    adapters = [
        Adapter(
            "lora",
            (re.escape(str(cell["cell"])),),
            cell.get("rank", lora.lora_rank),
            cell.get("alpha", lora.lora_alpha),
            **common,
        )
        for cell in cells
        if "cell" in cell
    ]
    patterns = [pattern for cell in cells for pattern in cell.get("target_cells") or ()]
    return (*adapters, Adapter("lora", tuple(patterns), lora.lora_rank, lora.lora_alpha, **common))


def describe_parallel(config):
    """The ParallelDescription of an AllConfig, TransformerConfig or ModelParallelConfig.

    Raises:
        ValueError: another object.
    """
    parallel = config if isinstance(config, ModelParallelConfig) else config.parallel_config
    return ParallelDescription(**_values(ParallelDescription, parallel))


def _values(kind, *sections):
    """Values of the fields of `kind` that the sections have; the last one that has a field counts."""
    names = [field.name for field in fields(kind)]
    return {name: _frozen(section[name]) for section in sections for name in names if name in type(section).own_fields()}


def _frozen(value):
    """Lists as tuples: nothing that a description holds can change."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def vocab_size_of(all_config):
    """Number of vocabulary rows that are no padding (int): dataset_config.vocab_size and extra tokens, if it is set."""
    padded, data = all_config.model_config.vocab_size, all_config.dataset_config
    if not data.vocab_size:
        return padded
    return min(padded, true_vocab_size(data.vocab_size, data.vocab_extra_ids, data.tokenizer_type))
