"""Yaml as a person means it, files laid over each other, and the way back to yaml."""

import glob
import os

import pytest

from mindspeed_ms.config import (
    AllConfig,
    ConfigError,
    ModelParallelConfig,
    TrainingConfig,
    TransformerConfig,
    init_configs_from_dict,
    init_configs_from_yaml,
)
from mindspeed_ms.config.yaml_loader import load_yaml, parse_yaml, plain_value
from tests.config.samples import BASE, with_settings

WRITTEN = [
    ("1e-5", 1e-5),
    ("1e-08", 1e-8),
    ("2e-5", 2e-5),
    ("1E4", 1e4),
    ("1.5e+3", 1500.0),
    (".5", 0.5),
    ("5.", 5.0),
    ("1_000", 1000),
    ("010", 10),
    ("0x10", 16),
    ("-3", -3),
    ("yes", True),
    ("On", True),
    ("no", False),
    ("off", False),
    ("true", True),
    ("null", None),
    ("~", None),
    ("None", None),
    ("", None),
    ("949,50,1", "949,50,1"),
    ("12:30", "12:30"),
    ("1e", "1e"),
    ("e5", "e5"),
    ("y", "y"),
    ("1.2.3", "1.2.3"),
]


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_plain_words(text, value):
    assert plain_value(text) == value and type(plain_value(text)) is type(value)
    assert parse_yaml(f"key: {text}\n").data == {"key": value}


def test_quotes_keep_text():
    assert parse_yaml("a: '1e-5'\nb: \"yes\"\n").data == {"a": "1e-5", "b": "yes"}


