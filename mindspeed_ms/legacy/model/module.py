"""Module: base class of all model cells. Source: Megatron's legacy `module.py`."""

from dataclasses import replace

from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell, description_of, set_description
from mindspeed_ms.core.tensor_parallel.settings import LayerSettings


class Module(ParallelCell):
    """Base class of models and their parts. Parameters are initialised by their global names, see `ParallelCell`.

    Args:
        config (Optional[TransformerConfig]): the model; inside of another module that module's `described`.
        share_embeddings_and_output_weights (bool): the head uses the word embeddings.

    Attributes:
        config: the TransformerConfig (None without one).
        described (DescribedConfig): the same with its ModelDescription, `described.model`; what inner modules are given.
        settings (LayerSettings): of the tensor-parallel layers inside.

    A model that ties its embeddings calls `initialize_word_embeddings()` at the end of its constructor; it must hold
    its language model as `self.language_model` and know `self.pre_process` and `self.post_process`.
    """

    def __init__(self, config=None, share_embeddings_and_output_weights=True):
        super().__init__()
        self.described = describe_config(config)
        self.config = self.described.config
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights

    @property
    def settings(self):
        """The LayerSettings of the ranks that are there."""
        return LayerSettings.of(self.described)

    @property
    def _predicts_further_tokens(self):
        """Whether this stage holds layers of multi-token prediction, and with them the word embeddings."""
        return self.post_process and self.described.model is not None and bool(self.described.model.mtp_num_layers)

    def shared_embedding_or_output_weight(self):
        """Tied weight `[v / tp, h]` of this stage.

        Raises:
            ValueError: the model is not tied, or the stage holds neither embedding nor head.
        """
        if not self.share_embeddings_and_output_weights:
            raise ValueError("shared_embedding_or_output_weight needs share_embeddings_and_output_weights=True.")
        if self.pre_process or self._predicts_further_tokens:
            return self.language_model.embedding.word_embeddings.weight
        if self.post_process:
            return self.language_model.output_layer.weight
        raise ValueError("this pipeline stage holds neither the word embeddings nor the head.")

    def initialize_word_embeddings(self):
        """Mark the tied weights of the first and last stage, whose gradients are summed over the embedding group.

        Both copies start equal, since the head's copy is drawn by the name of the word embeddings.

        Raises:
            ValueError: the model is not tied.
        """
        if not self.share_embeddings_and_output_weights:
            raise ValueError("initialize_word_embeddings needs share_embeddings_and_output_weights=True.")
        if not (self.pre_process or self.post_process):
            return
        weight = self.shared_embedding_or_output_weight()
        if self.post_process and (self.pre_process or self._predicts_further_tokens):
            # The head's fused gradient leaves a zero behind, to which the embedding's own gradient is added.
            weight.zero_out_wgrad = True
        is_pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        set_description(weight, replace(description_of(weight), shared=is_pipelined))
