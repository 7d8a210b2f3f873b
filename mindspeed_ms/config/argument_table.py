"""The argument table: every option by Megatron's name, with its place in the configuration.

Argparse, the reference pages, ``explain`` and the readers all come from these rows.
"""

from functools import lru_cache

from mindspeed_ms.config.rows import checkpoint, data, experts_lora, grouped, model, optimizer, parallel, training
from mindspeed_ms.config.rows.row import IGNORED, LIST, OFF, ON, REFUSED, SAME, SWITCH, VALUE, WORKS, Row
from mindspeed_ms.config.schema import SECTIONS
from mindspeed_ms.config.sections.base import nested_section

__all__ = [
    "IGNORED",
    "LIST",
    "OFF",
    "ON",
    "REFUSED",
    "SAME",
    "SWITCH",
    "TABLE",
    "VALUE",
    "WORKS",
    "Row",
    "all_flags",
    "all_paths",
    "row_at",
    "row_of_flag",
    "row_of_name",
    "rows_with_path",
]

TABLE = (
    *model.ROWS,
    *training.ROWS,
    *checkpoint.ROWS,
    *data.ROWS,
    *optimizer.ROWS,
    *parallel.ROWS,
    *experts_lora.ROWS,
    *grouped.ROWS,
)
RUNTIME_NAMES = grouped.RUNTIME_NAMES


@lru_cache
def _by_name():
    return {name: row for row in reversed(TABLE) for name in row.all_names}


@lru_cache
def _by_flag():
    return {flag: row for row in reversed(TABLE) for flag in (*row.flags, *row.off_flags)}


@lru_cache
def _by_path():
    # the row that copies its value stands for the path, not one that converts
    result = {}
    for row in sorted(TABLE, key=lambda row: row.english != ""):
        if row.path:
            result.setdefault(row.path, row)
    return result


def row_of_name(name):
    """The Row with this Namespace name, or None."""
    return _by_name().get(name)


def row_of_flag(flag):
    """The Row with this option string, or None."""
    return _by_flag().get(flag)


def row_at(path):
    """The Row that stands for a config path, or None."""
    return _by_path().get(path)


def all_flags():
    """Every option string."""
    return list(_by_flag())


def rows_with_path():
    """One Row per config path."""
    return list(_by_path().values())


def all_paths():
    """Every config path: ``section.field``, and ``section.field.key`` for fields that are sections themselves."""
    for name, kind in SECTIONS.items():
        for field, info in kind.own_fields().items():
            nested = nested_section(info)
            if nested is None:
                yield f"{name}.{field}"
            else:
                yield from (f"{name}.{field}.{key}" for key in nested.own_fields())
