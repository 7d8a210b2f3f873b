"""`parallel_config`: parallel layout of the model and the data."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, OFF, ON, SWITCH, VALUE, YAML_ONLY, Alias, field
from mindspeed_ms.config.values import Bool, Dtype, IntList, LayerList, PositiveInt, Str, integer, one_of

RECOMPUTE_LISTS = ("recompute", "select_recompute", "select_comm_recompute")
ZERO_LEVELS = ("z1", "z2", "z3")
_OTHER_CP_ALGORITHMS = {
    "flash_sp": "flash_sp was an operator of no released MindSpore; use ulysses_cp_algo.",
    "adaptive_cp_algo": "adaptive_cp_algo skips what a mask hides, which megatron_cp_algo does for every mask; use that.",
    "hybrid_adaptive_cp_algo": (
        "hybrid_adaptive_cp_algo skips what a mask hides, which hybrid_cp_algo does for every mask; use that."
    ),
}


class ModelParallelConfig(Section):
    """`parallel_config`: parallel layout. `ModelParallelConfig(tensor_model_parallel_size=8, sequence_parallel=True)`."""

    config_name: ClassVar[str] = "parallel_config"
    groups: ClassVar[dict[str, dict[str, str]]] = {"recompute_config": {name: name for name in RECOMPUTE_LISTS}}

    tensor_model_parallel_size: PositiveInt = field(1, "Tensor parallel size.", "张量并行的大小。", "layout", names=("tp",))
    pipeline_model_parallel_size: PositiveInt = field(
        1, "Number of pipeline stages.", "流水线并行的级数。", "layout", names=("transformer_pipeline_model_parallel_size",)
    )
    context_parallel_size: PositiveInt = field(
        1,
        "Context parallel size: the sequence is cut over so many ranks.",
        "上下文并行的大小，即序列被切到多少个rank上。",
        "layout",
    )
    context_parallel_algo: one_of("ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo", reasons=_OTHER_CP_ALGORITHMS) = (
        field(
            "ulysses_cp_algo",
            "Attention under context parallelism: all-to-all, ring, or both.",
            "上下文并行的注意力算法：all-to-all、环形或两者混合。",
            "operators",
            aliases=(
                Alias(
                    "cp_comm_type",
                    "Megatron's names: p2p and allgather are the ring, a2a is all-to-all, a2a+p2p both.",
                    "Megatron的名称：p2p与allgather为环形，a2a为all-to-all，a2a+p2p为两者混合。",
                    convert=conversions.cp_comm_type,
                    form=LIST,
                    megatron=["p2p"],
                ),
            ),
        )
    )
    ulysses_degree_in_cp: PositiveInt | None = field(
        None,
        "Ulysses part of a hybrid context parallel group; divides context_parallel_size.",
        "混合上下文并行组中ulysses的度，须整除context_parallel_size。",
        "layout",
        convert=conversions.ulysses_degree,
        aliases=(
            Alias(
                "hierarchical_context_parallel_sizes",
                "Megatron's form for a2a+p2p: ulysses degree and size of the ring.",
                "Megatron用于a2a+p2p的写法：ulysses的度与环的大小。",
                convert=conversions.hierarchical_context_parallel_sizes,
                form=LIST,
            ),
        ),
    )
    expert_model_parallel_size: PositiveInt = field(1, "Expert parallel size.", "专家并行的大小。", "layout")
    expert_tensor_parallel_size: PositiveInt | None = field(
        None,
        "Tensor parallel size inside experts; null takes tensor_model_parallel_size.",
        "专家内部的张量并行大小，空表示与tensor_model_parallel_size相同。",
        "layout",
    )
    virtual_pipeline_model_parallel_size: PositiveInt | None = field(
        None,
        "Number of model chunks on each pipeline stage.",
        "每个流水线级上的模型块数（虚拟流水线）。",
        "layout",
        also=("--virtual-pipeline-model-parallel-size-ms", "--num-virtual-stages-per-pipeline-rank"),
        yaml_names=("virtual_pipeline_model_parallel_size_ms",),
    )
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = field(
        None,
        "Layers per model chunk; gives the number of chunks if no layer list is set.",
        "每个虚拟流水线块的层数；没有层列表时由它得出块数。",
        "layout",
    )
    num_layer_list: LayerList | None = field(
        None,
        "Layers per stage: [n, ...] of length pp, or rows of vpp chunks per stage ([pp][vpp]).",
        "每级的层数：长度为pp的列表，或每级一行、每行vpp块（[pp][vpp]）。",
        "layout",
        yaml_names=("layer_list",),
    )
    num_layer_list_order: one_of("pp_vpp", "vpp_pp") = field(
        "pp_vpp",
        "Meaning of the rows of a two-dimensional layer list: stages, or chunks as in upstream.",
        "二维层列表中行的含义：流水线级，或与上游相同的虚拟块。",
        "layout",
    )
    noop_layers: IntList | None = field(
        None, "Layer numbers (from 0) that pass their input through.", "直接透传输入的层号（从0开始）。", "parameters"
    )
    num_layers_in_first_pipeline_stage: PositiveInt | None = field(
        None,
        "Layers on the first stage; the rest is spread evenly.",
        "第一级的层数，其余层平均分配。",
        "layout",
        name="decoder_first_pipeline_num_layers",
        also=("--num-layers-in-first-pipeline-stage",),
    )
    num_layers_in_last_pipeline_stage: PositiveInt | None = field(
        None,
        "Layers on the last stage; the rest is spread evenly.",
        "最后一级的层数，其余层平均分配。",
        "layout",
        name="decoder_last_pipeline_num_layers",
        also=("--num-layers-in-last-pipeline-stage",),
    )
    account_for_embedding_in_pipeline_split: Bool = field(
        False, "Count the embedding as one layer when layers are spread.", "切分流水线时把词嵌入算作一层。", "layout"
    )
    account_for_loss_in_pipeline_split: Bool = field(
        False, "Count head and loss as one layer when layers are spread.", "切分流水线时把输出头和损失算作一层。", "layout"
    )
    standalone_embedding_stage: Bool = field(False, "The first stage holds only the embedding.", "第一级只放词嵌入。", "layout")
    sequence_parallel: Bool = field(
        False,
        "Cut activations outside tensor parallel regions along the sequence.",
        "在张量并行区域之外沿序列切分激活。",
        "operators",
    )
    recompute: LayerList | None = field(
        None, "Number of fully recomputed layers per stage (and chunk).", "每级（每块）完全重计算的层数。", "operators"
    )
    select_recompute: LayerList | None = field(
        None, "Number of selectively recomputed layers per stage (and chunk).", "每级（每块）选择重计算的层数。", "operators"
    )
    select_comm_recompute: LayerList | None = field(
        None,
        "Number of layers per stage (and chunk) whose sequence gather is repeated in backward.",
        "每级（每块）在反向中重做序列聚合通信的层数。",
        "log",
        ignored=(
            "only this rank's part of the sequence is kept and the gather is repeated in the backward in any case",
            "总是只保留本rank的序列部分，反向中总是重做聚合通信",
        ),
    )
    zero_level: one_of(*ZERO_LEVELS) | None = field(
        None,
        "What is sharded over data parallel ranks: optimizer (z1), gradients (z2), parameters (z3).",
        "在数据并行rank间切分的内容：优化器(z1)、梯度(z2)、参数(z3)。",
        "memory",
    )
    zero_shard_size: PositiveInt | None = field(
        None,
        "Shard inside groups of this many ranks; null takes the whole data parallel group.",
        "切分所用组的大小，空表示整个数据并行组。",
        "memory",
        convert=conversions.zero_shard_size,
    )
    overlap_grad_reduce: Bool = field(
        False,
        "Second place of training_config.overlap_grad_reduce, as upstream has it.",
        "与training_config.overlap_grad_reduce相同（沿用上游的位置）。",
        "operators",
        name=YAML_ONLY,
    )
    gradient_accumulation_fusion: Bool = field(
        False,
        "Accumulate weight gradients inside the matrix product.",
        "在矩阵乘中直接累加权重梯度。",
        "log",
        form=OFF,
        megatron=True,
        ignored=("weight gradients are added to the gradient buffer in any case", "权重梯度总是直接累加到梯度缓冲区"),
    )
    overlap_p2p_comm: Bool = field(
        True,
        "Overlap sends and receives of the interleaved schedule with compute.",
        "交错调度中收发与计算重叠。",
        "operators",
        form=ON,
        off="--no-overlap-p2p-communication",
        note=("as in Megatron it has an effect under virtual pipeline only", "与Megatron相同，仅虚拟流水线下有作用"),
    )
    variable_seq_lengths: Bool = field(
        False,
        "Stages exchange shapes before tensors, for batches of different length.",
        "各级先交换形状再传张量，用于变长批次。",
        "operators",
    )
    microbatch_group_size_per_virtual_pipeline_stage: PositiveInt | None = field(
        None,
        "Micro-batches that one chunk handles in a row; null takes pp.",
        "一个块连续处理的微批数，空表示pp。",
        "operators",
        name="microbatch_group_size_per_vp_stage",
        names=("microbatch_group_size_per_virtual_pipeline_stage",),
        form=VALUE,
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    deallocate_pipeline_outputs: Bool = field(
        True, "Free a stage's output once it was sent.", "输出发送后立即释放。", "memory", form=SWITCH
    )
    recv_dtype: Dtype | None = field(
        None,
        "Data type received from the stage before.",
        "从上一级接收的数据类型。",
        "operators",
        derived="compute_dtype of the model",
    )
    use_cpu_initialization: Bool = field(
        False,
        "Initialise weights on the host; ours are always drawn there.",
        "在主机上初始化权重（本框架总是如此）。",
        "log",
        ignored=("weights are drawn on the host in any case", "权重总是在主机上初始化"),
    )
    deterministic_mode: Bool = field(
        False,
        "Bit-equal results on every run; ours always are.",
        "每次运行结果逐位相同（本框架总是如此）。",
        "log",
        also=("--use-deter-comp", "--npu-deterministic"),
        ignored=("every run of one configuration is bit-equal in any case", "同一配置的每次运行结果总是逐位相同"),
    )
    order: Str = field(
        "tp-cp-ep-dp-pp",
        "Order of the rank axes, fastest first.",
        "rank各轴的次序，变化最快的在前。",
        "layout",
        names=("rank_order",),
        form=VALUE,
        flag="--rank-order",
        aliases=(
            Alias("use_tp_pp_dp_mapping", "Rank order tp-cp-ep-pp-dp.", "rank次序tp-cp-ep-pp-dp。", value="tp-cp-ep-pp-dp"),
        ),
    )
    distributed_timeout_minutes: PositiveInt = field(
        10, "Minutes after which a collective that has not ended is an error.", "集合通信超时的分钟数。", "error"
    )
    communication_backend: one_of("shm", "mccl", "hccl") | None = field(
        None,
        "Collectives by shared memory, MCCL or HCCL; null takes the device's own.",
        "集合通信后端：共享内存、MCCL或HCCL，空表示按设备选择。",
        "log",
        name="comm_backend",
        also=("--communication-backend",),
        aliases=(
            Alias(
                "distributed_backend",
                "Megatron's backend; nccl and gloo leave the choice to the device.",
                "Megatron的通信后端；nccl和gloo按设备自动选择。",
                convert=conversions.distributed_backend,
                form=VALUE,
            ),
        ),
    )
    world_size: integer(gt=0, le=1000000) | None = field(
        None,
        "Number of ranks; known at start.",
        "rank总数，启动时得知。",
        "layout",
        derived="launcher",
        name="world",
        also=("--world-size",),
    )
    data_parallel_size: PositiveInt | None = field(
        None, "Data parallel size.", "数据并行的大小。", "error", derived="world_size / (tp * pp * cp)"
    )
    data_parallel_random_init: Bool = field(
        False,
        "Initialise each data parallel rank differently.",
        "各数据并行rank使用不同的初始化。",
        "error",
        refused=(
            "data parallel ranks hold the same weights, so they start from the same ones",
            "各数据并行rank的权重相同，初始化也相同",
        ),
    )
    tp_comm_overlap: Bool = field(
        False,
        "Overlap tensor parallel collectives with matrix products.",
        "张量并行通信与矩阵乘重叠。",
        "log",
        ignored=(
            "tensor parallel collectives already overlap on a backend that is asynchronous",
            "异步后端上张量并行通信已与计算重叠",
        ),
    )

    @property
    def recompute_config(self):
        """Recompute lists that are set (dict), or None."""
        return {name: self[name] for name in RECOMPUTE_LISTS if self[name]} or None
