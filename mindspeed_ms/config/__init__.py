"""The configuration: sections of options, read from Megatron arguments, nested yaml or the 38BV3 yaml trio, and checked.

Imports no MindSpore.
"""

from mindspeed_ms.config.arguments import argument_parser
from mindspeed_ms.config.availability import require_available
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.printing import page
from mindspeed_ms.config.readers import init_configs_from_args, init_configs_from_dict, init_configs_from_yaml
from mindspeed_ms.config.resolve import fit_to_world
from mindspeed_ms.config.schema import (
    AllConfig,
    DatasetConfig,
    GeneralConfig,
    LoraConfig,
    ModelParallelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainingConfig,
    TransformerConfig,
)
from mindspeed_ms.config.sections.attention import FlashAttentionConfig
from mindspeed_ms.config.sections.position import RopeScalingConfig
from mindspeed_ms.config.spelled import spelled
from mindspeed_ms.config.start import require_pretraining, require_startable
