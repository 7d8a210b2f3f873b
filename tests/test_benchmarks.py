"""Benchmarks start as `python benchmarks/NAME.py` from any folder, without the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("shapes.py", "peer_megatron.py")  # no command line of their own: read by `step.py`
NAMES = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name not in MODULES)


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_starts_without_the_tests(name, tmp_path):
    script = ROOT / "benchmarks" / name
    assert "tests." not in script.read_text(encoding="utf-8") and "import tests" not in script.read_text(encoding="utf-8")
    command = [sys.executable, str(script), "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "usage: " + name in ended.stdout, ended.stderr
