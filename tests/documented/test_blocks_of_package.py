"""Pages whose Python blocks are written into the package: docs/new-optimizer.md."""

import json
import shutil
import sys

import pytest

from tests.documented.pages import ROOT, blocks
from tests.documented.sandbox import Sandbox
from tests.documented.test_blocks import TINY

pytestmark = [pytest.mark.documented, pytest.mark.slow]


def test_a_new_optimizer_trains(tmp_path):
    """Its module and its names, put into a copy of the package, are enough for a training."""
    sandbox = Sandbox(tmp_path)
    package = tmp_path / "mindspeed_ms"
    shutil.copytree(ROOT / "mindspeed_ms", package)
    rule, names = blocks("docs/new-optimizer.md", "python")
    (package / "core" / "optimizer" / "lion.py").write_text(rule.text, encoding="utf-8")
    section = package / "config" / "sections" / "optimizer.py"
    before, table, after = section.read_text(encoding="utf-8").partition("OPTIMIZERS = {")
    section.write_text(before + table + "\n" + names.text + after.partition("\n")[2], encoding="utf-8")
    losses = {}
    for name in ("lion", "adam"):
        done = sandbox.run(
            f"export PYTHONPATH={tmp_path}; {sys.executable} gpt/pretrain_gpt.py {TINY} --mock-data --no-sample "
            f"--train-iters 3 --log-interval 1 --lr 1e-2 --optimizer {name} --save {name}"
        )
        assert done.returncode == 0, done.stdout
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert losses["lion"][0] == losses["adam"][0] and losses["lion"][2] != losses["adam"][2]
