"""Checkpoint tool: inspect, verify, compare, reshard and merge checkpoints, without a device and without MindSpore.

python -m mindspeed_ms.tools.checkpoint inspect|verify|diff|reshard|merge PATH ...
"""
