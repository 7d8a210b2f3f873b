"""ModelDescription and ParallelDescription of a configuration, as read by `layout`, `core` and the model."""

from dataclasses import fields

from mindspeed_ms.config.schema import AllConfig, ModelParallelConfig, TransformerConfig
from mindspeed_ms.layout.model_description import ModelDescription, ParallelDescription


def describe_model(config):
    """The ModelDescription of an AllConfig or a TransformerConfig; a ModelDescription is returned as it is.

    Raises:
        ValueError: another object, or an AllConfig without a model.
    """
    if isinstance(config, ModelDescription):
        return config
    model = config.model_config if isinstance(config, AllConfig) else config
    if not isinstance(model, TransformerConfig):
        raise ValueError(
            f"a {type(config).__name__} does not describe a model: expected a TransformerConfig, or an AllConfig with a "
            "model_config."
        )
    values = _values(ModelDescription, model, model.training_config, model.moe_config)
    if "kv_channels" not in model.model_fields_set:
        values["kv_channels"] = None
    return ModelDescription(
        **values,
        architecture="gpt",
        adapters=(),
        num_tokentypes=0,
        micro_batch_size=model.dataset_config.batch_size,
        parallel=describe_parallel(model.parallel_config),
    )


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
    return {name: section[name] for section in sections for name in names if name in type(section).own_fields()}
