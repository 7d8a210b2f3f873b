"""Rules about profiling."""

import os

from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.sections.field import default_of
from mindspeed_ms.config.sections.profile import ProfileFields

_T = "training_config"


@rule
def profile_steps_fit(context):
    """Refuse a profile start after its end, and a wrong path of the dynamic profiler's file."""
    training = context.training
    if training.profile_step_start > training.profile_step_end:
        yield context.problem(f"{_T}.profile_step_start", "must not be after profile_step_end", f"{_T}.profile_step_end")
    path = f"{_T}.profile_dynamic_profiler_config_path"
    file = training.profile_dynamic_profiler_config_path
    if file and not os.path.exists(file):
        yield context.problem(path, "is no existing file")
    elif file and not os.path.isdir(file) and os.path.basename(file) != "profiler_config.json":
        yield context.problem(
            path, "expects a file named profiler_config.json (the only name that mindspore.profiler reads), or its folder"
        )


@rule
def profile_rows_have_effect(context):
    """Notice if profile settings have no effect."""
    training = context.training
    if not training.profile:
        idle = [
            name
            for name, info in ProfileFields.own_fields().items()
            if context.was_set(f"{_T}.{name}") and training[name] != default_of(info)
        ]
        if idle:
            context.notice(f"{', '.join(idle)}: no effect, since profile is False")
        return ()
    counters, level = training.profile_aicore_metrics, training.profile_level
    if context.was_set(f"{_T}.profile_aicore_metrics"):
        if counters >= 0 and level == "level0" and not training.profile_communication:
            context.notice("profile_aicore_metrics: no effect at profile_level level0, which has no AI Core counters")
        if counters < 0 and level != "level0":
            context.notice(f"profile_aicore_metrics -1: mindspore.profiler records PipeUtilization at {level} anyway")
    if 0 < training.training_iters < training.profile_step_start:
        context.notice(
            f"profile: nothing is profiled, since profile_step_start {training.profile_step_start} lies behind the last "
            f"step {training.training_iters}"
        )
    return ()
