"""What people really type: launch scripts with placeholders and foreign values, files behind flags, broken files."""

import subprocess
import sys

import pytest

from mindspeed_ms.config import ConfigError, init_configs_from_yaml
from mindspeed_ms.config.__main__ import main
from mindspeed_ms.config.convert import convert_script
from mindspeed_ms.config.yaml_loader import parse_yaml

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128 --train-iters 3"


def converted(folder, text):
    script = folder / "run.sh"
    script.write_text(text)
    result = convert_script(str(script), {})
    return parse_yaml(result.yaml_text).data, dict(result.fate)


def test_placeholders_of_several_words_stay_one_value(tmp_path):
    data, _ = converted(
        tmp_path, f'SAVE="your model save path"\nARGS="{SIZES} --save $SAVE --bf16"\ntorchrun pretrain_gpt.py $ARGS\n'
    )
    assert data["training_config"]["output_dir"] == "your model save path"
    assert data["training_config"]["bf16"] is True


@pytest.mark.parametrize(
    ("flag", "fate"),
    [
        ("--moe-router-load-balancing-type softmax_topk", "LEFT OUT: expects one of aux_loss"),
        ("--normalization BatchNorm", "LEFT OUT: expects one of"),
        ("--lr-warmup-iters", "LEFT OUT: has no value"),
        ("--no-such-flag 3", "UNKNOWN"),
    ],
)
def test_what_cannot_be_converted_is_left_out_and_the_rest_reads(tmp_path, flag, fate):
    data, fates = converted(tmp_path, f"torchrun pretrain_gpt.py {flag} {SIZES}\n")
    assert next(text for name, text in fates.items() if name.split()[0] == flag.split()[0]).startswith(fate)
    file = tmp_path / "run.yaml"
    file.write_text(convert_script(str(tmp_path / "run.sh"), {}).yaml_text)
    assert init_configs_from_yaml(str(file)).model_config.num_layers == 2
    assert data["model_config"]["hidden_size"] == 64


def test_files_may_stand_behind_flags(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("training_config: {training_iters: 3}\n")
    for words in (["--world", "4", str(file)], [str(file), "--world", "4"], ["--config", str(file), "--world", "4"]):
        assert main(["check", *words, *SIZES.split()[:-2]]) == 0
        assert "4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "run.yaml: is no text in UTF-8"),
        (b"model_config:\n\tvocab_size: 3\n", "run.yaml:2: .*a tab"),
        (b"model_config: 3\n", "run.yaml:1: model_config = 3"),
        (b"model_config: {num_layers: 4, num_layers: 5}\n", "given twice"),
    ],
)
def test_broken_files_are_named(tmp_path, content, words):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        init_configs_from_yaml(str(file))


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    command = f"{sys.executable} -m mindspeed_ms.config check {SIZES} | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "Broken" not in result.stderr


def test_an_empty_environment_variable_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPT_LOAD_DIR", "")
    file = tmp_path / "run.yaml"
    file.write_text("training_config:\n  training_iters: 3\n  load_checkpoint: ${CKPT_LOAD_DIR}\n")
    assert not init_configs_from_yaml(str(file)).training_config.load_checkpoint


MODEL = (
    "model_config: {vocab_size: 128, num_layers: 2, num_attention_heads: 4, hidden_size: 64, ffn_hidden_size: 128, "
    "seq_length: 32}\n"
)


