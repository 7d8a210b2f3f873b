"""Look at checkpoints, compare and rewrite them, without a device and without MindSpore.

python -m mindspeed_ms.tools.checkpoint inspect|verify|diff|reshard|merge PATH ...
"""
