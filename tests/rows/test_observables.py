"""Every row of the argument table that works: a run with the row changed shows the change that the row names."""

import os
import types

import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.config.errors import ConfigError
from tests.config.samples import ROWS, later_paths, sample
from tests.posttrain.options import OPTIONS, ROLLOUT_OPTIONS
from tests.rows.cases import ADAPTED, CASES, ON_TWO_RANKS
from tests.rows.files import damage, write_data, write_tokenizers
from tests.rows.job import BASE, record

# facets of a run that tell of a row's effect
AT_RUN_TIME = ("output", "lr", "optimizer", "log", "file", "data", "operators", "memory", "error")

# rows whose effect is an error of the configuration: (what fails with the row, what passes)
REFUSALS = {
    "model_config.attention_type": ({"model_config.attention_type": "cross_attn"}, {}),
    "model_config.add_position_embedding": ({"model_config.add_position_embedding": False}, {}),
    "model_config.gated_linear_unit": (
        {"model_config.gated_linear_unit": False, "model_config.hidden_act": "swiglu"},
        {"model_config.hidden_act": "swiglu"},
    ),
    "model_config.transformer_impl": ({"model_config.transformer_impl": "transformer_engine"}, {}),
    "training_config.loss_func_kwargs.loss_func_type": ({"training_config.loss_func_kwargs.loss_func_type": "another"}, {}),
    "dataset_config.is_pairwise_dataset": (
        {"dataset_config.is_pairwise_dataset": True},
        {"dataset_config.is_pairwise_dataset": True, "training_config.stage": "dpo"},
    ),
    "training_config.finetune": (
        {"training_config.finetune": True, "training_config.resume_training": True},
        {"training_config.finetune": True},
    ),
    "model_config.fa_config.keep_prob": (
        {"model_config.fa_config.keep_prob": 0.5, "model_config.attention_dropout": 0.25},
        {"model_config.attention_dropout": 0.25},
    ),
    "training_config.wrap_with_ddp": (
        {"training_config.wrap_with_ddp": False, "training_config.overlap_grad_reduce": True},
        {"training_config.overlap_grad_reduce": True},
    ),
    "parallel_config.data_parallel_size": (
        {"parallel_config.data_parallel_size": 3, "parallel_config.world_size": 4},
        {"parallel_config.world_size": 4},
    ),
}
# rows that say what the tokenizer is: (what differs, the settings that both have); the vocabulary follows from it
HF = {"dataset_config.tokenizer_type": "PretrainedFromHF", "dataset_config.tokenizer_name_or_path": "{data}/small"}
GPT2 = {
    "dataset_config.tokenizer_type": "GPT2BPETokenizer",
    "dataset_config.vocab_file": "{data}/small/vocab.json",
    "dataset_config.merge_file": "{data}/small/merges.txt",
}
SENTENCES = {
    "dataset_config.tokenizer_type": "GPTSentencePieceTokenizer",
    "dataset_config.tokenizer_model": "{data}/small/tokenizer.model",
}
TOKENIZERS = {
    "dataset_config.tokenizer_type": ("SentencePieceTokenizer", SENTENCES),
    "dataset_config.tokenizer_model": ("{data}/large/tokenizer.model", SENTENCES),
    "dataset_config.tokenizer_name_or_path": ("{data}/large", HF),
    "dataset_config.use_fast_tokenizer": (False, HF),
    "dataset_config.vocab_file": ("{data}/large/vocab.json", GPT2),
    "dataset_config.merge_file": (None, GPT2),
}
# rows that act when communication starts
AT_START = {
    "parallel_config.distributed_timeout_minutes": (11, "timeout", 660.0),
    "parallel_config.communication_backend": ("shm", "backend", "shm"),
}


def comes_later(row):
    """True if a start refuses the row, its feature, or what it needs beside it."""
    beside = case_of(row)[1]
    return any(path.startswith(later_paths()) for path in (row.path, *beside))


def case_of(row):
    """(value, settings beside it, options of the run), with the facet that shows the row."""
    value, beside, *options = CASES.get(row.path) or sample(row)
    return value, beside, {"facet": row.seen, **(options[0] if options else {})}


def is_run(row):
    return (
        row.status == "works"
        and case_of(row)[2]["facet"] in AT_RUN_TIME
        and not comes_later(row)
        and "profile" not in row.path
        and row.path not in {**REFUSALS, **AT_START, **OPTIONS, **ROLLOUT_OPTIONS}
    )


RUN = [row for row in ROWS if is_run(row)]


def settings_with(folder, *groups):
    """BASE with settings {path: value} laid over it; None takes a key out."""
    result = {name: dict(section) for name, section in BASE.items()}
    for path, value in (item for group in groups for item in group.items()):
        section, field, *rest = path.split(".")
        if isinstance(value, (str, list)):
            value = _filled_in(value, folder)
        target = result.setdefault(section, {})
        if rest:
            target[field] = {**target.get(field, {}), rest[0]: value}
        elif value is None:
            target.pop(field, None)
        else:
            target[field] = value
    return result


