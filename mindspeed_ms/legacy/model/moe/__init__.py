"""Cells of a mixture of experts."""

from mindspeed_ms.legacy.model.moe.experts import GroupedMLP, SequentialMLP
from mindspeed_ms.legacy.model.moe.moe_layer import MoELayer
from mindspeed_ms.legacy.model.moe.router import TopKRouter
from mindspeed_ms.legacy.model.moe.shared_experts import SharedExpertMLP

__all__ = ["GroupedMLP", "MoELayer", "SequentialMLP", "SharedExpertMLP", "TopKRouter"]
