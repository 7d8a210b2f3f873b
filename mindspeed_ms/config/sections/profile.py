"""The part of `training_config` about profiling."""

from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, SWITCH, Alias, field
from mindspeed_ms.config.values import Bool, IntList, PositiveInt, Str, integer, one_of

_ASCEND = ("has an effect on Ascend only", "仅在Ascend上有作用")


class ProfileFields(Section):
    """Profiling of some steps by mindspore.profiler."""

    profile: Bool = field(False, "Profile some steps.", "对若干步做性能分析。", "file")
    profile_save_path: Str | None = field(
        None, "Folder of the profile.", "性能数据目录。", "file", derived="output_dir/profile"
    )
    profile_step_start: PositiveInt = field(
        1,
        "First profiled step, from 1.",
        "开始分析的步，从1起。",
        "file",
        megatron=10,
        needs=("profile",),
        note=("this step is profiled too; Megatron starts behind it", "该步也被分析；Megatron从其后开始"),
    )
    profile_step_end: PositiveInt = field(
        5, "Last profiled step.", "结束分析的步（含）。", "file", megatron=12, needs=("profile",)
    )
    profile_ranks: IntList | None = field(
        None,
        "Ranks that are profiled; null or -1: all.",
        "做性能分析的rank，空或-1表示全部。",
        "file",
        form=LIST,
        megatron=[0],
        needs=("profile",),
    )
    profile_level: one_of("level0", "level1", "level2") = field(
        "level0", "Amount of detail.", "详细程度。", "file", note=_ASCEND
    )
    profile_with_stack: Bool = field(
        False,
        "Record Python calls.",
        "记录Python调用栈。",
        "file",
        form=SWITCH,
        note=("on CPU they are recorded by cProfile, into python_calls_*.prof", "CPU上由cProfile记录到python_calls_*.prof"),
    )
    profile_memory: Bool = field(
        False,
        "Record memory.",
        "记录内存。",
        "file",
        form=SWITCH,
        also=("--profile-with-memory",),
        yaml_names=("profile_with_memory",),
    )
    profile_framework: one_of("all", "time", "None") | Bool = field(
        False,
        "Record the framework's own work.",
        "记录框架自身的耗时。",
        "file",
        aliases=(Alias("profile_with_cpu", "The same as profile_framework all.", "等同profile_framework: all。", value="all"),),
    )
    profile_communication: Bool = field(
        False,
        "Record communication: level1 at least (Ascend).",
        "记录通信，至少level1（Ascend）。",
        "file",
        form=SWITCH,
        note=_ASCEND,
    )
    profile_parallel_strategy: Bool = field(
        False, "Record the parallel layout (Ascend).", "记录并行策略（Ascend）。", "file", form=SWITCH, note=_ASCEND
    )
    profile_aicore_metrics: integer(ge=-1, le=6) = field(
        0,
        "Set of AI Core counters from level1 on; -1 for none (Ascend).",
        "AI Core计数器组，-1表示无（Ascend）。",
        "file",
        note=_ASCEND,
    )
    profile_l2_cache: Bool = field(
        False, "Record the L2 cache (Ascend).", "记录L2缓存（Ascend）。", "file", form=SWITCH, note=_ASCEND
    )
    profile_hbm_ddr: Bool = field(
        False, "Record HBM and DDR (Ascend).", "记录HBM和DDR（Ascend）。", "file", form=SWITCH, note=_ASCEND
    )
    profile_pcie: Bool = field(False, "Record PCIe (Ascend).", "记录PCIe（Ascend）。", "file", form=SWITCH, note=_ASCEND)
    profile_data_process: Bool = field(
        False, "Record data pipelines (Ascend).", "记录数据处理（Ascend）。", "file", form=SWITCH, note=_ASCEND
    )
    profile_data_simplification: Bool = field(
        False,
        "Remove raw data after the analysis (Ascend).",
        "分析后删除原始数据（Ascend）。",
        "file",
        form=SWITCH,
        note=_ASCEND,
    )
    profile_record_shapes: Bool = field(
        False, "Record the operators' shapes (Ascend).", "记录算子输入形状（Ascend）。", "file", note=_ASCEND
    )
    profile_export_type: one_of("text", "db") = field(
        "text", "Form of the result (Ascend).", "结果格式（Ascend）。", "file", note=_ASCEND
    )
    profile_op_time: Bool = field(True, "Record operators.", "记录算子耗时。", "file", form=SWITCH)
    profile_offline_analyse: Bool = field(
        False, "Leave the analysis to a later command.", "事后用命令离线分析。", "file", form=SWITCH
    )
    profile_dynamic_profiler_config_path: Str | None = field(
        "",
        "profiler_config.json, or its folder: it starts and stops profiling while the training runs.",
        "运行中控制分析的profiler_config.json或其目录。",
        "file",
    )
