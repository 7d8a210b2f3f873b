"""Profiling of training steps by `mindspore.profiler`, and the analysis of the recorded data.

    python -m mindspeed_ms.core.profiler output/profile      # analyse what profile_offline_analyse left

On CPU MindSpore records operators, memory and a timeline; the rest of its settings acts on Ascend only, which is said at
the start. `profile_with_stack` records Python calls by cProfile there.
"""

import cProfile
import glob
import os
import sys

from mindspeed_ms.core.device import has_own_kernels
from mindspeed_ms.core.logging import logger
from mindspeed_ms.spelling import SuggestingParser

# the order of the numbers that profile_aicore_metrics takes, from 0
AICORE_METRICS = (
    "ArithmeticUtilization",
    "PipeUtilization",
    "Memory",
    "MemoryL0",
    "ResourceConflictRatio",
    "MemoryUB",
    "L2Cache",
)
ASCEND_ONLY = {
    "profile_level": "level0",
    "profile_communication": False,
    "profile_parallel_strategy": False,
    "profile_aicore_metrics": 0,
    "profile_l2_cache": False,
    "profile_hbm_ddr": False,
    "profile_pcie": False,
    "profile_data_process": False,
    "profile_data_simplification": False,
    "profile_record_shapes": False,
    "profile_export_type": "text",
}
DYNAMIC_FILE = "profiler_config.json"
FOLDERS = "*_ascend_ms"


def make_profiler(training_config, rank):
    """Profiler of a rank: one that does nothing unless `profile` is set and the rank is chosen.

    Args:
        training_config (TrainingConfig): its `profile` fields; `output_dir` for the default folder.
        rank (int): this process.
    """
    ranks = training_config.profile_ranks
    if not training_config.profile or (ranks and -1 not in ranks and rank not in ranks):
        return NoProfiler()
    folder = training_config.profile_save_path or os.path.join(training_config.output_dir, "profile")
    folder = os.path.join(folder, f"rank_{rank}")
    if training_config.profile_dynamic_profiler_config_path:
        return DynamicProfiler(training_config.profile_dynamic_profiler_config_path, folder)
    return StepProfiler(training_config, folder)


class NoProfiler:
    """Profiler that does nothing; base class with the hooks `before_step` and `after_step`."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def before_step(self, iteration):
        """Hook before the data of step `iteration` (from 1) is read."""

    def after_step(self, iteration):
        """Hook after step `iteration`."""

    def close(self):
        """End a running recording."""


class StepProfiler(NoProfiler):
    """Profiler of the steps from `profile_step_start` to `profile_step_end`, both included, counted from 1.

    Args:
        settings (TrainingConfig): the `profile` fields.
        folder (str): where the files of this rank go.
    """

    def __init__(self, settings, folder):
        self.settings = settings
        self.folder = folder
        self.first, self.last = settings.profile_step_start, settings.profile_step_end
        self.on_ascend = has_own_kernels()
        self._profile = None
        self._python_calls = None
        if not self.on_ascend:
            _name_what_cpu_does_not_record(settings)

    def before_step(self, iteration):
        if self._profile is None and self.first <= iteration <= self.last:
            os.makedirs(self.folder, exist_ok=True)
            self._profile = _make_profile(self.settings, self.folder, self.last - iteration + 1, self.on_ascend)
            self._profile.start()
            if self.settings.profile_with_stack and not self.on_ascend:
                self._python_calls = cProfile.Profile()
                self._python_calls.enable()

    def after_step(self, iteration):
        if self._profile is None:
            return
        if iteration >= self.last:
            self.close()
        else:
            self._profile.step()

    def close(self):
        if self._python_calls is not None:
            self._python_calls.disable()
            path = os.path.join(self.folder, f"python_calls_{self.first}_{self.last}.prof")
            self._python_calls.dump_stats(f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
            self._python_calls = None
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
            self._say_what_was_written()

    def _say_what_was_written(self):
        if not glob.glob(os.path.join(self.folder, FOLDERS)):
            logger.warning("mindspore.profiler left nothing in %s; its own log says why", self.folder)
        elif self.settings.profile_offline_analyse:
            logger.info("profile: %s; analyse it by: python -m mindspeed_ms.core.profiler %s", self.folder, self.folder)
        else:
            logger.info("profile: %s", self.folder)


class DynamicProfiler(NoProfiler):
    """Profiler of steps that a file names while the training runs (mindspore.profiler.DynamicProfilerMonitor).

    Args:
        path (str): profiler_config.json, or the folder that holds it.
        folder (str): where the files of this rank go.
    """

    def __init__(self, path, folder):
        from mindspore import profiler

        self._monitor = profiler.DynamicProfilerMonitor(
            cfg_path=path if os.path.isdir(path) else os.path.dirname(path) or ".", output_path=folder
        )

    def before_step(self, iteration):
        self._monitor.step()


def _name_what_cpu_does_not_record(settings):
    names = [name for name, default in ASCEND_ONLY.items() if getattr(settings, name) != default]
    if names:
        logger.warning("profile: %s: recorded on Ascend only, no effect on CPU", ", ".join(names))


def _make_profile(settings, folder, steps, on_ascend):
    """Build a mindspore.profiler.profile, not started."""
    from mindspore import profiler

    schedule = None
    if not settings.profile_data_process:  # MindSpore records the data pipeline only without a schedule
        schedule = profiler.schedule(wait=0, warmup=0, active=steps, repeat=1)
    level = max(int(settings.profile_level[-1]), int(settings.profile_communication))
    experimental = profiler._ExperimentalConfig(
        profiler_level=profiler.ProfilerLevel(f"Level{level}"),
        aic_metrics=_aicore_metrics(profiler, settings, level),
        l2_cache=settings.profile_l2_cache,
        data_simplification=settings.profile_data_simplification,
        export_type=[profiler.ExportType(settings.profile_export_type)],
    )
    return profiler.profile(
        activities=_activities(profiler.ProfilerActivity, settings, on_ascend),
        with_stack=settings.profile_with_stack,
        profile_memory=settings.profile_memory,
        data_process=settings.profile_data_process,
        parallel_strategy=settings.profile_parallel_strategy,
        start_profile=False,
        hbm_ddr=settings.profile_hbm_ddr,
        pcie=settings.profile_pcie,
        record_shapes=settings.profile_record_shapes,
        schedule=schedule,
        on_trace_ready=profiler.tensorboard_trace_handler(folder, analyse_flag=not settings.profile_offline_analyse),
        experimental_config=experimental,
    )


def _activities(kinds, settings, on_ascend):
    """Activities to record: the device's for operators (on CPU the framework's own), the framework's if asked for."""
    device = kinds.NPU if on_ascend else kinds.CPU
    framework = settings.profile_framework not in (False, "None")
    # call stacks, shapes and memory belong to the framework's records
    framework |= on_ascend and (settings.profile_with_stack or settings.profile_record_shapes or settings.profile_memory)
    asked = ([kinds.CPU] if framework else []) + ([device] if settings.profile_op_time else [])
    return list(dict.fromkeys(asked))


