"""Every option: set through yaml and through flags, read back from yaml, told or refused where it has no effect."""

import argparse

import pytest

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, init_configs_from_dict
from mindspeed_ms.config.argument_table import TABLE, row_at, row_of_name
from mindspeed_ms.config.flags_without_setting import read_flags
from mindspeed_ms.config.printing import dump_yaml
from mindspeed_ms.config.row import IGNORED, REFUSED
from mindspeed_ms.config.sections.field import LIST, OFF, ON, SWITCH
from mindspeed_ms.config.yaml_loader import parse_yaml
from tests.config.samples import BASE, ROWS, offenders, sample, value_at, with_settings

EFFECTS = {"parameters", "layout", "output", "operators", "optimizer", "lr", "log", "file", "data", "memory", "error"}
# the only value that other settings leave: another one is an error
SETTLED = {
    "model_config.attention_type": "cross_attn",
    "model_config.transformer_impl": "transformer_engine",
    "model_config.gated_linear_unit": False,
    "training_config.loss_func_kwargs.loss_func_type": "another",
    "parallel_config.data_parallel_size": 3,
    "dataset_config.is_pairwise_dataset": False,
}


def test_every_option_is_described():
    assert not [row.name for row in TABLE if row.seen not in EFFECTS]
    # an alias may change less than its path
    assert (row_of_name("use_fused_rmsnorm").seen, row_at("model_config.normalization").seen) == ("operators", "parameters")
    assert not [row.name for row in TABLE if not row.help_en or not row.help_zh]
    assert not [row.name for row in TABLE if row.status in (IGNORED, REFUSED) and not (row.reason and row.reason_zh)]


def test_names_and_flags_are_unambiguous():
    flags = [flag for row in TABLE for flag in (*row.flags, *row.off_flags)]
    names = [name for row in TABLE for name in row.all_names]
    assert len(flags) == len(set(flags))
    assert not [flag for flag in flags if flag.startswith("--no-no-")]
    assert len(names) == len(set(names))


def _through_yaml(row):
    value, beside = sample(row)
    text = dump_yaml(with_settings(beside, {row.path: value}))
    try:
        changed = init_configs_from_dict(parse_yaml(text).data)
    except ConfigError as error:
        known = row.status == REFUSED and row.path in str(error) and row.reason in str(error)
        return None if known else f"fails: {error}"
    if row.status == REFUSED:
        return "is not refused"
    if value_at(changed, row.path) != value:
        return f"is {value_at(changed, row.path)!r} instead of {value!r}"
    if row.status == IGNORED and not any(row.reason in notice for notice in changed.notices):
        return "is ignored without a notice"
    again = init_configs_from_dict(parse_yaml(changed.to_yaml()).data)
    if again != changed or again.to_yaml() != changed.to_yaml():
        return f"does not read back from {changed.to_yaml()}"
    return _error_of_another_value(row) if row.path in SETTLED else None


def _error_of_another_value(row):
    _, beside = sample(row)
    try:
        init_configs_from_dict(with_settings(beside, {row.path: SETTLED[row.path]}))
    except ConfigError as error:
        return None if row.path in str(error) else f"another value is the wrong error: {error}"
    return "another value is no error"


def test_every_option_is_set_through_yaml_and_reads_back():
    assert not offenders(_through_yaml, ROWS)


def _value_without_it(row):
    value, beside = sample(row)
    return (
        f"is {value!r} without being set"
        if value_at(init_configs_from_dict(with_settings(beside)), row.path) == value
        else None
    )


def test_every_sample_is_another_value_than_without_it():
    assert not offenders(_value_without_it, [row for row in ROWS if row.path not in SETTLED])


def _words(row, value):
    flag = row.flags[0] if row.flags else row.off_flags[0]
    if row.form in (ON, OFF):
        return [row.flags[0] if value else row.off_flags[0]]
    if row.form == SWITCH:
        return [flag, str(value)]
    if row.form == LIST:
        return [flag, *(str(item) for item in value)]
    return [flag, str(value).replace(" ", "")]


def _command_line(settings):
    words = []
    for path, value in settings.items():
        if row_at(path).flags:
            words += _words(row_at(path), value)
    return words


def _through_flags(row, parser):
    value, beside = sample(row)
    base = {f"{section}.{field}": item for section, fields in BASE.items() for field, item in fields.items()}
    base.update((path, item) for path, item in beside.items() if path != "dataset_config.train_samples")
    if row.path.endswith("samples"):
        base |= {"dataset_config.train_samples": 1000, "training_config.training_iters": 0}
    if row.path == "training_config.grad_reduce_in_bf16":
        base["training_config.accumulate_allreduce_grads_in_fp32"] = False
    if "lora_config.target_cells" in base:
        base["lora_config.target_cells"] = ["mapping"]  # the flag takes names
    base.pop(row.path, None)
    args = parser.parse_args(_command_line(base) + _words(row, value))
    before = dict(vars(args))
    try:
        all_config = init_configs_from_args(args)
    except ConfigError as error:
        return f"fails: {error}"
    if vars(args) != before:
        return "changes the Namespace"
    if value_at(all_config, row.path) != value:
        return f"is {value_at(all_config, row.path)!r} instead of {value!r}"
    origin = all_config.provenance[row.path]
    return None if origin.startswith("command line") else f"comes from {origin}"


def test_every_flag_sets_its_option():
    parser = argument_parser()
    rows = [row for row in ROWS if (row.flags or row.off_flags) and row.convert is None and row.status != REFUSED]
    assert len(rows) > 200
    assert not offenders(lambda row: _through_flags(row, parser), rows)


def test_flags_without_setting_are_ignored_or_refused_with_their_reason():
    base = _command_line({f"model_config.{name}": value for name, value in BASE["model_config"].items()})
    parser = argument_parser()
    for status in (IGNORED, REFUSED):
        rows = {(row.flags or row.off_flags)[0]: row for row in TABLE if not row.path and row.status == status}
        words = [word for flag, row in rows.items() for word in ((flag,) if row.form in (ON, OFF) else (flag, "31"))]
        args = parser.parse_args(base + words)
        if status == IGNORED:
            told = init_configs_from_args(args).notices
            expected = {f"{flag}: ignored, {row.reason}" for flag, row in rows.items()}
        else:
            with pytest.raises(ConfigError) as caught:
                init_configs_from_args(args)
            told = [f"{problem.key}: {problem.message}" for problem in caught.value.problems]
            expected = {f"{flag}: is not available: {row.reason}" for flag, row in rows.items()}
        assert expected == set(told)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ignored: []\nrefused: []\n", "the file expects the keys ignored, refused, runtime"),
        ("ignored: [{reason: a, names: {b: 1}}]\nrefused: []\nruntime: []\n", "a group of ignored expects .*reason_zh"),
        (
            "ignored: [{reason: a, reason_zh: a, names: {b: {default: 1, flg: x}}}]\nrefused: []\nruntime: []\n",
            "b expects .*flg",
        ),
    ],
)
def test_a_file_of_flags_in_another_form_is_named(tmp_path, text, words):
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_flags(str(tmp_path / "flags.yaml"))


def test_a_hand_made_namespace_counts_as_given():
    args = argparse.Namespace(
        **{("padded_vocab_size" if name == "vocab_size" else name): value for name, value in BASE["model_config"].items()},
        lr=1e-4,
        clip_grad=1,
    )
    all_config = init_configs_from_args(args)
    assert all_config.optimizer_config.learning_rate == 1e-4
    assert all_config.optimizer_config.clip_grad == 1.0
    assert all_config.model_config.hidden_dropout == 0.1
