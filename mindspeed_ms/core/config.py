"""Upstream's import path of the configuration, which lives in `mindspeed_ms.config`."""

from mindspeed_ms.config import *  # noqa: F403
from mindspeed_ms.config import __all__  # noqa: F401  (what the star brings is what this module offers)
