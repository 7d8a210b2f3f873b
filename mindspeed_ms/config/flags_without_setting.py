"""Megatron's and MindSpeed's flags that set nothing here, ignored or refused with reasons: `flags_without_setting.yaml`.

Options that are fields and refused say so in `sections/` (`refused=`, or `later=` for features to come).
"""

import os

import yaml

from mindspeed_ms.config.row import IGNORED, REFUSED, Row, flag_of
from mindspeed_ms.config.sections.field import LIST, OFF, ON, VALUE

_FILE = os.path.splitext(__file__)[0] + ".yaml"
_SEEN = {IGNORED: "log", REFUSED: "error"}


def read_flags(path=_FILE):
    """Rows of `flags_without_setting.yaml`, and its names that are no options.

    Returns:
        (tuple[Row], frozenset[str])

    Raises:
        ValueError: for a group or an entry with other keys than the file's head describes.
    """
    with open(path, encoding="utf-8") as file:
        data = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    _expect(path, "the file", data, {IGNORED, REFUSED, "runtime"})
    rows = []
    for status in (IGNORED, REFUSED):
        for group in data[status]:
            _expect(path, f"a group of {status}", group, {"reason", "reason_zh", "names"}, {"feature"})
            rows += [_row(path, name, entry, status, group) for name, entry in group["names"].items()]
    return tuple(rows), frozenset(data["runtime"])


def _row(path, name, entry, status, group):
    details = entry if isinstance(entry, dict) else {"default": entry}
    _expect(path, name, details, {"default"}, {"flag", "names"})
    default = details["default"]
    form = ON if default is False else OFF if default is True else LIST if isinstance(default, list) else VALUE
    flag = details.get("flag") or ("--no-" + flag_of(name)[2:] if form == OFF else flag_of(name))
    return Row(
        name,
        flags=() if form == OFF else (flag,),
        off_flags=(flag,) if form == OFF else (),
        form=form,
        names=tuple(details.get("names", ())),
        megatron=default,
        status=status,
        reason=group["reason"],
        reason_zh=group["reason_zh"],
        feature=group.get("feature", ""),
        seen=_SEEN[status],
        help_en=group["reason"],
        help_zh=group["reason_zh"],
    )


def _expect(path, what, mapping, keys, optional=frozenset()):
    if not isinstance(mapping, dict) or not keys <= set(mapping) <= keys | optional:
        raise ValueError(f"{path}: {what} expects the keys {', '.join(sorted(keys | optional))}, found {mapping!r}")