def _aicore_metrics(profiler, settings, level):
    """AI Core counters to record: none at level 0; MindSpore's other levels always record some."""
    number = settings.profile_aicore_metrics
    if level == 0 or number < 0:
        return profiler.AicoreMetrics.AiCoreNone
    return profiler.AicoreMetrics(AICORE_METRICS[number])


def find_profiles(folder):
    """Folders of profiles that `mindspore.profiler` wrote below `folder`, or `folder` itself (list of str)."""
    folder = os.path.abspath(folder)
    found = glob.glob(os.path.join(folder, "**", FOLDERS), recursive=True)
    return sorted({*found, *([folder] if folder.endswith(FOLDERS[1:]) else [])})


def analyse(folder):
    """Convert the raw data of one profile into tables and a timeline (`ASCEND_PROFILER_OUTPUT`).

    Args:
        folder (str): one that `find_profiles` names.

    Returns:
        list[str]: the files of the result; empty if the data could not be read.
    """
    output = os.path.join(folder, "ASCEND_PROFILER_OUTPUT")
    if glob.glob(os.path.join(folder, "PROF_*")):
        from mindspore.profiler.profiler import analyse as analyse_ascend

        analyse_ascend(profiler_path=folder, max_process_number=1, data_simplification=False)
    else:
        _analyse_cpu(folder, output)
    return sorted(glob.glob(os.path.join(output, "*")))


def _analyse_cpu(folder, output):
    """Analyse CPU data with MindSpore's own analysis, which it offers only for the running process."""
    from mindspore.profiler.analysis.time_converter import TimeConverter
    from mindspore.profiler.common.log import ProfilerLogger
    from mindspore.profiler.platform.cpu_profiler import CPUProfilerAnalysis

    os.makedirs(output, exist_ok=True)
    ProfilerLogger.init(folder)
    TimeConverter.init_parameters(freq=100.0, cntvct=0, localtime_diff=0)
    CPUProfilerAnalysis._run_tasks(
        rank_id="0",
        device_target="CPU",
        activities=["CPU"],
        ascend_ms_dir=folder,
        step_list=None,
        pretty=False,
        framework_path=os.path.join(folder, "FRAMEWORK"),
        ascend_profiler_output_path=output,
    )


def main(arguments=None):
    """Command line of the analysis; returns its exit status."""
    parser = SuggestingParser(
        prog="python -m mindspeed_ms.core.profiler",
        description="Analyse profiles that were recorded with profile_offline_analyse.",
    )
    parser.add_argument("folder", help="the profile's folder (output_dir/profile), or a part of it")
    folder = parser.parse_args(arguments).folder
    profiles = find_profiles(folder)
    if not profiles:
        print(
            f"{folder}: no profile below it; expected folders named {FOLDERS}, as a training with profile writes "
            "them into output_dir/profile/rank_N",
            file=sys.stderr,
        )
        return 2
    failed = False
    for profile in profiles:
        files = analyse(profile)
        failed |= not files
        print("\n".join(files) if files else f"{profile}: the data could not be analysed; see its logs folder")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
