"""Describers of model parts: which parameters an embedding, a layer, an attention, an MLP, a head or an adapter holds.

Every module of this package registers its describers when it is imported; a new module needs no entry anywhere.
"""

import importlib
import pkgutil

from mindspeed_ms.layout.describers.registry import describer, kinds, register_describer

__all__ = ["describer", "kinds", "register_describer"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
