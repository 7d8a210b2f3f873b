"""Rows of ``parallel_config``."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import OFF, ON, SWITCH, VALUE, ignored, refused, row, yaml_only


def _parallel(name, field=None, **details):
    return row(name, f"parallel_config.{field or name}", **details)


ROWS = (
    _parallel("tensor_model_parallel_size", names=("tp",), seen="layout"),
    _parallel("pipeline_model_parallel_size", names=("transformer_pipeline_model_parallel_size",), seen="layout"),
    _parallel("context_parallel_size", seen="layout"),
    _parallel("context_parallel_algo", seen="operators"),
    _parallel("ulysses_degree_in_cp", convert=conversions.ulysses_degree, seen="layout"),
    _parallel("expert_model_parallel_size", seen="layout"),
    _parallel("expert_tensor_parallel_size", seen="layout"),
    _parallel(
        "virtual_pipeline_model_parallel_size",
        also=("--virtual-pipeline-model-parallel-size-ms", "--num-virtual-stages-per-pipeline-rank"),
        seen="layout",
    ),
    _parallel("num_layers_per_virtual_pipeline_stage", seen="layout"),
    _parallel("num_layer_list", seen="layout"),
    _parallel("num_layer_list_order", seen="layout"),
    _parallel("noop_layers", seen="parameters"),
    _parallel(
        "decoder_first_pipeline_num_layers",
        "num_layers_in_first_pipeline_stage",
        also=("--num-layers-in-first-pipeline-stage",),
        seen="layout",
    ),
    _parallel(
        "decoder_last_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage",
        also=("--num-layers-in-last-pipeline-stage",),
        seen="layout",
    ),
    _parallel("account_for_embedding_in_pipeline_split", seen="layout"),
    _parallel("account_for_loss_in_pipeline_split", seen="layout"),
    _parallel("standalone_embedding_stage", seen="layout"),
    _parallel("sequence_parallel", seen="operators"),
    _parallel("recompute", seen="operators"),
    _parallel("select_recompute", seen="operators"),
    _parallel(
        "select_comm_recompute",
        seen="log",
        **ignored(
            "only this rank's part of the sequence is kept and the gather is repeated in the backward in any case",
            "总是只保留本rank的序列部分，反向中总是重做聚合通信",
        ),
    ),
    _parallel("zero_level", seen="memory"),
    _parallel("zero_shard_size", seen="memory", convert=conversions.minus_one_is_none("parallel_config.zero_shard_size")),
    yaml_only("parallel_config.overlap_grad_reduce", seen="operators"),
    _parallel(
        "gradient_accumulation_fusion",
        form=OFF,
        megatron=True,
        seen="log",
        **ignored("weight gradients are added to the gradient buffer in any case", "权重梯度总是直接累加到梯度缓冲区"),
    ),
    _parallel(
        "overlap_p2p_comm",
        form=ON,
        off="--no-overlap-p2p-communication",
        seen="operators",
        reason="as in Megatron it has an effect under virtual pipeline only",
        reason_zh="与Megatron相同，仅虚拟流水线下有作用",
    ),
    _parallel("variable_seq_lengths", seen="operators"),
    _parallel(
        "microbatch_group_size_per_vp_stage",
        "microbatch_group_size_per_virtual_pipeline_stage",
        form=VALUE,
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
        names=("microbatch_group_size_per_virtual_pipeline_stage",),
        seen="operators",
    ),
    _parallel("deallocate_pipeline_outputs", form=SWITCH, seen="memory"),
    _parallel("recv_dtype", seen="operators"),
    _parallel(
        "use_cpu_initialization", seen="log", **ignored("weights are drawn on the host in any case", "权重总是在主机上初始化")
    ),
    _parallel(
        "deterministic_mode",
        also=("--use-deter-comp", "--npu-deterministic"),
        seen="log",
        **ignored("every run of one configuration is bit-equal in any case", "同一配置的每次运行结果总是逐位相同"),
    ),
    _parallel("order", form=VALUE, flag="--rank-order", names=("rank_order",), seen="layout"),
    row(
        "use_tp_pp_dp_mapping",
        "parallel_config.order",
        form=ON,
        convert=conversions.rank_order,
        megatron=None,
        seen="layout",
        english="Rank order tp-cp-ep-pp-dp.",
        chinese="rank次序tp-cp-ep-pp-dp。",
    ),
    _parallel("distributed_timeout_minutes", seen="error"),
    _parallel("comm_backend", "communication_backend", also=("--communication-backend",), seen="log"),
    row(
        "distributed_backend",
        "parallel_config.communication_backend",
        convert=conversions.distributed_backend,
        megatron=None,
        seen="log",
        english="Megatron's backend; nccl and gloo leave the choice to the device.",
        chinese="Megatron的通信后端；nccl和gloo按设备自动选择。",
    ),
    _parallel("world", "world_size", also=("--world-size",), seen="layout"),
    _parallel("data_parallel_size", seen="error"),
    _parallel(
        "data_parallel_random_init",
        seen="error",
        **refused(
            "data parallel ranks hold the same weights, so they start from the same ones",
            "各数据并行rank的权重相同，初始化也相同",
        ),
    ),
    _parallel(
        "tp_comm_overlap",
        seen="log",
        **ignored(
            "tensor parallel collectives already overlap on a backend that is asynchronous",
            "异步后端上张量并行通信已与计算重叠",
        ),
    ),
)
