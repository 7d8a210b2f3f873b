"""The viewer of a growing log."""

import subprocess
import sys
import threading
import time

from mindspeed_ms.tools import follow_log


def test_shows_everything_until_the_process_has_ended(tmp_path):
    """A file that appears late, lines written in parts, and the last words of the process."""
    path = tmp_path / "worker_0.log"
    code = (
        "import sys, time; time.sleep(0.3); f = open(sys.argv[1], 'w'); "
        "[(f.write(part), f.flush(), time.sleep(0.1)) for part in ('one\\ntw', 'o\\nthree', '\\nlast')]"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    assert list(follow_log.lines_of(str(path), process.pid)) == ["one", "two", "three", "last"]
    reaper.join(10)


def test_a_zombie_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    end = time.monotonic() + 20
    while follow_log.is_running(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not follow_log.is_running(process.pid)
    process.wait()
    assert not follow_log.is_running(process.pid)


def test_lines_of_steps_are_thinned(capsys):
    """The first and the last step and everything else are shown."""
    screen = follow_log.Screen(is_terminal=False, interval=1000.0)
    for step in range(1, 6):
        screen.show(f"INFO - Epoch: 0, Step: {step}, Loss: 2.5, Time: 3.0 ms, Iteration: {step}/5, Consumed_samples: 8")
        screen.show(f"note {step}")
    shown = capsys.readouterr().out
    assert [word for word in ("1/5", "2/5", "3/5", "4/5", "5/5") if word in shown] == ["1/5", "5/5"]
    assert shown.count("note") == 5


def test_progress_bar(capsys):
    """On a terminal a bar stands below the lines and closes with the last step."""
    screen = follow_log.Screen(is_terminal=True, interval=0.0)
    for step in (1, 2):
        screen.show(f"INFO - Epoch: 0, Step: {step}, Loss: 2.5, Iteration: {step}/2")
    assert screen.bar is None
    captured = capsys.readouterr()
    assert "2/2" in captured.err and "loss 2.500" in captured.err