def read(tmp_path, text, name="file.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


MODEL = "model_config:\n" + "".join(f"  {name}: {value}\n" for name, value in BASE["model_config"].items())


def test_values_behave_as_a_person_expects(tmp_path):
    text = (
        MODEL
        + "  num_query_groups: null\n  group_query_attention: on\n"
        + "optimizer_config:\n  lr: 2e-5\n  eps: 1e-08\n  clip_grad: 1\n"
    )
    all_config = init_configs_from_yaml(read(tmp_path, text))
    assert all_config.model_config.num_query_groups == 4
    assert all_config.model_config.group_query_attention is True
    optimizer = all_config.optimizer_config
    assert (optimizer.learning_rate, optimizer.eps, optimizer.clip_grad) == (2e-5, 1e-8, 1.0)
    assert isinstance(optimizer.clip_grad, float)


def test_quoted_numbers_are_numbers(tmp_path):
    all_config = init_configs_from_yaml(read(tmp_path, MODEL + "optimizer_config: {lr: '1e-5', lr_warmup_iters: '1_0'}\n"))
    assert (all_config.optimizer_config.learning_rate, all_config.optimizer_config.lr_warmup_iters) == (1e-5, 10)


def test_errors_carry_file_line_and_key(tmp_path):
    text = "parallel_config:\n  tensor_model_parallel_size: two\n" + MODEL + "  sequence_length: 3\n"
    with pytest.raises(ConfigError) as caught:
        init_configs_from_yaml(read(tmp_path, text, "mine.yaml"))
    first, second = (str(problem) for problem in caught.value.problems)
    assert first == "mine.yaml:2: parallel_config.tensor_model_parallel_size = 'two': expects an integer > 0."
    assert second.startswith("mine.yaml:10: model_config.sequence_length = 3") and "'seq_length'" in second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "given twice"),
        ("a: [1\n", "no valid yaml"),
        ("- 1\n", "top level"),
        ("a: !!python/object:os.system x\n", "unknown tag"),
        ("a: ${NO_SUCH_VARIABLE_HERE}\n", "NO_SUCH_VARIABLE_HERE"),
        ("a: &x\n  b: *x\n", "contains itself"),
        ("? [1]\n: 2\n", "plain word as key"),
    ],
)
def test_broken_yaml(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_yaml(text, "broken.yaml")


def test_merge_keys():
    text = "base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  b: 3\n"
    assert parse_yaml(text).data["other"] == {"a": 1, "b": 3}


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_ITERS", "1_000")
    monkeypatch.setenv("MY_FOLDER", "here")
    lines = ("training_iters: ${MY_ITERS}", "output_dir: ${MY_FOLDER}/out", "seed: ${MY_SEED:-7}", "prefix: '${MY_ITERS}'")
    text = MODEL + "training_config:\n" + "".join(f"  {line}\n" for line in lines)
    training = init_configs_from_yaml(read(tmp_path, text)).training_config
    assert (training.training_iters, training.output_dir, training.seed) == (1000, "here/out", 7)
    assert training.prefix == "1_000"  # quotes keep text
    with pytest.raises(ConfigError, match="quotes around"):
        init_configs_from_yaml(read(tmp_path, MODEL + "training_config: {training_iters: ${MY_ITERS}}\n"))


def test_files_merge_left_to_right(tmp_path):
    first = read(tmp_path, MODEL + "  fa_config: {pre_tokens: 5, next_tokens: 1}\noptimizer_config: {lr: 1}\n", "first.yaml")
    second = read(
        tmp_path, "model_config:\n  fa_config: {pre_tockens: 6}\noptimizer_config: {learning_rate: 2}\n", "second.yaml"
    )
    all_config = init_configs_from_yaml([first, second])
    fa_config = all_config.model_config.fa_config
    assert (fa_config.pre_tokens, fa_config.next_tokens, all_config.optimizer_config.learning_rate) == (6, 1, 2.0)
    assert all_config.provenance["optimizer_config.learning_rate"] == "second.yaml:3"
    assert init_configs_from_yaml([second, first]).model_config.fa_config.pre_tokens == 5


def test_wrong_files(tmp_path):
    with pytest.raises(ConfigError, match="string"):
        init_configs_from_yaml(3)
    with pytest.raises(ConfigError, match="yaml file"):
        load_yaml("config.json")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_yaml(str(tmp_path / "nowhere.yaml"))


def test_keyword_arguments_replace_sections(tmp_path):
    path = read(tmp_path, MODEL + "training_config: {seed: 1, training_iters: 5}\n")
    training = init_configs_from_yaml(path, training_config={"seed": 2}).training_config
    assert (training.seed, training.training_iters) == (2, 0)


def test_list_of_classes(tmp_path):
    path = read(tmp_path, "parallel_config: {tensor_model_parallel_size: 2}\ntraining_config: {seed: 3}\n")
    training, parallel = init_configs_from_yaml(path, [TrainingConfig, ModelParallelConfig])
    assert (training.seed, parallel.tensor_model_parallel_size) == (3, 2)
    assert training.parallel_config is parallel
    with pytest.raises(ConfigError, match="vocab_size"):
        init_configs_from_yaml(path, [TransformerConfig])
    with pytest.raises(ConfigError, match="config_classes"):
        init_configs_from_yaml(path, [int])


def test_sections_are_shared_by_identity():
    all_config = init_configs_from_dict(BASE)
    model = all_config.model_config
    assert model.parallel_config is all_config.parallel_config
    assert model.training_config.parallel_config is all_config.parallel_config
    assert all_config.optimizer_config.parallel_config is all_config.parallel_config
    for name in ("training_config", "dataset_config", "moe_config", "lora_config"):
        assert getattr(model, name) is getattr(all_config, name)
    by_hand = AllConfig(model_config=model, optimizer_config=all_config.optimizer_config)
    assert by_hand.training_config is all_config.training_config and by_hand.moe_config is all_config.moe_config


def test_general_config_is_free():
    general = init_configs_from_dict({**BASE, "general_config": {"mine": {"deep": 1}}}).general_config
    assert general.mine.deep == 1 and general.absent is None


def test_the_raw_dict_is_not_changed():
    import copy

    raw = with_settings({"model_config.fa_config": {"pre_tockens": 3}, "optimizer_config.clip_grad": {"clip_value": 1}})
    before = copy.deepcopy(raw)
    init_configs_from_dict(raw)
    assert raw == before


def test_to_yaml_of_a_trio(tmp_path):
    folder = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "38BV3")
    all_config = init_configs_from_yaml(sorted(glob.glob(os.path.join(folder, "*.yaml"))))
    all_config.to_yaml(str(tmp_path / "flat.yaml"))
    assert init_configs_from_yaml(str(tmp_path / "flat.yaml")) == all_config


def test_strings_that_look_like_something_else_stay_strings():
    for text in ("1e5", "yes", "null", "010", "${HOME"):
        all_config = init_configs_from_dict(with_settings({"training_config.prefix": text}))
        assert init_configs_from_dict(parse_yaml(all_config.to_yaml()).data).training_config.prefix == text
