"""Profiling of steps: the files of a real run, and which argument of mindspore.profiler each row reaches."""

import enum
import glob
import logging
import os
import pstats
import types

import pytest

from tests.training import tiny
from tests.training.test_pretrain import BATCHES

ROWS = {"profile": True, "profile_step_start": 2, "profile_step_end": 3}


def train_profiled(folder, rows, device=None):
    from mindspeed_ms.training.training import pretrain

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_ms").addHandler(handler)
    try:
        pretrain(
            None, tiny.model_provider, None, all_config=tiny.make_config(folder, {**ROWS, **rows}), train_data_loader=BATCHES
        )
    finally:
        logging.getLogger("mindspeed_ms").removeHandler(handler)
    return lines


def names_below(folder):
    return {os.path.basename(path) for path in glob.glob(os.path.join(folder, "**", "*"), recursive=True)}


def test_files_of_profiled_steps(world, tmp_path):
    (lines,) = world(1)(train_profiled, tmp_path, {"profile_memory": True, "profile_with_stack": True, "profile_pcie": True})
    names = names_below(tmp_path / "profile" / "rank_0")
    assert {"trace_view.json", "cpu_op_detail_info_0.csv", "cpu_ms_memory_record_0.txt"} <= names
    stacks = pstats.Stats(str(tmp_path / "profile" / "rank_0" / "python_calls_2_3.prof"))
    steps = [
        calls[0] for (path, _, name), calls in stacks.stats.items() if name == "__call__" and path.endswith("train_step.py")
    ]
    assert steps == [2]
    assert any("profile_pcie: recorded on Ascend only" in line for line in lines)


def test_offline_analysis_is_one_command(world, tmp_path):
    world(1)(train_profiled, tmp_path, {"profile_offline_analyse": True, "profile_save_path": str(tmp_path / "here")})
    assert "trace_view.json" not in names_below(tmp_path / "here")
    assert world(1)(run_command, tmp_path / "here") == [0]
    assert "trace_view.json" in names_below(tmp_path / "here" / "rank_0")
    assert world(1)(run_command, tmp_path / "nowhere") == [2]


def run_command(folder):
    from mindspeed_ms.core.profiler import main

    return main([str(folder)])


class Recorder:
    """Stands for mindspore.profiler: constructors keep their arguments."""

    ProfilerLevel = enum.Enum("ProfilerLevel", {f"Level{number}": f"Level{number}" for number in range(3)})
    ProfilerActivity = enum.Enum("ProfilerActivity", {"CPU": "CPU", "NPU": "NPU"})
    ExportType = enum.Enum("ExportType", {"Text": "text", "Db": "db"})

    def __init__(self):
        from mindspore.profiler import AicoreMetrics

        self.AicoreMetrics = AicoreMetrics
        self.seen = {}

    def _ExperimentalConfig(self, **arguments):
        self.seen.update(arguments)

    def profile(self, **arguments):
        self.seen.update(arguments)
        calls = self.seen.setdefault("calls", [])
        return types.SimpleNamespace(**{name: lambda name=name: calls.append(name) for name in ("start", "step", "stop")})

    def schedule(self, **arguments):
        return arguments

    def tensorboard_trace_handler(self, folder, analyse_flag):
        self.seen.update(folder=folder, analyse=analyse_flag)

    def DynamicProfilerMonitor(self, cfg_path, output_path):
        self.seen.update(cfg_path=cfg_path, folder=output_path)
        return types.SimpleNamespace(step=lambda: self.seen.setdefault("calls", []).append("step"))


def recorded(folder, rows, rank=0, steps=5):
    """What mindspore.profiler gets on Ascend."""
    import mindspore as ms

    from mindspeed_ms.core import profiler

    recorder, real, target = Recorder(), ms.profiler, profiler.has_own_kernels
    ms.profiler, profiler.has_own_kernels = recorder, lambda: True
    try:
        settings = tiny.make_config(folder, {**ROWS, **rows}).training_config
        with profiler.make_profiler(settings, rank) as made:
            for iteration in range(1, steps + 1):
                made.before_step(iteration)
                made.after_step(iteration)
    finally:
        ms.profiler, profiler.has_own_kernels = real, target
    return {name: _plain(value) for name, value in recorder.seen.items()}


