"""Rows that concern parameters or layout change what mindspeed_ms.layout describes; no row that works is unread."""

import glob
import os
import re
from math import lcm

import pytest

from mindspeed_ms.config import ConfigError, init_configs_from_dict, require_available
from mindspeed_ms.config.arguments import argument_parser, settings_of_arguments
from mindspeed_ms.config.checks.effects import NEEDS
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.field import option_of
from mindspeed_ms.layout.parameters import describe_parameters
from mindspeed_ms.layout.ranks import WorldLayout
from tests.config.samples import BASE, ROWS, later_paths, offenders, sample, with_settings

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "mindspeed_ms"))
# seen elsewhere: in the padded vocabulary (test_arguments), as another spelling, in drawn values, or as an error
SEEN_ELSEWHERE = {
    "model_config.make_vocab_size_divisible_by",
    "dataset_config.vocab_size",
    "dataset_config.vocab_extra_ids",
    "model_config.use_rotary_position_embeddings",
    "model_config.group_query_attention",
    "model_config.embedding_init_dtype",
    "parallel_config.account_for_loss_in_pipeline_split",
    # the vocabulary follows from the tokenizer's files (tests/rows)
    "dataset_config.tokenizer_type",
    "dataset_config.tokenizer_model",
    "dataset_config.tokenizer_name_or_path",
    "dataset_config.use_fast_tokenizer",
    "dataset_config.vocab_file",
    "dataset_config.merge_file",
    # the model follows from a checkpoint (tests/rows, tests/checkpoint)
    "training_config.use_checkpoint_args",
}
# decided inside the configuration
DECIDED_HERE = {
    "moe_config.moe_extended_tp",
    "model_config.use_rotary_position_embeddings",
    "model_config.fp32_residual_connection",
    "model_config.softmax_compute_dtype",
    "model_config.transformer_impl",
    "training_config.grad_clip_kwargs.clip_value",
    "training_config.loss_func_kwargs.loss_func_type",
    "training_config.grad_reduce_in_bf16",
    "training_config.use_checkpoint_args",
    "training_config.wrap_with_ddp",
}


def comes_later(path):
    """True if a start refuses the row, or the feature that it belongs to."""
    return path.startswith(later_paths())


