"""Misspelt flags of every tool: one line with the nearest known one, exit code 2."""

import pytest

from mindspeed_ms import launch
from mindspeed_ms.layout import pipeline_plan
from mindspeed_ms.tools import follow_log, inspect_data
from mindspeed_ms.tools.checkpoint.__main__ import main as checkpoint
from mindspeed_ms.tools.generate import __main__ as generate


@pytest.mark.parametrize(
    ("main", "words", "meant"),
    [
        (checkpoint, ["inspect", "x", "--jsn"], "--json"),
        (follow_log.main, ["x", "--process", "1", "--intervall", "3"], "--interval"),
        (generate.main, ["x", "--tp", "2"], "--tensor-model-parallel-size"),
        (pipeline_plan.main, ["--pp", "2", "--micro", "4", "--transfer-tmie", "1"], "--transfer-time"),
    ],
)
def test_the_nearest_flag_is_named(capsys, main, words, meant):
    with pytest.raises(SystemExit) as ended:
        main(words)
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and errors.count("\n") == 1 and f"Did you mean '{meant}'?" in errors


@pytest.mark.parametrize("main", [launch._parse, inspect_data.main])
def test_what_is_missing_is_one_line(capsys, main):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--n", "--no", "--master", "--r", "-x"])
def test_flags_of_a_launched_script_are_no_short_forms_of_the_launchers(flag):
    assert launch._parse(["-n", "2", __file__, flag, "3"]).arguments == [flag, "3"]
