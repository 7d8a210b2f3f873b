"""Tiny models of megatron-core on CPU ranks, in any layout, with their optimizer and Megatron's `args`."""

import argparse
import contextlib
import os

ITERATION = 10


def size(case, name):
    return case["layout"].get(name) or 1


def needs_sequence_parallel(case):
    return size(case, "tp") > 1 and bool(case["model"].get("num_moe_experts"))


def dtype_of(case):
    import torch

    return torch.bfloat16 if case.get("bf16") else torch.float16 if case.get("fp16") else torch.float32


def build(case):
    """Model chunks of this rank, in DistributedDataParallel."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.peer.megatron_reference import _activation

    bf16 = bool(case.get("bf16"))
    vpp = size(case, "vpp")
    config = TransformerConfig(
        activation_func=_activation(case["activation"]),
        gated_linear_unit=case["activation"] == "swiglu",
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bf16=bf16,
        fp16=bool(case.get("fp16")),
        params_dtype=dtype_of(case),
        pipeline_dtype=dtype_of(case),
        tensor_model_parallel_size=size(case, "tp"),
        pipeline_model_parallel_size=size(case, "pp"),
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=size(case, "ep"),
        expert_tensor_parallel_size=case["layout"].get("etp") or size(case, "tp"),
        context_parallel_size=size(case, "cp"),
        sequence_parallel=needs_sequence_parallel(case),
        **case["model"],
    )
    experts = case["model"].get("num_moe_experts")
    chunks = []
    for chunk in range(vpp):
        if vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        if experts:
            config.moe_grouped_gemm = config.moe_use_legacy_grouped_gemm = bool(case.get("grouped"))
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        else:
            spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        further = config.mtp_num_layers and get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config,
            spec,
            mtp_block_spec=further or None,
            max_sequence_length=16,
            parallel_output=True,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            **case["gpt"],
        )
        if dtype_of(case) != torch.float32:
            model = Float16Module(config, model)
        chunks.append(model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=bool(case.get("distributed")),
        overlap_grad_reduce=bool(case.get("bucket_size")),
        bucket_size=case.get("bucket_size"),
    )
    return [DistributedDataParallel(config, settings, one, disable_bucketing=place > 0) for place, one in enumerate(chunks)]


def unwrapped(model):
    while hasattr(model, "module"):
        model = model.module
    return model


def adam(case, model):
    """Megatron's optimizer with a state of each parameter."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.0,
        weight_decay=0.1,
        bf16=bool(case.get("bf16")),
        fp16=bool(case.get("fp16")),
        params_dtype=dtype_of(case),
        use_distributed_optimizer=bool(case.get("distributed")),
        clip_grad=1.0,
    )
    fused = bool(case.get("fused"))
    distrib_optimizer.HAVE_APEX_OR_TE = fused  # FusedAdam counts steps by group, torch's AdamW by parameter
    optimizer = get_megatron_optimizer(config, model)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        for group in inner.param_groups if inner is not None else ():
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                step = {} if fused else {"step": torch.tensor(float(ITERATION))}
                inner.state[parameter] = {**step, **moments}
            if fused:
                group["step"] = ITERATION
    return optimizer


