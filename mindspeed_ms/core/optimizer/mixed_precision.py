"""Half-precision parameters with float32 masters. Source: Megatron core, `Float16OptimizerWithFloat16Params`."""

from mindspeed_ms.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from mindspeed_ms.core.optimizer.optimizer import MegatronOptimizer


def get_grad_scaler(config):
    """The loss scale that the configuration asks for; None: bfloat16 without an explicit one needs none.

    Args:
        config (OptimizerConfig): read: fp16, loss_scale and the settings of the dynamic scale.
    """
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_factor,
        1.0 / config.loss_scale_factor,
        config.loss_scale_window,
        config.hysteresis,
    )


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """For fp16 or bf16 parameters: updates float32 masters and rounds them into the parameters after every step."""

    def __init__(self, config, model_chunks, **options):
        super().__init__(config, model_chunks, grad_scaler=get_grad_scaler(config), **options)
