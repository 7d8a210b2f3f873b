"""The command line: Megatron's defaults, what was typed, yaml below it, foreign Namespaces."""

import argparse
import json
import os

import pytest
import yaml

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, init_configs_from_dict
from mindspeed_ms.config.argument_table import RUNTIME_NAMES, row_of_name
from mindspeed_ms.config.arguments import settings_of_arguments
from tests.config.samples import BASE, with_settings

MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--padded-vocab-size",
    "128",
]
MEGATRON = os.path.join(os.path.dirname(__file__), "megatron_namespace.json")


def read(*words):
    """AllConfig of MODEL and more words."""
    return init_configs_from_args(argument_parser().parse_args([*MODEL, *" ".join(words).split()]))


def test_megatron_s_defaults():
    all_config = read()
    model, training, optimizer = all_config.model_config, all_config.training_config, all_config.optimizer_config
    assert (model.init_method_std, model.attention_dropout, model.hidden_dropout) == (0.02, 0.1, 0.1)
    assert (model.add_bias_linear, model.qkv_has_bias, model.bias_gelu_fusion) == (True, False, True)
    assert (model.ffn_hidden_size, model.num_query_groups, model.position_embedding_type) == (256, 4, "learned_absolute")
    assert (optimizer.clip_grad, optimizer.weight_decay, optimizer.lr_decay_style) == (1.0, 0.01, "linear")
    assert (optimizer.optimizer_type, optimizer.use_checkpoint_opt_param_scheduler) == ("adam", False)
    assert (training.seed, training.log_interval, training.eval_interval) == (1234, 100, 1000)
    assert (training.wrap_with_ddp, training.save_enabled, training.check_for_nan_in_loss) == (True, False, True)


def test_guide_s_defaults_without_arguments():
    from mindspeed_ms.config import init_configs_from_dict
    from tests.config.samples import BASE

    all_config = init_configs_from_dict(BASE)
    model, training, optimizer = all_config.model_config, all_config.training_config, all_config.optimizer_config
    assert (model.init_method_std, model.attention_dropout, model.hidden_dropout) == (0.01, 0.0, 0.0)
    assert (model.qkv_has_bias, model.out_proj_has_bias, model.mlp_has_bias, model.add_bias_linear) == (
        True,
        True,
        False,
        False,
    )
    assert (optimizer.clip_grad, optimizer.weight_decay, optimizer.lr_decay_style) == (0.0, 0.0, "constant")
    assert (optimizer.optimizer_type, optimizer.learning_rate) == ("AdamWeightDecay", 1e-3)
    assert (training.no_load_optim, training.no_load_rng, training.ckpt_format) == (False, False, None)


def test_conversions():
    all_config = read(
        "--swiglu --use-fused-rmsnorm --normalization RMSNorm --adam-beta2 0.95 --group-query-attention "
        "--recompute-activations --num-experts 4 --moe-layer-freq ([1]*3+[0]*1)"
    )
    assert all_config.model_config.hidden_act == "swiglu" and all_config.model_config.gated_linear_unit
    assert all_config.model_config.ffn_hidden_size == 128
    assert all_config.model_config.normalization == "FusedRMSNorm"
    assert all_config.model_config.num_query_groups == 1
    assert all_config.model_config.recompute_granularity == "selective"
    assert all_config.optimizer_config.betas == [0.9, 0.95]
    assert all_config.moe_config.moe_layer_freq == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "flags, window, layers",
    [
        ("--window-size 7,0", 8, None),
        ("--window-size=-1,0", None, None),
        ("--window-size (7,-1) --sliding-window 8", 8, None),
        ("--sliding-window 8 --window-attn-skip-freq 2", 8, [2]),
        ("--sliding-window 8 --window-attn-skip-freq ([0]*1+[1]*3)", 8, [0, 1, 1, 1]),
    ],
)
def test_sliding_windows(flags, window, layers):
    model = read(flags).model_config
    assert (model.sliding_window, model.window_attn_skip_freq) == (window, layers)


def test_window_of_a_namespace():
    args = argument_parser().parse_args(MODEL)
    del args.typed_options
    args.window_size = (7, 0)
    assert init_configs_from_args(args).model_config.sliding_window == 8


