"""Mean loss over the tokens that count, under upstream's import path."""

from mindspeed_ms.legacy.model.loss_func import LossWithMask

__all__ = ["LossWithMask"]
