"""Describers: parameters of each model part (embedding, layer, attention, MLP, head, adapter).

Every module of this package registers its describers when it is imported; a new module needs no entry anywhere.
"""

import importlib
import pkgutil

from mindspeed_ms.layout.describers.registry import describer, kinds, register_describer

__all__ = ["describer", "kinds", "register_describer"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
