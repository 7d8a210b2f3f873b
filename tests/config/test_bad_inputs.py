"""Bad input per row and per rule: the message names the key or flag, the value, and what is expected."""

import pytest

from mindspeed_ms.config import ConfigError, argument_parser, fit_to_world, init_configs_from_args, init_configs_from_dict
from mindspeed_ms.config.schema import SECTIONS
from tests.config.rule_cases import RULES
from tests.config.samples import BASE, ROWS, offenders, sample, with_settings

CHECKED = [row for row in ROWS if "anything" not in row.expects]
BOUNDED = [row for row in CHECKED if any(sign in row.expects for sign in (">", "<", "one of")) and "float32" not in row.expects]


def problems_of(raw):
    """The texts of all problems of a nested dict."""
    with pytest.raises(ConfigError) as caught:
        init_configs_from_dict(raw)
    return [str(problem) for problem in caught.value.problems]


def _wrong_type(row):
    wrong = {"deep": {"er": 1}} if "a mapping" not in row.expects else 7
    mine = "\n".join(text for text in problems_of(with_settings({row.path: wrong})) if row.path in text)
    return None if "expects" in mine and ("deep" in mine or "7" in mine) else mine or "no problem"


def _outside(expects):
    if "one of" in expects:
        return "no_such_word"
    if "<" in expects:
        return 12345678 if "integer" in expects else 12345.0
    return -5


def _out_of_range(row):
    wrong = _outside(row.expects)
    mine = [text for text in problems_of(with_settings({row.path: wrong})) if row.path in text]
    known = mine and repr(wrong) in mine[0] and row.expects.split(" or ")[0] in mine[0]
    return None if known else f"{wrong!r}: {mine}"


def _typo(row):
    section, *names = row.path.split(".")
    typed = names[-1] + "x"
    value, _ = sample(row)
    text = "\n".join(problems_of(with_settings({".".join((section, *names[:-1], typed)): value})))
    return None if typed in text and f"Did you mean {names[-1]!r}?" in text else text


@pytest.mark.parametrize(("check", "rows"), [(_wrong_type, CHECKED), (_out_of_range, BOUNDED), (_typo, ROWS)])
def test_bad_values_of_every_option_are_named(check, rows):
    assert len(rows) > 100
    assert not offenders(check, rows)


def test_the_issue_s_typo():
    (text,) = problems_of(with_settings({"parallel_config.tensor_model_paralel_size": 8}))
    assert "parallel_config.tensor_model_paralel_size = 8" in text
    assert "tensor_model_parallel_size" in text.split("Did you mean")[1]


def test_a_key_in_the_wrong_section_is_sent_home():
    (text,) = problems_of(with_settings({"model_config.micro_batch_num": 3}))
    assert "dataset_config.micro_batch_num" in text


def test_all_problems_come_together():
    texts = problems_of(
        with_settings(
            {"model_config.hidden_size": "big", "optimizer_config.lr": -1, "dataset_config.split": 3, "modle_config.x": 1}
        )
    )
    assert len(texts) == 4


def test_every_rule_names_its_setting_and_what_it_expects():
    from mindspeed_ms.config.checks import RULES as FUNCTIONS

    seen = set()

    def watch(function):
        def watched(context):
            found = list(function(context))
            if found:
                seen.add(function.__name__)
            return found

        return watched

    originals, wrong = list(FUNCTIONS), {}
    FUNCTIONS[:] = [watch(function) for function in originals]
    try:
        for number, (settings, key, words) in enumerate(RULES):
            texts = problems_of(with_settings(settings))
            if not any(text.startswith(key) and words in text for text in texts):
                wrong[f"{number} {key}"] = texts
    finally:
        FUNCTIONS[:] = originals
    assert not wrong
    # all but the last only tell (see test_trio, test_profiler, test_arguments); it is for sections made by constructors
    assert {function.__name__ for function in originals} - seen == {
        "layer_list_reading_is_clear",
        "profile_rows_have_effect",
        "group_size_has_an_effect",
        "settings_have_an_effect",
        "padding_is_used",
        "expert_numbers_agree",
    }


def test_sections_made_by_constructors_are_checked_at_the_start():
    from mindspeed_ms.config import AllConfig, MoEConfig, TransformerConfig

    model = TransformerConfig(128, 4, 4, 64, 128, seq_length=32, num_experts=8)
    with pytest.raises(ConfigError, match=r"model_config\.num_experts = 8: contradicts"):
        fit_to_world(AllConfig(model_config=model, moe_config=MoEConfig(num_experts=4)), 1)


def test_flags_are_named_for_command_lines():
    words = "--num-layers 4 --hidden-size 66 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128"
    words += " --min-lr 2 --lr 1"
    with pytest.raises(ConfigError) as caught:
        init_configs_from_args(argument_parser().parse_args(words.split()))
    text = str(caught.value)
    assert "command line: --hidden-size = 66" in text and "--min-lr = 2" in text


def test_problems_name_what_was_typed():
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128"
    words += " --adam-beta1 1.0 --ddp-bucket-size 0 --optimizer-type lamb --decoder-first-pipeline-num-layers=-1"
    with pytest.raises(ConfigError) as caught:
        init_configs_from_args(argument_parser().parse_args(words.split()))
    text = str(caught.value)
    for found in (
        "--adam-beta1 = 1.0:",
        "--ddp-bucket-size = 0:",
        "--optimizer-type = 'lamb':",
        "--decoder-first-pipeline-num-layers = -1:",
    ):
        assert f"command line: {found}" in text, text


def test_one_rank_of_a_machine_speaks_of_flags(capsys, monkeypatch):
    for rank, texts in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            argument_parser().parse_args(["--no-such-flag", "3"])
        assert capsys.readouterr().err.count("error: ") == texts


def test_unknown_flags_end_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as caught:
        argument_parser().parse_args(["--tensor-model-paralel-size", "8"])
    assert caught.value.code == 2
    assert "--tensor-model-parallel-size" in capsys.readouterr().err


def test_foreign_namespaces_get_suggestions_too():
    import argparse

    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        init_configs_from_args(argparse.Namespace(tensor_model_paralel_size=8))


def test_the_world_is_checked_when_it_is_known():
    all_config = init_configs_from_dict(with_settings({"parallel_config.tensor_model_parallel_size": 2}))
    with pytest.raises(ConfigError, match="multiple of 2"):
        fit_to_world(all_config, 3)
    fit_to_world(all_config, 4)
    assert (all_config.parallel_config.data_parallel_size, all_config.dataset_config.global_batch_size) == (2, 2)
    with pytest.raises(ConfigError, match="start 4"):
        fit_to_world(all_config, 8)


def test_constructors_and_assignments_are_checked():
    parallel = SECTIONS["parallel_config"](tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"parallel_config\.sequence_parallel"):
        parallel.sequence_parallel = "maybe"
    with pytest.raises(ConfigError, match="Did you mean 'sequence_parallel'"):
        SECTIONS["parallel_config"](sequence_paralel=True)
    with pytest.raises(AttributeError, match="Did you mean 'hidden_size'"):
        init_configs_from_dict(BASE).model_config.hiden_size  # noqa: B018
