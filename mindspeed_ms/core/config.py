"""Upstream's import path of the configuration; everything lives in ``mindspeed_ms.config``."""

from mindspeed_ms.config import *  # noqa: F401,F403
from mindspeed_ms.config import __all__  # noqa: F401
