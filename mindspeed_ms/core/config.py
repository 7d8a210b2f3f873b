"""Upstream's import path of the configuration; everything lives in `mindspeed_ms.config`."""

from mindspeed_ms.config import *  # noqa: F403
