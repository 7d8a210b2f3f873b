"""Every row of the table: set through nested yaml, through arguments, and seen to change something."""

import argparse
from functools import lru_cache

import pytest

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, init_configs_from_dict, require_available
from mindspeed_ms.config.argument_table import IGNORED, REFUSED, TABLE, all_paths, row_at, row_of_flag, row_of_name
from mindspeed_ms.config.availability import NOT_YET
from mindspeed_ms.config.printing import dump_yaml
from mindspeed_ms.config.rows.row import LIST, OFF, ON, SWITCH
from mindspeed_ms.config.yaml_loader import parse_yaml
from tests.config.samples import BASE, ROWS, sample, value_at, with_settings

EFFECTS = {"parameters", "layout", "output", "operators", "optimizer", "lr", "log", "file", "data", "memory", "error"}
IDS = [row.path for row in ROWS]


def test_every_field_has_a_row_and_every_row_an_observable():
    assert not [path for path in all_paths() if row_at(path) is None]
    assert not [row.name for row in TABLE if row.seen not in EFFECTS]
    assert not [row.path for row in ROWS if not row.help_en or not row.help_zh]
    assert not [row.name for row in TABLE if row.status in (IGNORED, REFUSED) and not (row.reason and row.reason_zh)]


def test_names_and_flags_are_unambiguous():
    flags = [flag for row in TABLE for flag in (*row.flags, *row.off_flags)]
    names = [name for row in TABLE for name in row.all_names]
    assert len(flags) == len(set(flags))
    assert len(names) == len(set(names))
    assert all(row_of_flag(flag) is not None for flag in flags)
    assert all(row_of_name(name) is not None for name in names)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_row_is_set_through_nested_yaml(row):
    value, beside = sample(row)
    text = dump_yaml(with_settings(beside, {row.path: value}))
    if row.status == REFUSED:
        with pytest.raises(ConfigError, match=row.path.rpartition(".")[2]):
            init_configs_from_dict(parse_yaml(text).data)
        return
    assert value_at(init_configs_from_dict(parse_yaml(text).data), row.path) == value


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_row_changes_something(row):
    """A changed value is seen: in the configuration, and as an error, a notice or a refusal where the row says so."""
    value, beside = sample(row)
    try:
        plain = init_configs_from_dict(with_settings(beside))
    except ConfigError:
        plain = None  # the settings beside it are an error without it
    try:
        changed = init_configs_from_dict(with_settings(beside, {row.path: value}))
    except ConfigError as error:
        assert row.status == REFUSED
        assert row.reason in str(error)
        return
    if plain is None:
        return
    if row.guide_default == value:  # only one value exists: another one is an error
        with pytest.raises(ConfigError):
            init_configs_from_dict(with_settings(beside, {row.path: "another"}))
        return
    same = value_at(plain, row.path) == value  # the settings beside it imply it already
    assert same or plain != changed
    if row.status == IGNORED:
        assert any(row.reason in notice for notice in changed.notices)
    if any(entry.path == row.path for entry in NOT_YET):
        with pytest.raises(ConfigError, match=row.path):
            require_available(changed)


@lru_cache(maxsize=1)
def _parser():
    return argument_parser()


def _words(row, value):
    flag = row.flags[0] if row.flags else row.off_flags[0]
    if row.form in (ON, OFF):
        return [row.flags[0] if value else row.off_flags[0]]
    if row.form == SWITCH:
        return [flag, str(value)]
    if row.form == LIST:
        return [flag, *(str(item) for item in value)]
    return [flag, str(value).replace(" ", "")]


def _command_line(settings, skip=()):
    words = []
    for path, value in settings.items():
        row = row_at(path)
        if path not in skip and row is not None and row.flags:
            words += _words(row, value)
    return words


ROWS_WITH_FLAG = [row for row in ROWS if (row.flags or row.off_flags) and row.convert is None and row.status != REFUSED]


@pytest.mark.parametrize("row", ROWS_WITH_FLAG, ids=[row.path for row in ROWS_WITH_FLAG])
def test_row_is_set_through_arguments(row):
    value, beside = sample(row)
    base = {f"{section}.{field}": item for section, fields in BASE.items() for field, item in fields.items()}
    beside = {path: item for path, item in beside.items() if path != row.path and path != "dataset_config.train_samples"}
    if row.path.endswith("samples"):
        beside["dataset_config.train_samples"], base["training_config.training_iters"] = 1000, 0
    base.update(beside)
    if row.path == "training_config.grad_reduce_in_bf16":
        base["training_config.accumulate_allreduce_grads_in_fp32"] = False
    words = _command_line(base, skip=(row.path,)) + _words(row, value)
    args = _parser().parse_args(words)
    before = dict(vars(args))
    all_config = init_configs_from_args(args)
    assert value_at(all_config, row.path) == value
    assert vars(args) == before
    assert all_config.provenance[row.path].startswith("command line")


def test_arguments_without_place_are_ignored_or_refused_with_their_reason():
    base = [
        word
        for path, value in (("model_config", BASE["model_config"]),)
        for field, item in value.items()
        for word in _words(row_at(f"{path}.{field}"), item)
    ]
    parser = _parser()
    for row in (row for row in TABLE if not row.path):
        if row.form == ON:
            words = [row.flags[0]]
        elif row.form == OFF:
            words = [row.off_flags[0]]
        else:
            words = [row.flags[0], "31"]
        args = parser.parse_args(base + words)
        if row.status == IGNORED:
            assert any(row.reason in notice for notice in init_configs_from_args(args).notices), row.name
        else:
            with pytest.raises(ConfigError) as caught:
                init_configs_from_args(args)
            assert row.reason in str(caught.value), row.name


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