def description(all_config):
    """Groups, stages and parameters of some ranks, as text."""
    parallel = all_config.parallel_config
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tensor) * parallel.expert_model_parallel_size * stages
    size = parallel.world_size or 2 * lcm(tensor * stages * parallel.context_parallel_size, experts)
    model = describe_model(all_config)
    world = WorldLayout.from_description(model.parallel, size)
    ranks = range(0, size, max(1, size // 4))
    return (str(world.all_groups()), model.stages.table(), str([describe_parameters(model, world, rank) for rank in ranks]))


DESCRIBED = [
    row
    for row in ROWS
    if row.seen in ("parameters", "layout")
    and row.status == "works"
    and row.path not in SEEN_ELSEWHERE
    and (not comes_later(row.path) or row.path.startswith("parallel_config.pipeline"))
]


def _describes_the_same(row):
    value, beside = sample(row)
    plain = init_configs_from_dict(with_settings(beside))
    changed = init_configs_from_dict(with_settings(beside, {row.path: value}))
    return "changes nothing" if description(plain) == description(changed) else None


def test_every_row_about_parameters_or_layout_changes_the_description():
    assert len(DESCRIBED) >= 40
    assert not offenders(_describes_the_same, DESCRIBED)


def test_no_row_that_works_is_unread():
    words = set()
    for path in glob.glob(os.path.join(PACKAGE, "**", "*.py"), recursive=True):
        parts = path[len(PACKAGE) :].split(os.sep)
        # checkpoints of other programs name settings that nothing here reads
        if not {"config", "megatron", "families", "converter"} & {*parts}:
            with open(path, encoding="utf-8") as file:
                words |= set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", file.read()))
    unread = {
        row.path
        for row in ROWS
        if row.status == "works" and not comes_later(row.path) and not {row.path.rpartition(".")[2], *row.all_names} & words
    }
    assert unread == DECIDED_HERE


def test_what_is_not_available_yet_is_refused_at_start_only():
    require_available(init_configs_from_dict(BASE))
    later = [path for path, info in all_fields() if option_of(info).later]
    assert later
    for path in later:
        row = next(row for row in ROWS if row.path == path or row.path.startswith(path + "."))
        value, beside = sample(row)
        try:
            all_config = init_configs_from_dict(with_settings(beside, {row.path: value}))
        except ConfigError:
            pytest.fail(f"{path} is refused by the check already")
        with pytest.raises(ConfigError, match=path):
            require_available(all_config)


def test_flags_of_a_feature_are_refused_only_while_it_does_not_run():
    """Its own switch is refused, too; the flags of one that was built since are ignored, with their reason."""
    refused = " ".join(row.reason for row in ROWS if row.status == "refused")
    assert all(row.feature in refused for row in ROWS if row.feature)
    words = ["--use-cp-send-recv-overlap", "--moe-enable-deepep"]
    assert not settings_of_arguments(argument_parser().parse_args(words)).later


def test_a_start_needs_a_model():
    with pytest.raises(ConfigError, match="model_config"):
        require_available(init_configs_from_dict({"training_config": {"seed": 1}}))


# what a setting needs, in words -> a stage of post-training that does not have it
OF_STAGES = {
    "dpo_loss_type sigmoid": {"training_config.stage": "dpo", "training_config.dpo_loss_type": "hinge"},
    "simpo_loss_type sigmoid": {"training_config.stage": "simpo", "training_config.simpo_loss_type": "ipo"},
    "grpo_beta above 0": {"training_config.stage": "grpo", "training_config.grpo_beta": 0.0},
    "kl_coef above 0": {"training_config.stage": "trl_ppo", "training_config.kl_coef": 0.0},
    "several steps": {"training_config.stage": "trl_ppo"},
    "a loss of tokens": {"training_config.stage": "prm"},
    "conversations:": {"training_config.stage": "prm"},
    "packed together": {"training_config.stage": "dpo"},
    "a corpus of documents": {"training_config.stage": "sft"},
}


def test_what_needs_another_setting_says_so():
    """Every entry: its paths exist, are told when the setting beside them is off, and are silent at their defaults."""
    assert not init_configs_from_dict(BASE).notices
    rows = {row.path: row for row in ROWS}
    off = {
        "training_config.save_enabled": False,
        "dataset_config.tokenizer_type": "Llama2Tokenizer",
        "model_config.rope_scaling.type": "linear",
        "lora_config.use_lora": False,
    }
    for paths, need, _ in NEEDS:
        for path in paths:
            if rows[path].status != "works":
                continue
            value, others = sample(rows[path])
            beside = {key: item for key, item in off.items() if key.split(".")[1] in need}
            beside |= {"optimizer_config.optimizer_type": "sgd"} if "Adam" in need else {}
            beside |= others if "loss_scale" in path else {}  # all of them or none
            beside |= {"model_config.position_embedding_type": "rope"} if "rope_scaling" in path else {}
            beside |= {"moe_config.moe_router_score_function": "sigmoid"} if "softmax" in path else {}
            beside |= {"parallel_config.context_parallel_algo": "hybrid_cp_algo"} if "ulysses" in path else {}
            beside |= next((settings for words, settings in OF_STAGES.items() if words in need), {})
            all_config = init_configs_from_dict(with_settings(beside, {path: value}))
            told = [text for text in all_config.notices if path in text and need in text]
            assert len(told) == 1, (path, all_config.notices)
    assert any("parallel_config.ulysses_degree_in_cp" in paths for paths, _, _ in NEEDS)  # idle without ranks to cut over


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True, "norm_topk_prob": True}, "the router does not learn"),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "norm_topk_prob": True},
            "moe_router_pre_softmax: no effect without moe_router_score_function softmax",
        ),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "norm_topk_prob": True},
            "norm_topk_prob: no effect",
        ),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "moe_router_load_balancing_type: no effect without moe_aux_loss"),
        ({"moe_router_group_score_topk": 1}, "moe_router_group_score_topk: no effect without moe_router_num_groups"),
    ],
)
def test_router_settings_that_do_nothing_are_told(settings, words):
    all_config = init_configs_from_dict({**BASE, "moe_config": {"num_experts": 4, **settings}})
    assert len([text for text in all_config.notices if words in text]) == 1, all_config.notices