def _plain(value):
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def record_all(folder, cases):
    return [recorded(folder, rows, rank) for rows, rank in cases]


CASES = [
    (
        {},
        {
            "profiler_level": "Level0",
            "aic_metrics": "AiCoreNone",
            "activities": ["NPU"],
            "analyse": True,
            "schedule": {"wait": 0, "warmup": 0, "active": 2, "repeat": 1},
            "calls": ["start", "step", "stop"],
        },
    ),
    ({"profile_step_start": 3, "profile_step_end": 5}, {"calls": ["start", "step", "step", "stop"]}),
    ({"profile_step_end": 9}, {"calls": ["start", "step", "step", "step", "step", "stop"]}),
    ({"profile_level": "level2"}, {"profiler_level": "Level2", "aic_metrics": "ArithmeticUtilization"}),
    ({"profile_communication": True}, {"profiler_level": "Level1"}),
    ({"profile_level": "level1", "profile_aicore_metrics": 5}, {"aic_metrics": "MemoryUB"}),
    ({"profile_level": "level1", "profile_aicore_metrics": -1}, {"aic_metrics": "AiCoreNone"}),
    ({"profile_with_stack": True}, {"with_stack": True, "activities": ["CPU", "NPU"]}),
    ({"profile_memory": True}, {"profile_memory": True, "activities": ["CPU", "NPU"]}),
    ({"profile_framework": "time"}, {"activities": ["CPU", "NPU"]}),
    ({"profile_framework": "all", "profile_op_time": False}, {"activities": ["CPU"]}),
    ({"profile_framework": "None"}, {"activities": ["NPU"]}),
    ({"profile_parallel_strategy": True}, {"parallel_strategy": True}),
    ({"profile_l2_cache": True}, {"l2_cache": True}),
    ({"profile_hbm_ddr": True}, {"hbm_ddr": True}),
    ({"profile_pcie": True}, {"pcie": True}),
    ({"profile_data_process": True}, {"data_process": True, "schedule": None}),
    ({"profile_data_simplification": True}, {"data_simplification": True}),
    ({"profile_record_shapes": True}, {"record_shapes": True, "activities": ["CPU", "NPU"]}),
    ({"profile_export_type": "db"}, {"export_type": ["Db"]}),
    ({"profile_offline_analyse": True}, {"analyse": False}),
    ({"profile_ranks": [0, 3]}, {"calls": ["start", "step", "stop"]}),
    ({"profile_ranks": [-1]}, {"calls": ["start", "step", "stop"]}),
]


def test_each_row_reaches_its_argument(world, tmp_path):
    (seen,) = world(1)(record_all, tmp_path, [(rows, 3 if "profile_ranks" in rows else 0) for rows, _ in CASES])
    for (rows, expected), found in zip(CASES, seen):
        assert {name: found[name] for name in expected} == expected, rows
        plain = seen[0]
        changed = {name for name in plain if found[name] != plain[name]} - {"folder"}
        assert changed <= {*expected, "calls", "schedule", "aic_metrics", "profiler_level"}, rows
    assert seen[0]["folder"].endswith(os.path.join("profile", "rank_0"))


def test_other_ranks_and_a_changing_configuration(world, tmp_path):
    (tmp_path / "profiler_config.json").write_text("{}")
    rows = {"profile_dynamic_profiler_config_path": str(tmp_path / "profiler_config.json")}
    other, dynamic = world(1)(record_all, tmp_path, [({"profile_ranks": [1]}, 0), (rows, 0)])[0]
    assert other == {}
    assert dynamic["cfg_path"] == str(tmp_path)
    assert dynamic["calls"] == ["step"] * 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"profile": True, "profile_aicore_metrics": 3}, "no effect at profile_level level0"),
        ({"profile": True, "profile_level": "level1", "profile_aicore_metrics": -1}, "PipeUtilization at level1 anyway"),
        ({"profile": True, "profile_step_start": 8, "profile_step_end": 9}, "nothing is profiled"),
        ({"profile_memory": True}, "profile_memory: no effect, since profile is False"),
    ],
)
def test_rows_without_effect_are_named(tmp_path, rows, words):
    assert any(words in notice for notice in tiny.make_config(tmp_path, rows).notices)
