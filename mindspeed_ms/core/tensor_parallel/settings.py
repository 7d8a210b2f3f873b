"""LayerSettings: settings of tensor-parallel layers, from the configuration that their public constructors take."""

from dataclasses import dataclass

from mindspeed_ms.config import ModelParallelConfig
from mindspeed_ms.config.model_description import DescribedConfig, describe_model, describe_parallel
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.device import dtype_name, to_dtype
from mindspeed_ms.layout.layer_parameters import LayerPart


@dataclass(frozen=True)
class LayerSettings:
    """Settings of a layer beside its sizes; None if the configuration is a ModelParallelConfig, which has no model."""

    sequence_parallel: bool
    gradient_accumulation_fusion: bool
    params_dtype: str = "float32"
    compute_dtype: str | None = None
    init_method_std: float | None = None
    embedding_init_std: float | None = None
    embedding_init_dtype: str | None = None

    @classmethod
    def of(cls, config):
        """The settings of a TransformerConfig, DescribedConfig, ModelDescription or ModelParallelConfig on these ranks.

        None gives those of a layer that stands alone: one rank's, in float32.
        """
        if isinstance(config, DescribedConfig):
            config = config.model or config.config
        if config is None:
            return cls(False, False)
        if isinstance(config, ModelParallelConfig):
            parallel = describe_parallel(config)
            return cls(cuts_sequence(parallel), parallel.gradient_accumulation_fusion)
        model = describe_model(config)
        return cls(
            cuts_sequence(model.parallel),
            model.parallel.gradient_accumulation_fusion,
            model.params_dtype,
            model.compute_dtype,
            model.init_method_std,
            model.embedding_init_std,
            model.embedding_init_dtype,
        )

    def part(self, dtype=None):
        """LayerPart of this rank in the tensor-parallel group; `dtype` replaces `params_dtype`."""
        return LayerPart(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            dtype_name(to_dtype(dtype or self.params_dtype)),
            self.sequence_parallel,
        )


def cuts_sequence(parallel):
    """Whether activations between tensor-parallel regions are cut along the sequence in the present group.

    Args:
        parallel (ParallelDescription): what the configuration asks for.
    """
    return parallel.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1
