"""Rows of ``moe_config`` and ``lora_config``."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import LIST, ON, SWITCH, ignored, row, yaml_only

_SAME_NUMBERS = (
    "it changes how the same numbers are computed; the fastest way is taken",
    "只改变相同数值的计算方式，本框架自行取最快者",
)


def _moe(name, field=None, **details):
    return row(name, f"moe_config.{field or name}", **details)


def _lora(name, field=None, **details):
    return row(name, f"lora_config.{field or name}", **details)


ROWS = (
    _moe("num_experts", megatron=None, seen="parameters"),
    _moe("moe_ffn_hidden_size", also=("--moe-intermediate-size",), seen="parameters", convert=conversions.moe_ffn_hidden_size),
    _moe("moe_grouped_gemm", seen="operators"),
    _moe("moe_router_topk", seen="output"),
    _moe("moe_router_load_balancing_type", megatron="aux_loss", convert=conversions.load_balancing, seen="output"),
    _moe("moe_router_score_function", seen="output"),
    _moe("moe_router_pre_softmax", seen="output"),
    _moe("moe_router_dtype", seen="output"),
    row(
        "router_gating_in_fp32",
        "moe_config.moe_router_dtype",
        form=ON,
        convert=conversions.router_in_fp32,
        megatron=None,
        seen="output",
        english="The same as moe_router_dtype fp32.",
        chinese="等同moe_router_dtype: fp32。",
    ),
    _moe("moe_router_num_groups", also=("--n-group",), seen="output"),
    _moe("moe_router_group_topk", also=("--topk-group",), seen="output"),
    _moe("moe_router_topk_scaling_factor", also=("--routed-scaling-factor",), seen="output"),
    _moe("moe_router_enable_expert_bias", seen="output"),
    _moe("moe_router_bias_update_rate", seen="output"),
    _moe("norm_topk_prob", seen="output"),
    _moe("moe_token_dispatcher_type", megatron="allgather", needs=("num_experts",), seen="operators"),
    _moe("use_self_defined_alltoall", form=SWITCH, seen="log", **ignored(*_SAME_NUMBERS)),
    _moe("moe_expert_capacity_factor", seen="output"),
    _moe("moe_pad_expert_input_to_capacity", seen="operators"),
    _moe("moe_token_drop_policy", seen="output"),
    _moe("moe_aux_loss_coeff", seen="optimizer"),
    _moe("moe_z_loss_coeff", seen="optimizer"),
    _moe("moe_input_jitter_eps", seen="output"),
    _moe("moe_layer_freq", convert=conversions.moe_layer_freq, megatron=None, seen="parameters"),
    _moe("first_k_dense_replace", convert=conversions.first_k_dense, seen="parameters"),
    _moe("moe_shared_expert_intermediate_size", seen="parameters"),
    _moe("n_shared_experts", seen="parameters"),
    _moe("moe_shared_expert_overlap", seen="operators"),
    _moe(
        "moe_permute_fusion",
        also=("--use-fused-moe-token-permute-and-unpermute", "--moe-permutation-async-comm"),
        seen="log",
        **ignored(*_SAME_NUMBERS),
    ),
    _moe("moe_per_layer_logging", seen="log"),
    _moe("moe_layer_recompute", seen="operators"),
    _moe("moe_extended_tp", also=("--moe-tp-extend-ep",), seen="layout"),
    _lora("use_lora", form=SWITCH, seen="parameters"),
    _lora("lora_rank", also=("--lora-r",), megatron=16, needs=("lora_target_modules", "use_lora"), seen="parameters"),
    _lora("lora_alpha", seen="output"),
    _lora("lora_dropout", seen="output"),
    _lora("lora_target_modules", "target_cells", form=LIST, convert=conversions.lora_targets, megatron=None, seen="parameters"),
    yaml_only(
        "lora_config.lora_module",
        seen="log",
        **ignored("it is filled when the model is built; target_cells names the layers", "建模时填入；请用target_cells指定层"),
    ),
)
