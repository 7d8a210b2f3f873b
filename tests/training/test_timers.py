"""Timers: levels, sums, errors, and the lines of a training that runs with them."""

import json
import time

import pytest

from mindspeed_ms.core import comm
from mindspeed_ms.training.timers import DummyTimer, Timer, TimerError, Timers, get_timers


def _measure():
    """All that needs ranks: one log of each option, and a writer."""
    lines, written = {}, {}

    class Writer:
        @staticmethod
        def add_scalar(name, value, iteration):
            written[name] = (value, iteration)

    for option in ("max", "minmax", "all"):
        timers = Timers(1, option)
        timer = timers("step", log_level=1)
        for _ in range(2):
            timer.start(barrier=True)
            time.sleep(0.02 * (1 + comm.get_rank()))
            timer.stop()
        if comm.get_rank() == 1:
            timers("here-only", log_level=0).start()
            time.sleep(0.01)  # it runs still
        timers("off", log_level=2).start()
        timers.write(["step"], Writer, 7, normalizer=2, reset=False)
        lines[option] = timers.get_all_timers_string(normalizer=2)
        assert timers.get_all_timers_string(["step"]) is None, "it was reset"
        assert timer.active_time() >= 0.04
    return lines, written


def test_times_of_all_ranks(world):
    (lines, written), other = world(2)(_measure)
    assert other[0].keys() == lines.keys()
    assert lines["max"].startswith("max time across ranks (ms):\n    step ....")
    longest = float(lines["max"].splitlines()[1].rpartition(": ")[2])
    assert 40 <= longest < 400
    low, high = eval(lines["minmax"].splitlines()[1].rpartition(": ")[2])
    assert 20 <= low < high and high >= 40
    assert lines["minmax"].splitlines()[0] == "(min, max) time across ranks (ms):"
    assert "    here-only" in lines["minmax"] and "off" not in lines["minmax"]
    shown = [line.strip().split(":")[0] for line in lines["all"].splitlines()]
    assert shown == ["times across ranks (ms)", "step", "rank  0", "rank  1", "here-only", "rank  1"]
    value, iteration = written["step-time"]
    assert iteration == 7 and 0.04 <= value < 0.4


def test_levels():
    timers = Timers(1)
    assert isinstance(timers("a", log_level=1), Timer) and timers("a") is timers("a", log_level=1)
    assert isinstance(timers("b", log_level=2), DummyTimer) and isinstance(timers("c"), DummyTimer)
    with pytest.raises(ValueError, match="log_level of timer 'd' is 3: expected 0, 1 or 2"):
        timers("d", log_level=3)
    with pytest.raises(ValueError, match="log_level of timer 'a' is 2, but it was made with 1"):
        timers("a", log_level=2)
    with pytest.raises(ValueError, match="timing_log_level is -1"):
        Timers(-1)
    with pytest.raises(ValueError, match="timing_log_option is 'some': expected one of max, minmax, all"):
        Timers(0, "some")
    with pytest.raises(TimerError, match="is above the timing_log_level"):
        timers("b").elapsed()
    with pytest.raises(TimerError, match="no timer is called e; there are a, b, c"):
        timers.log(["e"])
    with pytest.raises(ValueError, match="normalizer is 0"):
        timers.log(normalizer=0)


def _misuse():
    timer = Timer("mine")
    texts = []
    for call in (timer.stop, timer.start, timer.start):
        try:
            call()
        except TimerError as error:
            texts.append(str(error))
    time.sleep(0.001)
    first = timer.elapsed()
    return texts, 0 < first < 1, timer.elapsed() < first + 1, timer.active_time() > 0


def test_misuse(world):
    texts, *rest = world(1)(_misuse)[0]
    assert texts == [
        "timer 'mine' is stopped, but it is not running: start it first.",
        "timer 'mine' is started, but it is running already: stop it first.",
    ]
    assert all(rest)


def test_the_object_is_one():
    kept = get_timers()
    kept.configure(2, "max")
    assert isinstance(kept("x"), Timer)
    kept.configure(0, "minmax")
    assert get_timers() is kept and isinstance(kept("x"), DummyTimer)


def _train(folder, level):
    import logging

    from mindspeed_ms.training import pretrain
    from mindspeed_ms.training.tensorboard import set_tensorboard_writer
    from tests.training.tiny import Samples, make_config, model_provider

    set_tensorboard_writer(None)  # that of an earlier training in this process
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_ms").addHandler(handler)
    settings = {
        "training_iters": 4,
        "log_interval": 2,
        "timing_log_level": level,
        "save_enabled": True,
        "tensorboard_dir": f"{folder}/board",
        "log_timers_to_tensorboard": True,
    }
    try:
        pretrain(None, model_provider, None, all_config=make_config(folder, settings), train_data_loader=Samples(32))
    finally:
        logging.getLogger("mindspeed_ms").removeHandler(handler)
        set_tensorboard_writer(None)
    return [line for line in lines if "across ranks" in line]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_loop_uses_them(world, tmp_path, level):
    lines = world(1)(_train, str(tmp_path), level)[0]
    names = [[row.split()[0] for row in line.splitlines()[1:]] for line in lines]
    step = ["forward-backward", "all-grads-sync", "optimizer"]
    if level == 2:
        step.insert(1, "batch-generator")
    assert [sorted(shown) for shown in names] == ([] if level == 0 else [sorted(step), sorted(step), ["save-checkpoint"]])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4
    board = b"".join(path.read_bytes() for path in (tmp_path / "board").iterdir())
    assert (b"forward-backward-time" in board) == (level > 0)