@pytest.mark.parametrize(("more", "words"), [
    ("parallel_config: &p {tensor_model_parallel_size: 2}\ntraining_config: *p\n",
     r"run.yaml:2: training_config.tensor_model_parallel_size = 2: .* Did you mean parallel_config.tensor_model_parallel_size"),
    ("training_config:\n  output_dir: ${HOME\n", r"run.yaml:3: training_config.output_dir: has a \$\{ that begins no"),
    ("training_config:\n  seed: ${}\n", r"run.yaml:3: training_config.seed: has a \$\{"),
    ("optimizer_config: {learning_rate: .nan}\n", "learning_rate = nan: expects a number > 0"),
    ("optimizer_config: {learning_rate: 1e400}\n", "learning_rate = inf: expects a number > 0"),
    ("moe_config: {num_experts: 2, moe_layer_freq: '[1]*(2'}\n", r"moe_layer_freq = '\[1\]\*\(2': expects .* pattern such as"),
    ("parallel_config: {num_layer_list: '[[1],[1'}\n", r"num_layer_list = '\[\[1\],\[1': expects a list of integers"),
    ("lora_config: {use_lora: True, target_cells: [{target_cells: ['(']}]}\n", r"list of regular expressions, found '\('"),
    ("lora_config: {use_lora: True, target_cells: [{target_cells: ['a']}, {cell: a, rnak: 3}]}\n", "Did you mean 'rank'"),
    ("lora_config: {use_lora: True, target_cells: [{target_cells: ['a']}, {cell: a, rank: big}]}\n", "rank = 'big' expects"),
])  # fmt: skip
def test_careless_yaml_is_named_with_what_is_expected(tmp_path, more, words):
    file = tmp_path / "run.yaml"
    file.write_text(MODEL + more)
    with pytest.raises(ConfigError, match=words):
        init_configs_from_yaml(str(file))


@pytest.mark.parametrize(("words", "said"), [
    ("\u2014lr 1e-3", "Did you mean '--lr'"),
    ("-lr 1e-3", "Did you mean '--lr'"),
    ("--tensor-model-parallel 2", "Did you mean '--tensor-model-parallel-size'"),
    ("--bf16 --sede 3", "Did you mean '--seed'"),
    ("--bf16 True", "behind --bf16, which takes no value"),
    ("--bf16=True", "argument --bf16: takes no value, but was given 'True'"),
    ("--lr nan", "--lr = 'nan': expects a number > 0"),
    ("--num-layers 99999999999999999999", "--num-layers = 99999999999999999999: expects an integer > 0 and <= 10000"),
    ("--num-experts 4 --moe-layer-freq [1]*99999999999", "--moe-layer-freq = '[1]*99999999999': expects a whole number"),
    ("--num-experts 4 --moe-layer-freq=", "--moe-layer-freq = '': expects a value, but is empty"),
    ("--num-experts 4 --moe-expert-capacity-factor=", "--moe-expert-capacity-factor = '': expects a number or null"),
    ("--window-size=", "--window-size = '': expects a value, but is empty"),
    ("--load=", "--load = '': expects a value, but is empty (an unset shell variable?)"),
    ("--no-shared-storage --tokenizer-model=", "--tokenizer-model = '': expects a string or null, but is empty"),
    ("--data-path", "argument --data-path: expected at least one argument"),
    ("--data-path=", "--data-path = ['']: expects a list of words or null, but is empty"),
    ("--lora-target-modules linear_qvk", "--lora-target-modules = ['linear_qvk']: "),
])  # fmt: skip
def test_careless_flags_are_named_with_what_is_expected(capsys, words, said):
    try:
        code = main(["check", *SIZES.split(), *words.split()])
    except SystemExit as error:
        code = error.code
    assert code != 0
    assert said in capsys.readouterr().err


def test_what_is_allowed_but_odd_is_told(tmp_path, capsys):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert main(["check", str(tmp_path / "empty.yaml"), *SIZES.split(), "--seed", "1", "--lr", "1", "--seed", "2"]) == 0
    told = capsys.readouterr().out
    assert "empty.yaml: holds no settings" in told
    assert "--seed was given more than once; the last one counts" in told and "--lr was given" not in told
    (tmp_path / "folder.yaml").mkdir()
    assert main(["check", str(tmp_path / "folder.yaml")]) == 1
    assert "is a folder" in capsys.readouterr().err
