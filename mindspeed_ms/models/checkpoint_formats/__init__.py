"""Foreign checkpoint formats: each module registers one (`core.dist_checkpointing.foreign`) when it is imported.

A new format is one new module here; it needs no entry anywhere. Training, the checkpoint tool and the converter then read it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
