"""Every argument that is not copied as it is: argument -> settings with their values."""

import pytest

from mindspeed_ms.config import argument_parser, init_configs_from_args
from mindspeed_ms.config.argument_table import _SECTIONS, TABLE
from mindspeed_ms.config.arguments import settings_of_arguments
from mindspeed_ms.config.flags_without_setting import read_flags
from tests.app.job import CPU_DEFAULT
from tests.config.test_arguments import MODEL

M, T, D, OPT, P, X = (f"{name}_config" for name in ("model", "training", "dataset", "optimizer", "parallel", "moe"))
ROPE, MLA = "--rope-scaling-type yarn", "--multi-latent-attention"
CASES = {
    "--num-query-groups 2 --group-query-attention": {f"{M}.num_query_groups": 2},
    "--apply-query-key-layer-scaling": {f"{M}.apply_query_key_layer_scaling": True, f"{M}.attention_softmax_in_fp32": True},
    "--use-rotary-position-embeddings": {f"{M}.position_embedding_type": "rope"},
    "--use-rope-scaling": {f"{M}.rope_scaling.type": "llama3"},
    f"--rope-scaling-factor 4 {ROPE}": {f"{M}.rope_scaling.factor": 4},
    f"--rope-scaling-low-freq-factor 2 {ROPE}": {f"{M}.rope_scaling.low_freq_factor": 2},
    f"--rope-scaling-high-freq-factor 6 {ROPE}": {f"{M}.rope_scaling.high_freq_factor": 6},
    f"--rope-scaling-original-max-position-embeddings 64 {ROPE}": {f"{M}.rope_scaling.original_max_position_embeddings": 64},
    f"--rope-scaling-beta-fast 16 {ROPE}": {f"{M}.rope_scaling.beta_fast": 16},
    f"--rope-scaling-beta-slow 2 {ROPE}": {f"{M}.rope_scaling.beta_slow": 2},
    f"--rope-scaling-mscale 2 {ROPE}": {f"{M}.rope_scaling.mscale": 2},
    f"--rope-scaling-mscale-all-dim 2 {ROPE}": {f"{M}.rope_scaling.mscale_all_dim": 2},
    f"--rope-scaling-truncate False {ROPE}": {f"{M}.rope_scaling.truncate": False},
    f"--rope-scaling-attention-factor 1.5 {ROPE}": {f"{M}.rope_scaling.attention_factor": 1.5},
    f"--rotary-scaling-factor 40 --max-position-embeddings 64 {MLA}": {
        f"{M}.rope_scaling.type": "yarn",
        f"{M}.rope_scaling.factor": 40,
        f"{M}.rope_scaling.original_max_position_embeddings": 64,
        f"{M}.rope_scaling.mscale_all_dim": 1.0,
    },
    f"--rotary-scaling-factor 4 --mscale 0.5 --mscale-all-dim 2 {MLA}": {
        f"{M}.rope_scaling.mscale": 0.5,
        f"{M}.rope_scaling.mscale_all_dim": 2,
    },
    f"--mscale 0.5 {MLA}": {f"{M}.rope_scaling.mscale": None},
    "--rotary-interleaved": {f"{M}.rotary_interleaved": True},
    f"--q-lora-rank 8 {MLA}": {f"{M}.q_lora_rank": 8, f"{M}.kv_lora_rank": 32, f"{M}.rotary_interleaved": None},
    f"--kv-lora-rank 8 {MLA}": {f"{M}.kv_lora_rank": 8},
    "--num-layers 2": {f"{M}.kv_lora_rank": None},
    f"--qk-nope-head-dim 8 {MLA}": {f"{M}.qk_head_dim": 8},
    f"--qk-rope-head-dim 8 {MLA}": {f"{M}.qk_pos_emb_head_dim": 8},
    f"--v-head-dim 8 {MLA}": {f"{M}.v_head_dim": 8},
    "--window-size 7,0": {f"{M}.sliding_window": 8},
    "--window-attn-skip-freq 2": {f"{M}.window_attn_skip_freq": 2},
    "--no-rope-fusion --position-embedding-type rope": {f"{M}.apply_rope_fusion": False},
    "--swiglu": {f"{M}.hidden_act": "swiglu"},
    "--openai-gelu": {f"{M}.hidden_act": "gelu_tanh"},
    "--squared-relu": {f"{M}.hidden_act": "squared_relu"},
    "--use-fused-rmsnorm": {f"{M}.normalization": "FusedRMSNorm"},
    "--transformer-impl local": {f"{M}.transformer_impl": "local"},
    "--recompute-activations": {f"{M}.recompute_granularity": "selective"},
    "--encoder-num-layers 3": {f"{M}.encoder_num_layers": 3},
    "--exit-signal-handler": {f"{T}.exit_signal_handler": True},
    "--bf16": {f"{T}.bf16": True, f"{T}.accumulate_allreduce_grads_in_fp32": True},
    "--no-check-for-nan-in-loss-and-grad": {f"{T}.check_for_nan_in_loss": False, f"{T}.check_for_nan_in_grad": False},
    "--logging-level 30": {f"{T}.log_level": "warning"},
    "--save folder": {f"{T}.output_dir": "folder", f"{T}.save_enabled": True},
    "--ckpt-format safetensors": {f"{T}.ckpt_format": "safetensors"},
    "--load folder": {f"{T}.load_checkpoint": "folder", f"{T}.resume_training": True},
    "--load-checkpoint-loosely": {f"{T}.load_strict": False},
    "--dist-ckpt-strictness log_all": {f"{T}.load_strict": False},
    "--profile-with-cpu": {f"{T}.profile_framework": "all"},
    "--no-shuffle": {f"{D}.shuffle": False},
    "--tokenizer-not-use-fast": {f"{D}.use_fast_tokenizer": False},
    "--adam-beta1 0.8": {f"{OPT}.betas": [0.8, 0.999]},
    "--adam-beta2 0.95": {f"{OPT}.betas": [0.9, 0.95]},
    "--ulysses-degree-in-cp 2 --context-parallel-algo hybrid_cp_algo": {f"{P}.ulysses_degree_in_cp": 2},
    "--context-parallel-size 2 --cp-comm-type p2p": {f"{P}.context_parallel_algo": "megatron_cp_algo"},
    "--context-parallel-size 2 --cp-comm-type a2a a2a": {f"{P}.context_parallel_algo": "ulysses_cp_algo"},
    "--context-parallel-size 2 --cp-comm-type allgather": {f"{P}.context_parallel_algo": "megatron_cp_algo"},
    "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2": {
        f"{P}.context_parallel_algo": "hybrid_cp_algo",
        f"{P}.ulysses_degree_in_cp": 4,
    },
    "--zero-shard-size 2": {f"{P}.zero_shard_size": 2},
    "--use-tp-pp-dp-mapping": {f"{P}.order": "tp-cp-ep-pp-dp"},
    "--distributed-backend mccl": {f"{P}.communication_backend": "mccl"},
    "--moe-ffn-hidden-size 16 --num-experts 4": {f"{X}.moe_ffn_hidden_size": 16},
    "--moe-router-load-balancing-type noaux_tc --num-experts 4": {
        f"{X}.moe_router_load_balancing_type": "none",
        f"{X}.moe_router_enable_expert_bias": True,
    },
    "--router-gating-in-fp32": {f"{X}.moe_router_dtype": "fp32"},
    "--moe-layer-freq [0]+[1]*3": {f"{X}.moe_layer_freq": "[0]+[1]*3"},
    "--first-k-dense-replace 1": {f"{X}.first_k_dense_replace": 1},
    "--lora-target-modules linear_qkv out_proj": {
        "lora_config.target_cells": [{"target_cells": [r".*\.qkv_proj", r".*\.out_proj"]}],
        "lora_config.use_lora": True,
    },
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cp-comm-type ring", "expects one of p2p"),
        ("--cp-comm-type p2p a2a", "differs between layers"),
        ("--cp-comm-type p2p ring", "expects one of p2p"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 8 --hierarchical-context-parallel-sizes 8", "expects two sizes"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 2", "expects two sizes"),
        ("--cp-comm-type a2a --context-parallel-algo megatron_cp_algo", "keep one of them"),
        ("--hierarchical-context-parallel-sizes 2 2", "needs --cp-comm-type a2a"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 8 --hierarchical-context-parallel-sizes 2 2", "multiply to"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes x 2", "expects two sizes"),
    ],
)
def test_communication_types_that_do_not_fit_are_refused(words, message):
    problems = settings_of_arguments(argument_parser().parse_args(words.split())).problems
    assert any(message in problem.message for problem in problems), problems


