"""Which layers have a sliding window: patterns over the layers with weights."""

import pytest

from tests.layout.test_experts import described


@pytest.mark.parametrize(
    "frequency, windows",
    [(None, [4, 4, 4, 4]), ([2], [4, None, 4, None]), ([3], [4, 4, None, 4]), ([0, 1, 1, 0], [None, 4, 4, None])],
)
def test_windows_of_layers(frequency, windows):
    model = described(moe={}, sliding_window=4, window_attn_skip_freq=frequency)
    assert [model.window_of(layer) for layer in range(4)] == windows
    assert [described(moe={}).window_of(layer) for layer in range(4)] == [None] * 4


def test_noop_layers_are_not_counted():
    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.config.model_description import describe_model

    sizes = {"vocab_size": 64, "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32}
    windows = {"seq_length": 16, "sliding_window": 4, "window_attn_skip_freq": [0, 1, 1]}
    config = {"model_config": {**sizes, **windows}, "parallel_config": {"noop_layers": [1]}}
    model = describe_model(init_configs_from_dict(config))
    assert [model.window_of(layer) for layer in range(3)] == [None, 4, 4]