def test_numbers_of_a_namespace():
    """Numbers with the same decimals are different: 4.0 is not Megatron's default, 8.0."""
    args = argument_parser().parse_args([*MODEL, "--position-embedding-type", "rope"])
    del args.typed_options
    args.use_rope_scaling, args.rope_scaling_factor = True, 4.0
    assert init_configs_from_args(args).model_config.rope_scaling.factor == 4.0
    assert settings_of_arguments(argparse.Namespace(clip_grad=2.0)).by_path["optimizer_config.clip_grad"].place == "arguments"


def test_none_is_a_choice_where_it_is_listed():
    experts = read("--num-experts 4 --moe-router-load-balancing-type none").model_config.moe_config
    assert experts.moe_router_load_balancing_type == "none"
    assert read("--position-embedding-type none").model_config.position_embedding_type == "none"


@pytest.mark.parametrize("value", ["7", "7,1", "-2,0", "a,b"])
def test_bad_window_size(value):
    with pytest.raises(ConfigError, match=r"--window-size = .*expects LEFT,0"):
        read(f"--window-size={value}")


def test_bf16_and_fp16_as_megatron():
    bf16 = read("--bf16")
    assert bf16.training_config.accumulate_allreduce_grads_in_fp32
    assert (bf16.model_config.params_dtype, bf16.model_config.compute_dtype) == ("bfloat16", "bfloat16")
    assert not read("--bf16 --grad-reduce-in-bf16").training_config.accumulate_allreduce_grads_in_fp32
    fp16 = read("--fp16").training_config
    assert (fp16.check_for_nan_in_loss, fp16.loss_scale_value, fp16.loss_scale_window) == (False, 2.0**32, 1000)
    assert fp16.dynamic_loss_scale and not read("--fp16 --loss-scale 128").training_config.dynamic_loss_scale


def test_overflow_is_no_error_with_a_dynamic_loss_scale():
    half = {"training_config.fp16": True, "model_config.compute_dtype": "float16"}
    asked = {f"training_config.check_for_nan_in_{name}": True for name in ("loss", "grad")}
    plain = init_configs_from_dict(with_settings(half))
    assert not plain.training_config.check_for_nan_in_loss and not any("overflow" in text for text in plain.notices)
    assert plain.training_config.loss_scale_value == 2.0**32
    told = init_configs_from_dict(with_settings({**half, **asked}))
    assert not told.training_config.check_for_nan_in_loss and not told.training_config.check_for_nan_in_grad
    assert any("check_for_nan_in_loss and training_config.check_for_nan_in_grad" in text for text in told.notices)
    constant = init_configs_from_dict(with_settings({**half, **asked, "training_config.loss_scale": 128.0}))
    assert constant.training_config.check_for_nan_in_loss and constant.training_config.check_for_nan_in_grad


def test_arguments_beside_files_complete_the_loss_scale(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(BASE))
    words = ["--config", str(path), "--fp16", "--initial-loss-scale", "65536"]
    training = init_configs_from_args(argument_parser().parse_args(words)).training_config
    assert (training.loss_scale_value, training.loss_scale_factor, training.loss_scale_window) == (65536.0, 2.0, 1000)


@pytest.mark.parametrize("betas, expected", [("0.8,0.99", [0.8, 0.95]), ([0.8], None), ("a,b", None)])
def test_one_decay_rate_beside_files(tmp_path, betas, expected):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**BASE, "optimizer_config": {"betas": betas}}))
    args = argument_parser().parse_args(["--config", str(path), "--adam-beta2", "0.95"])
    if expected:
        assert init_configs_from_args(args).optimizer_config.betas == expected
    else:
        with pytest.raises(ConfigError, match="betas"):
            init_configs_from_args(args)


def test_group_size_without_virtual_stages_is_told():
    words = "--pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 4"
    told = [text for text in read(words).notices if "has no effect without virtual pipeline stages" in text]
    assert len(told) == 1 and told[0].startswith("--microbatch-group-size-per-virtual-pipeline-stage")


def test_hysteresis_is_hysteresis():
    training = read("--fp16 --hysteresis 3").training_config
    assert (training.hysteresis, training.loss_scale_factor) == (3, 2.0)


