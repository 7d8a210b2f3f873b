"""Configurations and models of the tests; what runs in a rank of a forked world is here or beside its test."""

SIZES = {
    "vocab_size": 128,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "seq_length": 32,
}
GPT2 = {
    **SIZES,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
}
LLAMA = {
    **SIZES,
    "ffn_hidden_size": 176,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "hidden_act": "swiglu",
    "qkv_has_bias": False,
    "out_proj_has_bias": False,
    "mlp_has_bias": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
LATENT = {
    **LLAMA,
    "group_query_attention": False,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 20,
    "qk_layernorm": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
    },
}
LATENT["num_query_groups"] = None
SINKS = {**LLAMA, "softmax_type": "learnable", "sliding_window": 5, "window_attn_skip_freq": 2}
QWEN = {**LLAMA, "qkv_has_bias": True}
VARIANTS = {"gpt2": GPT2, "gpt2_erf": {**GPT2, "bias_gelu_fusion": False}, "llama": LLAMA, "qwen": QWEN, "legacy_gpt2": GPT2}


def make_config(model, **parallel):
    """TransformerConfig of a dict of fields, with the fields of its parallel_config."""
    from mindspeed_ms.config import ModelParallelConfig, TransformerConfig

    return TransformerConfig(**model, parallel_config=ModelParallelConfig(**parallel))


def start(config, seed=1234):
    """Lay the grid of `config` over the world and seed it."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import model_parallel_manual_seed

    parallel = config.parallel_config
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
    )
    model_parallel_manual_seed(seed)


def make_model(config, model_class=None, **arguments):
    """The stage of the model that this rank holds, in training mode."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.legacy.model.gpt_model import GPTModel

    model = (model_class or GPTModel)(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **arguments,
    )
    model.set_train()
    return model


def batch(config, batch_size=2, seed=0, length=None):
    """Tokens, labels, position ids and loss mask `[b, s]` as Tensors."""
    import numpy as np
    from mindspore import Tensor

    random = np.random.RandomState(seed)
    length = length or config.seq_length
    tokens = random.randint(0, config.vocab_size, (batch_size, length + 1)).astype(np.int32)
    mask = (random.rand(batch_size, length) > 0.1).astype(np.float32)
    positions = np.tile(np.arange(length, dtype=np.int32), (batch_size, 1))
    return {
        name: Tensor.from_numpy(np.ascontiguousarray(array))
        for name, array in {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": positions,
            "loss_mask": mask,
        }.items()
    }


def fill(model, values):
    """Give each parameter its part of a dict of whole numpy arrays, by name."""
    import numpy as np
    from mindspore import Tensor

    from mindspeed_ms.core import storage

    for name, parameter in model.parameters_and_names():
        local = np.ascontiguousarray(parameter.sharding.split(values[name]), dtype=np.float32)
        storage.set_data(parameter, Tensor.from_numpy(local.copy()))


class Chunk:
    """A bare model chunk as `finalize_model_grads` takes it, with `main_grad` of every parameter."""

    def __init__(self, model):
        from mindspeed_ms.core import autograd, storage

        self.named = list(model.parameters_and_names())
        for _, parameter in self.named:
            gradient = autograd.tensor_grad(parameter)
            parameter.main_grad = storage.FlatBuffer(parameter.size, gradient.dtype).slice(0, parameter.size, parameter.shape)
            storage.write(parameter.main_grad, gradient)

    def routers_with_bias(self):
        """None."""
        return []

    def finish_grad_sync(self):
        """Nothing: there is no data parallelism."""

    def trainable_parameters(self):
        """All of them."""
        return [parameter for _, parameter in self.named]


def local_gradients(*models):
    """`{name: (sharding, gradient)}` of this rank's chunks, completed by `finalize_model_grads`."""
    from mindspeed_ms.core.distributed import finalize_model_grads

    chunks = [Chunk(model) for model in models]
    finalize_model_grads(chunks)
    return {
        name: (parameter.sharding, parameter.main_grad.asnumpy().copy()) for chunk in chunks for name, parameter in chunk.named
    }


def joined(results, key=None):
    """Whole arrays from the `{name: (sharding, array)}` that each rank returned."""
    from mindspeed_ms.layout.parameters import join

    parts = [result if key is None else result[key] for result in results]
    names = {name: None for part in parts for name in part}
    return {name: join([part[name] for part in parts if name in part]) for name in names}
