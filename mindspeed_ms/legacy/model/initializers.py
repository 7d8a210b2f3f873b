"""How the parameters of a model start: `layout`'s rules, looked up from the layers."""

from mindspeed_ms.layout.gpt_sizes import read_initializers
from mindspeed_ms.layout.stages import stages_from_config


def model_initializers(config):
    """`layout.gpt_sizes.GPTInitializers` of a TransformerConfig: `block`, `output`, `embedding`, `bias`."""
    return read_initializers(config, stages_from_config(config).num_layers)