def test_vocabulary_is_padded_as_megatron_does():
    words = [
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "32",
        "--make-vocab-size-divisible-by",
        "16",
    ]
    for extra, size in (
        ("--vocab-size 100", 112),
        ("--vocab-size 100 --tensor-model-parallel-size 2", 128),
        ("--vocab-size 127 --tokenizer-type NullTokenizer", 128),
        ("--vocab-size 128 --tokenizer-type NullTokenizer", 144),
        ("--vocab-size 112 --vocab-extra-ids 1", 128),
    ):
        all_config = init_configs_from_args(argument_parser().parse_args(words + extra.split()))
        assert all_config.model_config.vocab_size == size


def test_load_and_save_as_megatron():
    training = read("--load there").training_config
    assert (training.load_checkpoint, training.resume_training, training.save_enabled) == ("there", True, False)
    training = read("--load there --finetune --save here").training_config
    assert (training.resume_training, training.finetune, training.output_dir, training.save_enabled) == (
        False,
        True,
        "here",
        True,
    )


def test_typed_beats_file_beats_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_config: {num_layers: 8, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: 128, seq_length: 32, "
        "vocab_size: 128, hidden_dropout: 0.25}\nparallel_config: {tensor_model_parallel_size: 2, "
        "sequence_parallel: True}\n"
    )
    words = ["--config", str(path), "--num-layers", "2", "--no-sequence-parallel", "--attention-dropout", "0.1"]
    all_config = init_configs_from_args(argument_parser().parse_args(words))
    model = all_config.model_config
    assert (model.num_layers, model.hidden_dropout, model.init_method_std) == (2, 0.25, 0.01)
    # typed although it is Megatron's default, and a switch turned off
    assert model.attention_dropout == 0.1 and not all_config.parallel_config.sequence_parallel
    assert all_config.provenance["model_config.num_layers"] == "command line (--num-layers)"
    assert all_config.provenance["model_config.hidden_dropout"] == "run.yaml:1"


def test_args_defaults_lie_below_what_was_typed():
    parser = argument_parser(defaults={"seed": 5, "hidden_dropout": 0.3})
    all_config = init_configs_from_args(parser.parse_args([*MODEL, "--seed", "6"]))
    assert (all_config.training_config.seed, all_config.model_config.hidden_dropout) == (6, 0.3)


def test_extra_arguments_are_left_alone():
    def provider(parser):
        parser.add_argument("--my-own", type=int, default=3)
        return parser

    args = argument_parser(provider).parse_args([*MODEL, "--my-own", "4"])
    assert args.my_own == 4 and "my_own" in args.typed_options
    assert not any("my_own" in notice for notice in init_configs_from_args(args).notices)


def test_contradicting_flags():
    with pytest.raises(ConfigError, match="contradicts"):
        read("--swiglu --hidden-act relu")
    with pytest.raises(ConfigError, match="rope-scaling"):
        read("--rope-scaling-factor 4")
    with pytest.raises(ConfigError, match="RMSNorm"):
        read("--use-fused-rmsnorm --normalization LayerNorm")


def test_world_from_the_launcher(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    all_config = read("--tensor-model-parallel-size 2 --global-batch-size 8 --micro-batch-size 2")
    assert (all_config.parallel_config.data_parallel_size, all_config.dataset_config.micro_batch_num) == (2, 2)
    with pytest.raises(ConfigError, match="multiple of 8"):
        read("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2")


def megatron_namespace():
    """What a real Megatron-LM run (core 0.12.1, validated arguments) had in its Namespace."""
    with open(MEGATRON, encoding="utf-8") as file:
        return argparse.Namespace(**json.load(file))


def test_a_real_megatron_namespace():
    args = megatron_namespace()
    unknown = [name for name in vars(args) if row_of_name(name) is None and name not in RUNTIME_NAMES]
    assert not unknown
    before = dict(vars(args))
    all_config = init_configs_from_args(args)
    assert vars(args) == before
    model, optimizer = all_config.model_config, all_config.optimizer_config
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (4, 32, 48, 128)
    assert (model.add_bias_linear, model.bias_gelu_fusion, model.hidden_dropout) == (True, True, 0.0)
    assert (optimizer.learning_rate, optimizer.betas, optimizer.lr_decay_style) == (0.002, [0.9, 0.95], "cosine")
    assert (optimizer.lr_warmup_iters, optimizer.weight_decay, optimizer.clip_grad) == (2, 0.1, 1.0)
    assert (all_config.dataset_config.global_batch_size, all_config.dataset_config.micro_batch_num) == (4, 2)


def test_not_a_namespace():
    with pytest.raises(ConfigError, match="Namespace"):
        init_configs_from_args({"num_layers": 2})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rotary_base", ["a"], r"--rotary-base = \['a'\]: expects a number > 0"),
        ("logging_level", ["a"], r"--logging-level = \['a'\]: expects one of debug"),
        ("moe_router_load_balancing_type", ["a"], r"--moe-router-load-balancing-type = \['a'\]: expects one of aux_loss"),
    ],
)
def test_values_of_another_kind_in_a_namespace_are_named(name, value, words):
    with pytest.raises(ConfigError, match=words):
        init_configs_from_args(argparse.Namespace(**{name: value}))


