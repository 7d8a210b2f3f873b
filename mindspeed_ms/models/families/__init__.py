"""Families of models: each module describes one, its names of tensors and settings, and registers it when imported.

A new family is one new module here; it needs no entry anywhere. See docs/new-model-family.md.
"""

import importlib
import pkgutil

from mindspeed_ms.models.families.family import Family, Weight, families, family_of, register_family

__all__ = ["Family", "Weight", "families", "family_of", "register_family"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
