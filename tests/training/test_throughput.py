"""TFLOP/s in reports: the operations of a token, against products counted one by one."""

import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.layout.flops import flops_per_token
from tests.training import tiny
from tests.training.test_pretrain import BATCHES, read_metrics, run_pretrain

ATTENTION = 32 * 3 * 32 + 32 * 32 + 2 * 32 * 16 / 2
GROUPED = 32 * (32 + 2 * 16) + 32 * 32 + 2 * 32 * 16 / 2
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}


def flops(moe=None, parallel=None, **fields):
    sizes = {"vocab_size": 100, "num_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "ffn_hidden_size": 48}
    sections = {"model_config": {**sizes, "seq_length": 16, **fields}, "parallel_config": parallel or {}}
    return flops_per_token(describe_model(init_configs_from_dict({**sections, "moe_config": moe or {}})))


@pytest.mark.parametrize(
    "settings, layers, attention, mlp",
    [
        ({}, 3, ATTENTION, 3 * 2 * 32 * 48),
        ({"group_query_attention": True, "num_query_groups": 2, "hidden_act": "swiglu"}, 3, GROUPED, 3 * 3 * 32 * 48),
        ({"parallel": {"noop_layers": [1]}}, 2, ATTENTION, 2 * 2 * 32 * 48),
        ({"moe": EXPERTS}, 3, ATTENTION, 3 * 2 * 32 * 20 * 2),
        ({"moe": {**EXPERTS, "moe_layer_freq": [2]}}, 3, ATTENTION, 2 * 32 * (2 * 20 * 2 + 48)),
        ({"moe": {**EXPERTS, "n_shared_experts": 2}}, 3, ATTENTION, 3 * 2 * 32 * 20 * (2 + 2)),
    ],
    ids=["dense", "gated", "noop", "experts", "every other", "shared"],
)
def test_operations_of_a_token(settings, layers, attention, mlp):
    assert flops(**settings) == 6 * (layers * attention + mlp + 32 * 100)


def test_throughput_is_reported(world, tmp_path):
    world(1)(run_pretrain, tmp_path, BATCHES, {"training": {"log_throughput": True}})
    operations = flops_per_token(describe_model(tiny.make_config(tmp_path)))
    for line in read_metrics(tmp_path):
        assert abs(line["tflops_per_device"] - line["tokens_per_second"] * operations / 1e12) < 1e-9
