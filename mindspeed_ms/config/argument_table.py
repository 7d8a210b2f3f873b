"""The argument table: one row per option, with Megatron's name, flags and defaults and its place in the configuration.

Argparse, the reference pages, `explain` and the readers use these rows; the rows are derived from the sections' fields.
"""

from functools import cache

from mindspeed_ms.config.flags_without_setting import read_flags
from mindspeed_ms.config.row import rows_of
from mindspeed_ms.config.schema import SECTIONS

_FLAGS, RUNTIME_NAMES = read_flags()
# in the order of --help; an argument that lies further down wins over what another one implies
_SECTIONS = [SECTIONS[f"{name}_config"] for name in ("model", "training", "dataset", "optimizer", "parallel", "moe", "lora")]
TABLE = (*(row for section in _SECTIONS for row in rows_of(section)), *_FLAGS)


@cache
def _by_name():
    return {name: row for row in reversed(TABLE) for name in row.all_names}


@cache
def _by_flag():
    return {flag: row for row in reversed(TABLE) for flag in (*row.flags, *row.off_flags)}


@cache
def _by_path():
    return {row.path: row for row in TABLE if row.path and not row.is_alias}


def row_of_name(name):
    """Row with this Namespace name, or None."""
    return _by_name().get(name)


def row_of_flag(flag):
    """Row with this option string, or None."""
    return _by_flag().get(flag)


def row_at(path):
    """Row that copies its value to a config path, or None."""
    return _by_path().get(path)


def all_flags():
    """Option strings of all rows."""
    return list(_by_flag())


def rows_with_path():
    """Rows that have a config path, one per path."""
    return list(_by_path().values())
