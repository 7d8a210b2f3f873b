"""TFLOP/s in reports: the operations of a token, against products counted one by one."""

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.training.metrics import model_flops_per_token
from tests.training import tiny
from tests.training.test_pretrain import BATCHES, read_metrics, run_pretrain


def sizes(**fields):
    return init_configs_from_dict(
        {
            "model_config": {
                "vocab_size": 100,
                "num_layers": 3,
                "num_attention_heads": 4,
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "seq_length": 16,
                **fields,
            }
        }
    ).model_config


def test_operations_of_a_token():
    attention = 32 * 3 * 32 + 32 * 32 + 2 * 32 * 16 / 2
    assert model_flops_per_token(sizes()) == 6 * (3 * (attention + 2 * 32 * 48) + 32 * 100)
    grouped = 32 * (32 + 2 * 16) + 32 * 32 + 2 * 32 * 16 / 2
    assert model_flops_per_token(sizes(group_query_attention=True, num_query_groups=2, hidden_act="swiglu")) == 6 * (
        3 * (grouped + 3 * 32 * 48) + 32 * 100
    )


def test_throughput_is_reported(world, tmp_path):
    world(1)(run_pretrain, tmp_path, BATCHES, {"training": {"log_throughput": True}})
    flops = model_flops_per_token(tiny.make_config(tmp_path).model_config)
    for line in read_metrics(tmp_path):
        assert abs(line["tflops_per_device"] - line["tokens_per_second"] * flops / 1e12) < 1e-9
