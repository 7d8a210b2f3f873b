"""Adapters as plain arrays: read from a checkpoint, merged into weights on their way out of a reader.

They are small, so every reader holds them whole.
"""

import copy
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.config.model_description import describe_adapters
from mindspeed_ms.config.same_model import differences
from mindspeed_ms.config.sections.lora import LoraConfig
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, whole_slice
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.layout.describers.lora import is_lora
from mindspeed_ms.layout.sharding import ParameterSharding

SETTINGS = ("lora_rank", "lora_alpha", "lora_dropout", "target_cells", "use_rslora")


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of a model.

    Attributes:
        source (str): where they are from, for messages.
        settings (dict): of `lora_config`.
        tensors (dict[str, numpy.ndarray]): `CELL.lora_a [rank, in]`, `CELL.lora_b [out, rank]`, float32.
        args (dict): configuration of the run that trained them, by sections; empty if unknown.
        base (str): the base that they were trained on, as its folder was named; "" if unknown.
    """

    source: str
    settings: dict
    tensors: dict
    args: dict
    base: str = ""

    @property
    def cells(self):
        """Global names of the cells with an adapter: list[str]."""
        return [key.rpartition(".")[0] for key in self.tensors if key.endswith(".lora_a")]

    def scale(self, cell):
        """Factor of the product of one cell."""
        fitting = [adapter for adapter in describe_adapters(lora_config(self.settings)) if adapter.fits(cell)]
        return fitting[0].scale

    def delta(self, cell):
        """What the adapter adds to the weight of a cell: float32 [out, in]."""
        return self.scale(cell) * (self.tensors[f"{cell}.lora_b"] @ self.tensors[f"{cell}.lora_a"])

    def check_base(self, shapes, args, place):
        """Refuse a base that the adapters are not of.

        Args:
            shapes (dict[str, tuple]): of its weights, by key.
            args (dict): its configuration, by sections; compared where both are known.
            place (str): its folder, for the message.

        Raises:
            CheckpointError: naming what differs.
        """
        found = [f"{path} is {now!r} there and {before!r} in the adapter's" for path, before, now in self._differences(args)]
        for cell in self.cells:
            shape = self.tensors[f"{cell}.lora_b"].shape[0], self.tensors[f"{cell}.lora_a"].shape[1]
            stored = shapes.get(f"{cell}.weight")
            if stored is None:
                found.append(f"it has no {cell}")
            elif tuple(stored) != shape:
                found.append(f"{cell}.weight is {list(stored)} there, and the adapter is for {list(shape)}")
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(
                f"{self.source} holds adapters of another base than {place}: {'; '.join(found[:3])}{more}. Give the base that "
                f"they were trained on{f' ({self.base})' if self.base else ''}."
            )

    def _differences(self, args):
        own = {name: values for name, values in self.args.items() if name in ("model_config", "moe_config")}
        return differences(own, args, with_shapes=True) if own and args else []


def lora_config(settings):
    """LoraConfig of settings of adapters."""
    return LoraConfig(use_lora=True, **settings)


def has_adapters(manifest):
    """Whether a checkpoint holds adapters."""
    return any(is_lora(key) for key in weights_of(manifest))


def has_base(manifest):
    """Whether a checkpoint holds weights beside adapters."""
    return not all(is_lora(key) for key in weights_of(manifest))


def weights_of(manifest):
    """Keys of the weights of a checkpoint, without the optimizer's state: list[str]."""
    return [key for key in manifest.tensors if not key.startswith(OPTIMIZER_PREFIX)]


def adapters_of_checkpoint(place, manifest):
    """Adapters in an opened checkpoint. CheckpointError without any."""
    keys = [key for key in weights_of(manifest) if is_lora(key)]
    saved = manifest.args.get("lora_config") or {}
    if not keys or not saved.get("use_lora"):
        raise CheckpointError(
            f"{place} holds no adapters: name the folder of a run with use_lora, or of PEFT (adapter_config.json)."
        )
    with CheckpointReader(place, manifest) as reader:
        tensors = {key: _float32(reader.read_whole(key), manifest.tensors[key].dtype) for key in keys}
    settings = {name: saved[name] for name in SETTINGS if name in saved}
    return Adapters(place, settings, tensors, manifest.args, (manifest.states.get("base") or {}).get("path", ""))


class MergedReader(CheckpointReader):
    """Reader of a base with adapters merged into its weights (`sign` 1), or taken out of them (-1).

    Products and sums are float32, rounded once to the dtype of the weight.

    Args:
        folder (str), manifest (Manifest): of the base.
        adapters (Adapters): of this base.
        sign (int): see above.
    """

    def __init__(self, folder, manifest, adapters, sign=1):
        own = copy.copy(manifest)  # the state of an optimizer, with its masters, is of the other weights
        own.tensors = {key: manifest.tensors[key] for key in weights_of(manifest)}
        own.states = {**manifest.states, "optimizer": None, "opt_param_scheduler": None}
        super().__init__(folder, own)
        self.adapters, self.sign = adapters, sign
        adapters.check_base({key: stored.shape for key, stored in manifest.tensors.items()}, manifest.args, self.folder)
        self._cells = {f"{cell}.weight": cell for cell in adapters.cells}

    def read(self, key, wanted, out, on_part=None):
        """See `CheckpointReader`; a weight with an adapter is read whole."""
        if key not in self._cells:
            return super().read(key, wanted, out, on_part)
        stored = self.tensor(key)
        whole = np.empty(stored.shape, numpy_dtype(stored.dtype))
        missing = super().read(key, whole_slice(ParameterSharding.replicated(stored.shape)), whole.reshape(-1))
        values = merged(whole, stored.dtype, self.sign * self.adapters.delta(self._cells[key]))
        out[...] = wanted.split(values).view(out.dtype)
        return missing


def without_adapters(manifest):
    """The Manifest without adapters and the state of their optimizer."""
    if not has_adapters(manifest):
        return manifest
    kept = copy.copy(manifest)
    kept.tensors = {key: manifest.tensors[key] for key in weights_of(manifest) if not is_lora(key)}
    kept.args = {**manifest.args, "lora_config": {}}
    return kept


def merged(values, dtype, delta):
    """`values + delta` in the stored form of `dtype`; bfloat16 as uint16 bits, rounded to nearest even."""
    total = _float32(values, dtype) + delta
    if dtype != "bfloat16":
        return total.astype(values.dtype)
    bits = np.ascontiguousarray(total, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float32(values, dtype):
    if dtype != "bfloat16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)
