"""Upstream's import path of LossWithMask, the masked mean of the token losses."""

from mindspeed_ms.legacy.model.loss_func import LossWithMask

__all__ = ["LossWithMask"]