def test_decay_rates_given_twice_contradict_each_other():
    with pytest.raises(ConfigError, match=r"--adam-beta1 = 0.7: contradicts --betas \[0.8, 0.9\]; keep one"):
        read("--betas 0.8 0.9 --adam-beta1 0.7")


MODEL_FLAGS = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --padded-vocab-size 8".split()


def test_feed_forward_size_follows_a_typed_hidden_size_also_over_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("training_config: {training_iters: 3}\n")
    for words in ([], ["--config", str(file)]):
        args = argument_parser().parse_args([*words, *MODEL_FLAGS])
        assert init_configs_from_args(args).model_config.ffn_hidden_size == 256


def test_what_is_missing_is_named_by_its_flag():
    with pytest.raises(ConfigError) as caught:
        init_configs_from_args(argument_parser().parse_args(["--num-layers", "1", "--micro-batch-size", "2"]))
    (problem,) = caught.value.problems
    names = "--padded-vocab-size, --hidden-size, --num-attention-heads, --seq-length, --lr, --train-iters"
    assert problem.key == names and "must be given" in problem.message


def test_both_sides_of_a_contradiction_are_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer_config:\n  learning_rate: 0.01\n  min_lr: 0.001\n")
    with pytest.raises(ConfigError, match=r"run.yaml:3: .*min_lr = 0.001.*--lr = 0.0005 from the command line"):
        init_configs_from_args(argument_parser().parse_args(["--config", str(file), *MODEL_FLAGS, "--lr", "5e-4"]))


@pytest.mark.parametrize("over", [["--tensor-model-parallel-size", "1"], ["--tensor-model-parallel-size=1", "--seed", "2"]])
def test_one_tensor_rank_typed_over_a_file_switches_sequence_parallelism_off(tmp_path, over):
    file = tmp_path / "run.yaml"
    file.write_text("parallel_config:\n  tensor_model_parallel_size: 2\n  sequence_parallel: True\n")
    words = ["--config", str(file), *MODEL_FLAGS]
    all_config = init_configs_from_args(argument_parser().parse_args([*words, *over]))
    assert not all_config.parallel_config.sequence_parallel
    (told,) = [text for text in all_config.notices if "sequence_parallel (run.yaml:3)" in text]
    assert "--tensor-model-parallel-size 1 (command line)" in told
    assert init_configs_from_args(argument_parser().parse_args(words)).parallel_config.sequence_parallel


def test_sequence_parallelism_and_one_tensor_rank_from_one_source_are_an_error(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("parallel_config:\n  tensor_model_parallel_size: 1\n  sequence_parallel: True\n")
    both = ["--tensor-model-parallel-size", "1", "--sequence-parallel"]
    for words in (["--config", str(file)], both, ["--config", str(file), *both]):
        with pytest.raises(ConfigError, match="needs a tensor parallel size above 1"):
            init_configs_from_args(argument_parser().parse_args([*words, *MODEL_FLAGS]))


@pytest.mark.parametrize(
    ("words", "is_told"), [("--padded-vocab-size 100", True), ("--padded-vocab-size 96", False), ("--vocab-size 90", False)]
)
def test_a_padding_that_is_not_used_is_told(words, is_told):
    sizes = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --make-vocab-size-divisible-by 32"
    all_config = init_configs_from_args(argument_parser().parse_args(f"{sizes} {words}".split()))
    assert any("--make-vocab-size-divisible-by: no effect" in text for text in all_config.notices) == is_told