def _filled_in(value, folder):
    """Names of folders in place of {folder}, {saved}, {adapters} and {data}."""
    if isinstance(value, list):
        return [_filled_in(item, folder) for item in value]
    beside = os.path.dirname(folder)
    places = {"folder": folder, **{name: os.path.join(beside, name) for name in ("saved", "damaged", "adapters", "data")}}
    return value.format(**places) if isinstance(value, str) else value


class Runs:
    """Runs in worlds of this session; plain ones once."""

    def __init__(self, world, folder):
        self.world, self.folder, self.plain, self.count = world, folder, {}, 0

    def __call__(self, groups, options):
        options = dict(options)
        self.count += 1
        folder = os.path.join(self.folder, f"run{self.count}")
        return self.world(options.pop("world"))(record, settings_with(folder, *groups), folder, **options)

    def beside(self, beside, options):
        key = repr((sorted(beside.items()), sorted(options.items())))
        if key not in self.plain:
            self.plain[key] = self((beside,), options)
        return self.plain[key]


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("rows"))
    saved = {
        "training_config.save_enabled": True,
        "training_config.save_interval": 1,
        "training_config.training_iters": 2,
        "training_config.output_dir": os.path.join(folder, "saved"),
        "model_config.hidden_dropout": 0.25,
    }
    write_data(os.path.join(folder, "data"))
    made = Runs(world, folder)
    assert made((saved,), {"world": 1})[0]["error"] is None
    adapters = {**ADAPTED, "training_config.output_dir": os.path.join(folder, "adapters"), "training_config.save_enabled": True}
    assert made((adapters,), {"world": 1})[0]["error"] is None
    damage(os.path.join(folder, "saved"), os.path.join(folder, "damaged"))
    return made


@pytest.mark.parametrize("row", RUN, ids=[row.path for row in RUN])
def test_row_shows_its_effect(runs, row):
    value, beside, options = case_of(row)
    facet = options.pop("facet")
    several = row.path in ON_TWO_RANKS or any(path.startswith("parallel_config") for path in (row.path, *beside))
    options.setdefault("world", 2 if several else 1)
    plain = runs.beside(beside, options)
    changed = runs((beside, {row.path: value}), options)
    assert [rank[facet] for rank in plain] != [rank[facet] for rank in changed]
    if facet != "error":
        assert [rank["error"] for rank in (*plain, *changed)] == [None] * 2 * len(plain)


@pytest.mark.parametrize("path", REFUSALS)
def test_row_decides_about_an_error(tmp_path, path):
    fails, passes = REFUSALS[path]
    init_configs_from_dict(settings_with(str(tmp_path), passes))
    with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
        init_configs_from_dict(settings_with(str(tmp_path), fails))


def told_by_tokenizer(settings):
    """Vocabulary of the model and end of documents, or the error."""
    del settings["model_config"]["vocab_size"]
    settings["model_config"]["make_vocab_size_divisible_by"] = 1
    settings["dataset_config"]["eod_mask_loss"] = True
    try:
        all_config = init_configs_from_dict(settings)
    except ConfigError as error:
        return str(error)
    return all_config.model_config.vocab_size, all_config.dataset_config.eos_token_id


@pytest.mark.parametrize("path", TOKENIZERS)
def test_tokenizer_row_decides_the_vocabulary(tmp_path, path):
    value, beside = TOKENIZERS[path]
    write_tokenizers(str(tmp_path / "data"))
    folder = str(tmp_path / "run")
    plain, changed = (told_by_tokenizer(settings_with(folder, *groups)) for groups in ((beside,), (beside, {path: value})))
    assert isinstance(plain, tuple), plain
    assert "--merge-file" in changed if path.endswith("merge_file") else isinstance(changed, tuple) and changed != plain


def start_of_communication(settings):
    """The arguments by which a process joins the others."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.training import utils

    asked, real = {}, utils.comm
    utils.comm = types.SimpleNamespace(**{**vars(comm), "is_initialized": lambda: False, "init": asked.update})
    try:
        utils.set_parallel_context(init_configs_from_dict(settings).parallel_config)
    finally:
        utils.comm = real
    return asked


@pytest.mark.parametrize("path", AT_START)
def test_row_acts_when_communication_starts(world, tmp_path, path):
    value, name, expected = AT_START[path]
    (plain,) = world(1)(start_of_communication, settings_with(str(tmp_path)))
    (changed,) = world(1)(start_of_communication, settings_with(str(tmp_path), {path: value}))
    assert plain[name] != changed[name] == expected


def test_every_row_is_walked():
    """Nothing that works is left out: it runs here or with the profiler's tests, or is described in tests/config."""
    walked = {row.path for row in RUN} | set(REFUSALS) | set(AT_START) | set(OPTIONS) | set(ROLLOUT_OPTIONS)
    walked |= set(TOKENIZERS) | {row.path for row in ROWS if "profile" in row.path}
    described = {row.path for row in ROWS if row.seen in ("parameters", "layout")}
    left = {row.path for row in ROWS if row.status == "works" and not comes_later(row)} - walked - described
    assert not left
    later = {row.path for row in ROWS if comes_later(row)}
    assert set(CASES) <= walked | later