def arguments(case):
    """Megatron's `args`, those that say what the model is."""
    import torch

    model, gpt = case["model"], case["gpt"]
    values = {}
    base = os.environ.get("MEGATRON_ARGS")
    if base:
        values.update(vars(torch.load(base, weights_only=False)["args"]))
    values |= {
        "num_layers": model["num_layers"],
        "encoder_num_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "kv_channels": model.get("kv_channels") or model["hidden_size"] // model["num_attention_heads"],
        "group_query_attention": model.get("num_query_groups") is not None,
        "num_query_groups": model.get("num_query_groups") or 1,
        "qk_layernorm": bool(model.get("qk_layernorm")),
        "normalization": model.get("normalization", "LayerNorm"),
        "add_bias_linear": model.get("add_bias_linear", True),
        "add_qkv_bias": bool(model.get("add_qkv_bias")),
        "swiglu": case["activation"] == "swiglu",
        "num_experts": model.get("num_moe_experts"),
        "mtp_num_layers": model.get("mtp_num_layers"),
        "moe_ffn_hidden_size": model.get("moe_ffn_hidden_size")
        or (model["ffn_hidden_size"] if model.get("num_moe_experts") else None),
        "moe_layer_freq": model.get("moe_layer_freq", 1),
        "moe_router_enable_expert_bias": bool(model.get("moe_router_enable_expert_bias")),
        "moe_router_score_function": model.get("moe_router_score_function", "softmax"),
        "moe_router_topk": model.get("moe_router_topk", 2),
        "moe_grouped_gemm": bool(case.get("grouped")),
        "moe_shared_expert_intermediate_size": model.get("moe_shared_expert_intermediate_size"),
        "seq_length": 16,
        "encoder_seq_length": 16,
        "max_position_embeddings": 16,
        "position_embedding_type": gpt["position_embedding_type"],
        "vocab_size": gpt["vocab_size"],
        "padded_vocab_size": gpt["vocab_size"],
        "untie_embeddings_and_output_weights": not gpt["share_embeddings_and_output_weights"],
        "params_dtype": dtype_of(case),
        "bf16": bool(case.get("bf16")),
        "fp16": bool(case.get("fp16")),
        "transformer_impl": "local",
        "use_legacy_models": False,
        "tensor_model_parallel_size": size(case, "tp"),
        "pipeline_model_parallel_size": size(case, "pp"),
        "transformer_pipeline_model_parallel_size": size(case, "pp"),
        "virtual_pipeline_model_parallel_size": size(case, "vpp") if size(case, "vpp") > 1 else None,
        "expert_model_parallel_size": size(case, "ep"),
        "expert_tensor_parallel_size": case["layout"].get("etp") or size(case, "tp"),
        "context_parallel_size": size(case, "cp"),
        "sequence_parallel": needs_sequence_parallel(case),
        "data_parallel_size": size(case, "dp"),
        "world_size": size(case, "tp") * size(case, "pp") * size(case, "cp") * size(case, "dp"),
        "use_distributed_optimizer": bool(case.get("distributed")),
        "overlap_grad_reduce": bool(case.get("bucket_size")),
        "ddp_bucket_size": case.get("bucket_size"),
        "decoder_first_pipeline_num_layers": model.get("num_layers_in_first_pipeline_stage"),
        "decoder_last_pipeline_num_layers": model.get("num_layers_in_last_pipeline_stage"),
        "consumed_train_samples": 40,
        "consumed_valid_samples": 0,
        "no_save_optim": None,
        **case.get("args", {}),
    }
    return argparse.Namespace(**values)


def _patch():
    """Stand-ins for what is CUDA's, Transformer Engine's, or of another version of torch."""
    import copy
    import functools

    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with contextlib.suppress(ImportError):
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        how = {"serialization_format": SerializationFormat.TORCH_SAVE}
        filesystem_async._write_item = functools.partial(filesystem_async._write_item, **how)
    torch.optim.Adam.__setstate__ = torch.optim.Optimizer.__setstate__  # which asks for the steps of torch's AdamW
    experts.gg.assert_grouped_gemm_is_available = lambda: None
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")
    norm = WrappedTorchNorm.__new__

    def without_sequence_parallel(cls, config, *args, **kwargs):
        config = copy.copy(config)
        config.sequence_parallel = False
        return norm(cls, config, *args, **kwargs)

    WrappedTorchNorm.__new__ = without_sequence_parallel


def prepare():
    """Import torch and megatron-core, with CPU in place of CUDA."""
    import torch

    from mindspeed_ms.testing.megatron import redirect_cuda_to_cpu

    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    redirect_cuda_to_cpu()
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    _patch()


def initialize(case):
    from megatron.core import parallel_state, tensor_parallel

    vpp = size(case, "vpp")
    parallel_state.initialize_model_parallel(
        size(case, "tp"),
        size(case, "pp"),
        vpp if vpp > 1 else None,
        context_parallel_size=size(case, "cp"),
        expert_model_parallel_size=size(case, "ep"),
        expert_tensor_parallel_size=case["layout"].get("etp"),
        order=case.get("order", "tp-cp-ep-dp-pp"),
    )
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