@pytest.mark.parametrize("words", [[""], [" "], ["linear_qkv", ""]])
def test_empty_names_of_adapted_linears_are_refused(words):
    (problem,) = settings_of_arguments(argument_parser().parse_args(["--lora-target-modules", *words])).problems
    assert (problem.key, problem.value) == ("--lora-target-modules", words)
    assert problem.message.startswith("expects a value, but is empty")


def test_an_empty_flag_that_is_ignored_stops_nothing():
    settings = settings_of_arguments(argument_parser().parse_args(["--wandb-project", "", "--seed", "3"]))
    assert settings.problems == [] and settings.value(f"{T}.seed") == 3


def test_gathered_keys_are_told_to_go_round_a_ring():
    words = ["--context-parallel-size", "2", "--cp-comm-type"]
    gathered, ring = (settings_of_arguments(argument_parser().parse_args([*words, kind])) for kind in ("allgather", "p2p"))
    assert any("go round a ring" in str(text) for text in gathered.notices)
    assert not any("go round a ring" in str(text) for text in ring.notices)


@pytest.mark.parametrize("words", CASES)
def test_an_argument_sets_its_values(words):
    settings = settings_of_arguments(argument_parser().parse_args(words.split()))
    assert {path: settings.value(path) for path in CASES[words]} == CASES[words]


