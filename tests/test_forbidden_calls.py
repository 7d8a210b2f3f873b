"""Forbidden calls by package: in-place operators, private MindSpore names, device branches, loggers by name.

In-place operators on views are silently wrong on CPU, so nothing reports a breach of the first rule.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mindspeed_ms"
FLOOR = ("core/autograd.py", "core/device.py", "core/storage.py", "core/rng.py", "core/comm/")
IN_PLACE = {"add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "masked_fill_", "index_add_", "scatter_", "clamp_"}


def sources(*without):
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(without):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def in_place_calls(tree):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE
    ]


def private_mindspore_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspore":
            words = node.module.split(".") + [alias.name for alias in node.names]
            if any(word.startswith("_") for word in words) or "graph" in words:
                yield node


def device_questions(tree):
    for node in ast.walk(tree):
        if (isinstance(node, ast.Name) and node.id == "device_target") or (
            isinstance(node, ast.Attribute)
            and node.attr == "device_target"
            and isinstance(node.value, ast.Name)
            and node.value.id in ("device", "ms")
        ):
            yield node


def fills(tree):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fill"
    ]


def test_checks_change_no_configuration():
    """What follows from settings is filled by `config.resolve`, before any rule looks."""
    found = [f"{name}:{node.lineno}" for name, tree in sources() if name.startswith("config/checks/") for node in fills(tree)]
    assert not found, found


def own_loggers(tree):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "getLogger"
        and any(isinstance(argument, ast.Constant) and argument.value == "mindspeed_ms" for argument in node.args)
    ]


RULES = {
    "loggers by name (use core.logging.logger)": (own_loggers, ()),
    "in-place operators (use core.storage)": (in_place_calls, ()),
    "private MindSpore names": (private_mindspore_imports, FLOOR),
    "device branches": (device_questions, (*FLOOR, "ops/", "config/")),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    find, allowed = RULES[rule]
    found = [f"{name}:{node.lineno}" for name, tree in sources(*allowed) for node in find(tree)]
    assert not found, f"{rule}: {found}"


@pytest.mark.parametrize(
    "source, find",
    [
        ('logging.getLogger("mindspeed_ms")', own_loggers),
        ("x.add_(y)", in_place_calls),
        ("from mindspore.common._grad_function import f", private_mindspore_imports),
        ("from mindspore._c_expression import f", private_mindspore_imports),
        ("training.fill(wrap_with_ddp=True)", fills),
        ("if device_target() == 'CPU': pass", device_questions),
        ("if device.device_target() == 'CPU': pass", device_questions),
    ],
)
def test_a_breach_is_found(source, find):
    assert list(find(ast.parse(source)))
