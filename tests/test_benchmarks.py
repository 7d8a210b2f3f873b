"""Benchmarks start as `python benchmarks/NAME.py` from any folder; all that they import exists, and nothing is of the tests."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "shapes.py",
    "lora_answers.py",
    "peer.py",
    "peer_megatron.py",
    "peer_lora.py",
    "peer_lora_answers.py",
    "peer_moe.py",
    "peer_transformers.py",
    "posttrain_crashes.py",
)  # no command line of their own: others start them
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
NAMES = [path.name for path in FILES if path.name not in MODULES]


def imports_of(path):
    """(module, name or None) of every import in a file, also of those inside functions, which `--help` does not reach."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_of_a_benchmark_exist(path):
    if path.name.startswith("peer_"):
        pytest.importorskip("torch", reason="needs the [peer] extra")
    found = list(imports_of(path))
    assert [module for module, _ in found if module.partition(".")[0] == "tests"] == []
    for module, name in found:
        if module.partition(".")[0] == "mindspeed_ms" and name and not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_starts_without_the_tests(name, tmp_path):
    script = ROOT / "benchmarks" / name
    command = [sys.executable, str(script), "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "usage: " + name in ended.stdout, ended.stderr


def load(name):
    """Module of a benchmark."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_of_smollm2_are_the_largest_over_ranks():
    clear = {"mean_nll": 2.0, "last_top5_logits": [5.0, 4.0], "greedy_ids": [1], "smallest_greedy_margin": 0.1}
    prompts = [clear, clear | {"smallest_greedy_margin": 0.001}]
    right = {"mean_nll": 2.0, "last_top5_logits": [5.0, 4.0], "greedy": [[1], [1]]}
    worse = {"mean_nll": 2.25, "last_top5_logits": [5.0, 4.5], "greedy": [[2], [1]]}
    differences = load("smollm2").largest_differences
    assert differences(prompts, [[right, right]]) == {"mean_nll": 0, "last_top5_logits": 0, "other_texts": 0}
    assert differences(prompts, [[right, right], [worse, worse]]) == {
        "mean_nll": 0.25,
        "last_top5_logits": 0.5,
        "other_texts": 1,  # of the second prompt the margin is too small
    }


def test_prompts_of_smollm2_are_looked_at(tmp_path, capsys):
    for name in ("hf", "native"):
        (tmp_path / name).mkdir()
    smollm2, file = load("smollm2"), tmp_path / "prompts.json"
    figures = {"ids": [1, 2], "mean_nll": 1.0, "last_top5_ids": [3], "last_top5_logits": [4.0]}
    for content, said in (
        ("[]", "not empty"),
        ("{", "JSON"),
        ([{**figures}], "prompt 0 lacks text or chat"),
        ([{"text": "a"}], "ids"),
    ):
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(SystemExit):
            smollm2.main([str(tmp_path), "--prompts", str(file)])
        error = capsys.readouterr().err.splitlines()[-1]
        assert str(file) in error and (said in error or "Expecting" in error)
    file.write_text(json.dumps([{**figures, "chat": [{"role": "user", "content": "a"}]}]))
    assert smollm2.prompts_of(file)[0]["text"] is None


def test_limits_of_conversion():
    convert = load("convert")
    assert abs(convert.size_of(convert.config_of(2)) / 2e9 - 1) < 0.05
    rows = {"plain copy": (9.0, 900), "a -> b": (1.0, 24), "torch.load + torch.save": (2.0, 900)}
    assert convert.missed(rows, 100) == []
    assert len(convert.missed(rows | {"a -> b": (1.1, 25)}, 100)) == 2