def test_every_converted_argument_has_a_case():
    typed = {word for words in CASES for word in words.split() if word.startswith("--")}
    rows = [row for row in TABLE if row.path and row.convert and (row.flags or row.off_flags)]
    assert len(rows) > 40
    assert [row.name for row in rows if not typed & {*row.flags, *row.off_flags}] == []


def test_sections_are_read_in_the_order_in_which_later_ones_win():
    assert [section.config_name.partition("_")[0] for section in _SECTIONS] == [
        *("model", "training", "dataset", "optimizer", "parallel", "moe", "lora")
    ]


def test_entries_of_flags_tell_their_form():
    rows = {row.name: row for row in read_flags()[0]}
    assert rows["tp_comm_overlap_ag"].off_flags == ("--disable-tp-comm-overlap-ag",)  # its own flag
    assert rows["pad_to_seq_lengths"].off_flags == ("--no-pad-to-seq-lengths",)
    assert rows["deprecated_use_mcore_models"].all_names == ("deprecated_use_mcore_models", "use_mcore_models")
    args = argument_parser().parse_args(["--recompute-modules", "mlp", "core_attn", "--mrope-section", "1"])
    assert (args.recompute_modules, args.mrope_section) == (["mlp", "core_attn"], [1])


@pytest.mark.parametrize("words", ["2 2 1 1", "2,2,1,1", "[2,2,1,1]", "[2, 2, 1, 1]"])
def test_a_list_is_read_with_commas_blanks_or_brackets(words):
    sizes = [*MODEL, "--num-layers", "6", "--pipeline-model-parallel-size", "4", "--num-layer-list", *words.split()]
    assert init_configs_from_args(argument_parser().parse_args(sizes)).parallel_config.num_layer_list == [2, 2, 1, 1]


# ---- what lies beneath -----------------------------------------------------------------------------------------------


def over_the_default(*words):
    return init_configs_from_args(argument_parser().parse_args(["--default-config", *CPU_DEFAULT, *words]))


def test_flags_of_a_model_mean_megatron_s_model():
    model = over_the_default(*MODEL, "--max-position-embeddings", "32").model_config
    assert (model.hidden_act, model.normalization, model.position_embedding_type) == ("gelu", "LayerNorm", "learned_absolute")
    assert (model.untie_embeddings_and_output_weights, model.hidden_dropout, model.attention_dropout) == (False, 0.1, 0.1)
    assert over_the_default(*MODEL).training_config.training_iters == 0


def test_other_flags_lie_over_the_default_configuration():
    words = "--seq-length 64 --train-iters 7 --lr 5e-4 --fp16 --lr-warmup-iters 3 --data-path x --use-flash-attn".split()
    all_config = over_the_default(*words)
    assert (all_config.model_config.hidden_act, all_config.training_config.training_iters) == ("swiglu", 7)
    assert all_config.model_config.compute_dtype == "float16" and all_config.optimizer_config.min_lr == 0.0
    assert all_config.optimizer_config.lr_warmup_fraction is None
    gone = [notice for notice in all_config.notices if "gives way to" in notice]
    assert len(gone) == 3 and not any(".yaml" in text for text in (*all_config.notices, *all_config.provenance.values()))


def test_named_files_win_over_the_default_configuration(tmp_path):
    (tmp_path / "own.yaml").write_text("training_config: {training_iters: 5}\n")
    all_config = over_the_default(*MODEL, "--config", str(tmp_path / "own.yaml"))
    assert all_config.training_config.training_iters == 5 and all_config.model_config.normalization == "LayerNorm"


@pytest.mark.parametrize(("over", "kept"), [("--train-samples 64", 64), ("--train-samples 64 --train-iters 3", None)])
def test_alternatives_that_both_were_typed_contradict(over, kept):
    if kept is None:
        with pytest.raises(ValueError, match="both give the length"):
            over_the_default(*over.split())
    else:
        assert over_the_default(*over.split()).dataset_config.train_samples == kept
