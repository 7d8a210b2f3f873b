"""Rows of ``training_config`` about checkpoints and profiling."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import LIST, ON, SWITCH, VALUE, ignored, row

_ASCEND = ("has an effect on Ascend only", "仅在Ascend上有作用")


def _training(name, field=None, **details):
    return row(name, f"training_config.{field or name}", **details)


def _profile(name, ascend=False, **details):
    reason = {"reason": _ASCEND[0], "reason_zh": _ASCEND[1]} if ascend else {}
    return _training(name, seen="file", **reason, **details)


ROWS = (
    _training(
        "save",
        "output_dir",
        also=("--output-dir",),
        megatron=None,
        convert=conversions.save,
        seen="file",
        reason="as in Megatron nothing is saved from arguments without --save",
        reason_zh="与Megatron相同，参数方式下没有--save则不保存",
    ),
    _training("save_enabled", form=SWITCH, megatron=False, seen="file"),
    _training("save_interval", also=("--persistent-save-interval",), seen="file"),
    _training("non_persistent_save_interval", seen="file"),
    _training(
        "ckpt_prefix",
        "prefix",
        also=("--prefix",),
        seen="log",
        **ignored(
            "without ckpt_format, whose files begin with it: a checkpoint is a folder iter_N, as Megatron's",
            "未设置ckpt_format时忽略（设置后为其文件名前缀）：检查点是iter_N目录，与Megatron相同",
        ),
    ),
    _training(
        "ckpt_format",
        convert=conversions.ckpt_format,
        megatron=None,
        seen="file",
        reason="unset and Megatron's names (torch, torch_dist, ...) take our own format",
        reason_zh="不设置或使用Megatron的名称（torch、torch_dist等）时为本框架的格式",
    ),
    _training("keep_checkpoint_max", also=("--max-keep-ckpts",), seen="file"),
    _training("resume_crc_check", "crc_check", also=("--crc-check",), seen="error"),
    _training("async_save", seen="file"),
    _training("no_save_optim", seen="file"),
    _training("no_save_rng", seen="file"),
    _training("resume_training", seen="log"),
    _training(
        "load",
        "load_checkpoint",
        also=("--load-checkpoint",),
        megatron=None,
        convert=conversions.load,
        seen="output",
        reason="from arguments it resumes, as in Megatron, unless --finetune",
        reason_zh="参数方式下与Megatron相同，会续训，除非--finetune",
    ),
    _training("ckpt_step", seen="output"),
    _training("load_strict", form=SWITCH, seen="error"),
    row(
        "load_checkpoint_loosely",
        "training_config.load_strict",
        form=ON,
        convert=conversions.load_loosely,
        megatron=None,
        seen="error",
        english="The same as load_strict False.",
        chinese="等同load_strict: False。",
    ),
    row(
        "dist_ckpt_strictness",
        "training_config.load_strict",
        form=VALUE,
        convert=conversions.strictness,
        megatron=None,
        seen="error",
        english="raise_all, raise_unexpected: load_strict True; log_*, ignore_all: False.",
        chinese="raise_all、raise_unexpected等同load_strict: True；log_*、ignore_all等同False。",
    ),
    _training("pretrained_checkpoint", seen="output"),
    _training("finetune", seen="log"),
    _training("no_load_optim", seen="optimizer"),
    _training("no_load_rng", seen="output"),
    _training("new_dataset", seen="data"),
    _training("exit_on_missing_checkpoint", seen="error"),
    _training("use_checkpoint_args", seen="parameters"),
    _profile("profile"),
    _profile("profile_save_path"),
    _profile(
        "profile_step_start",
        megatron=10,
        needs=("profile",),
        reason="this step is profiled too; Megatron starts behind it",
        reason_zh="该步也被分析；Megatron从其后开始",
    ),
    _profile("profile_step_end", megatron=12, needs=("profile",)),
    _profile("profile_ranks", form=LIST, megatron=[0], needs=("profile",)),
    _profile("profile_level", ascend=True),
    _profile(
        "profile_with_stack",
        form=SWITCH,
        reason="on CPU they are recorded by cProfile, into python_calls_*.prof",
        reason_zh="CPU上由cProfile记录到python_calls_*.prof",
    ),
    _profile("profile_memory", form=SWITCH, also=("--profile-with-memory",)),
    _profile("profile_framework"),
    row(
        "profile_with_cpu",
        "training_config.profile_framework",
        form=ON,
        convert=conversions.profile_with_cpu,
        megatron=None,
        seen="file",
        english="The same as profile_framework all.",
        chinese="等同profile_framework: all。",
    ),
    _profile("profile_communication", ascend=True, form=SWITCH),
    _profile("profile_parallel_strategy", ascend=True, form=SWITCH),
    _profile("profile_aicore_metrics", ascend=True),
    _profile("profile_l2_cache", ascend=True, form=SWITCH),
    _profile("profile_hbm_ddr", ascend=True, form=SWITCH),
    _profile("profile_pcie", ascend=True, form=SWITCH),
    _profile("profile_data_process", ascend=True, form=SWITCH),
    _profile("profile_data_simplification", ascend=True, form=SWITCH),
    _profile("profile_record_shapes", ascend=True),
    _profile("profile_export_type", ascend=True),
    _profile("profile_op_time", form=SWITCH),
    _profile("profile_offline_analyse", form=SWITCH),
    _profile("profile_dynamic_profiler_config_path"),
)
