"""Transformer block: layers of one pipeline stage. Source: Megatron's `ParallelTransformer` / `TransformerBlock`."""

from mindspore import Tensor, nn

from mindspeed_ms.core import autograd, parallel_state
from mindspeed_ms.core.context_parallel import VisibleKeys
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.layout.layer_lists import LayerRecompute
from mindspeed_ms.layout.stages import recompute_of
from mindspeed_ms.legacy.model.attention_mask import expand_attention_mask
from mindspeed_ms.legacy.model.enums import AttnMaskType, LayerType, to_enum
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.norms import added, added_and_normed, get_norm
from mindspeed_ms.legacy.model.transformer_layer import ParallelTransformerLayer


class LayerList(nn.Cell):
    """List of layers under their global numbers (from 0), for equal state-dict keys in every pipeline layout."""

    def __init__(self, layers):
        super().__init__()
        self.numbers = list(layers)
        for number, layer in layers.items():
            self.insert_child_to_cell(str(number), layer)

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return (self._cells[str(number)] for number in self.numbers)

    def __getitem__(self, index):
        """Layer at a local position."""
        return self._cells[str(self.numbers[index])]


class ParallelTransformer(Module):
    """Transformer block: layers of this rank's stage (and current virtual chunk), and the final norm on the last one.

    Args:
        config (TransformerConfig): the model; `layout.stages` decides which layers are here.
        model_type (ModelType): kept for Megatron's signature.
        layer_type (LayerType): `encoder`.
        self_attn_mask_type (AttnMaskType): what a missing mask means.
        post_norm (bool): norm after the last layer (with `use_final_norm`).
        pre_process (bool): the stage starts the model; otherwise its input comes by `set_input_tensor`.
        post_process (bool): the stage ends the model.
        drop_path_rate (float): must be 0.

    Inputs: hidden_states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism), attention_mask, rotary_pos_emb,
    inference_params (handed to the attention). Output: the same shape.

    Raises:
        ValueError: the configuration's pipeline is not the initialised one, or recomputation does not fit the layers.
    """

    def __init__(
        self,
        config,
        model_type=None,
        layer_type=LayerType.encoder,
        self_attn_mask_type=AttnMaskType.padding,
        post_norm=True,
        pre_process=False,
        post_process=False,
        drop_path_rate=0.0,
    ):
        super().__init__(config)
        self.model_type = model_type
        self.pre_process, self.post_process = pre_process, post_process
        self.self_attn_mask_type = to_enum(AttnMaskType, self_attn_mask_type)
        self.sequence_parallel = self.settings.sequence_parallel
        self.input_tensor = None
        described, model = self.described, self.described.model
        stage, chunk = _place(model.stages)
        numbers = model.stages.layers(stage, chunk)
        self.layers = LayerList(
            {
                number: ParallelTransformerLayer(described, number + 1, layer_type, self.self_attn_mask_type, drop_path_rate)
                for number in numbers
            }
        )
        self.has_final_norm = post_process and post_norm and model.use_final_norm
        if self.has_final_norm:
            self.final_norm = get_norm(described)
        self._plan_recompute(self.config, recompute_of(model).of_chunk(stage, chunk))

    def set_input_tensor(self, input_tensor):
        """Set the hidden states from the previous stage for the next call."""
        self.input_tensor = input_tensor

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        enc_dec_attn_mask=None,
        retriever_input=None,
        retriever_output=None,
        retriever_attn_mask=None,
        inference_params=None,
        rotary_pos_emb=None,
    ):
        """See the class."""
        if any(
            value is not None
            for value in (encoder_output, enc_dec_attn_mask, retriever_input, retriever_output, retriever_attn_mask)
        ):
            raise ValueError("encoder and retriever inputs must be None: this is a decoder-only model.")
        if not self.pre_process and self.input_tensor is not None:
            hidden_states = self.input_tensor
        if hidden_states is None:
            raise ValueError("this pipeline stage has no input: call set_input_tensor() before the model.")
        if isinstance(attention_mask, Tensor):
            attention_mask = self.expanded(attention_mask, hidden_states)
        for start, stop, is_recomputed in self.segments:
            segment = self._segment(start, stop, attention_mask, rotary_pos_emb, inference_params)
            if is_recomputed and self.training:
                hidden_states = checkpoint(segment, self.distribute_saved_activations, hidden_states)
            else:
                hidden_states = segment(hidden_states)
        return added_and_normed(self.final_norm, hidden_states)[1] if self.has_final_norm else added(hidden_states)

    def expanded(self, mask, hidden_states):
        """The mask, once for all layers: expanded, or under context parallelism as `VisibleKeys`."""
        part, batch = hidden_states.shape[:2]
        if self.sequence_parallel:
            part *= parallel_state.get_tensor_model_parallel_world_size()
        length = part * parallel_state.get_context_parallel_world_size()
        if VisibleKeys.are_intervals(mask, length):
            return VisibleKeys.of_intervals(mask, length)
        has_rows_of_part = mask.ndim > 1 and mask.shape[-2:] == (part, length)
        mask = expand_attention_mask(mask, batch, part if has_rows_of_part else length, length, self.self_attn_mask_type)
        return mask if part == length else VisibleKeys.of(mask)

    def _segment(self, start, stop, attention_mask, rotary_pos_emb, inference_params):
        """Function of the hidden states that runs layers `start` to `stop` (local positions)."""

        layers = [self.layers[index] for index in range(start, stop)]
        keywords = {"inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb}
        if inference_params is not None:
            # hooks of users expect tensors
            keywords["gives_sum"] = not any(autograd.has_forward_hooks(layer) for layer in layers)

        def run(hidden_states):
            for layer in layers:
                hidden_states = layer(hidden_states, attention_mask, **keywords)
            return hidden_states

        return run

    def _plan_recompute(self, config, kinds):
        """`segments`: runs of layers `(start, stop, recomputed)`; other layers recompute attention or MLP selectively."""
        self.distribute_saved_activations = config.distribute_saved_activations
        count = len(self.layers)
        if config.recompute_granularity == "selective":
            kinds = [LayerRecompute(select=True)] * count
        self.segments = _segments_of_lists(kinds)
        if config.recompute_granularity == "full":
            self.segments = _segments_of_method(config.recompute_method, config.recompute_num_layers or 1, count)
        for layer, kind in zip(self.layers, kinds):
            if kind.select:
                (layer.mlp if config.use_flash_attention else layer.attention).recompute_selectively()


def _place(stages):
    """`(stage, chunk)` of this rank, checked against the stages of the configuration."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if (size, chunks) != (stages.pp, stages.vpp):
        raise ValueError(
            f"the configuration has {stages.pp} pipeline stages of {stages.vpp} chunks, but {size} stages of {chunks} "
            "chunks were initialised: call set_parallel_context with the same parallel_config."
        )
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    return parallel_state.get_pipeline_model_parallel_rank(), chunk


def _segments_of_lists(kinds):
    """Segments of recompute lists: one for each fully recomputed layer, and one plain segment for the rest."""
    full = sum(kind.full for kind in kinds)
    segments = [(index, index + 1, True) for index in range(full)]
    return segments + ([(full, len(kinds), False)] if full < len(kinds) else [])


def _segments_of_method(method, number, count):
    """Segments of `recompute_granularity: full`: "uniform" groups of layers, or single first layers ("block")."""
    if method == "uniform":
        return [(start, min(start + number, count), True) for start in range(0, count, number)]
    if method == "block":
        number = min(number, count)
        segments = [(index, index + 1, True) for index in range(number)]
        return segments + ([(number, count, False)] if number < count else [])
    raise ValueError(f"recompute_granularity 'full' needs recompute_method 'uniform' or 'block', but got {method!r}.")
