"""Rule of config.json about quantised weights, which are read as what they stand for and written in full."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.rules import REMOVED

FIELD = "quantization_config"
BLOCK = (128, 128)
"""Rows and columns of FP8 weights with one scale, where config.json does not say it."""


@dataclass(frozen=True)
class Quantization:
    """`quantization_config` with the method `kind`, or none.

    Attributes:
        kind (str): "fp8": weights of 8 bits with a factor per block; "mxfp4": of 4 bits with an exponent for 32 of them.
    """

    kind: str
    paths: tuple = ()
    names = MappingProxyType({})
    fields = (FIELD,)
    is_always_written = True

    def read(self, config):
        given = config.get(FIELD)
        if given is None:
            return {}
        method = given.get("quant_method") if isinstance(given, dict) else given
        if method != self.kind:
            raise ValueError(f"{FIELD} has the quant_method {method!r}: expected {self.kind!r}, or no {FIELD}")
        if self.kind == "fp8":
            if given.get("fmt") not in (None, "e4m3"):
                raise ValueError(f"fmt of {FIELD} is {given['fmt']!r}: expected 'e4m3'")
            block_of(config)
        return {}

    def write(self, settings):
        del settings
        return {FIELD: REMOVED}


def block_of(config):
    """Rows and columns of an FP8 weight that share a scale.

    Raises:
        ValueError: something else than two numbers above 0.
    """
    block = (config.get(FIELD) or {}).get("weight_block_size")
    block = BLOCK if block is None else block
    if not isinstance(block, (list, tuple)) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise ValueError(f"weight_block_size of {FIELD} is {block!r}: expected two integers above 0")
    return tuple(block)
