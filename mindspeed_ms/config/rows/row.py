"""What one row of the argument table is, and short ways to write rows."""

from dataclasses import dataclass
from functools import cache

from mindspeed_ms.config.schema import SECTIONS
from mindspeed_ms.config.sections.base import choices, expectation, nested_section
from mindspeed_ms.config.values import Bool

SAME = "same as the guide"
WORKS, IGNORED, REFUSED = "works", "ignored", "refused"
# forms of a flag on the command line
VALUE, LIST, ON, OFF, SWITCH = "value", "list", "on", "off", "switch"


@dataclass(frozen=True)
class Row:
    """One option.

    Args:
        name: Megatron's name in the Namespace.
        path: config path that it sets, "" if none.
        flags: option strings; the first one is the usual one.
        off_flags: option strings that set it to False.
        form: VALUE (one value), LIST (several), ON / OFF (a flag without value that sets True / False), SWITCH (with an
            optional True or False).
        names: further names in a Namespace.
        megatron: Megatron's default; SAME if it is the guide's. None stands for "not given".
        convert: ``convert(value, view) -> {path: value}``; None sets ``path`` to the value.
        status: WORKS, IGNORED or REFUSED; the last two concern values other than the default.
        reason, reason_zh: why it is ignored or refused, or what differs from Megatron.
        needs: Megatron's default is only taken over if one of these was given ("name", or "name=value"): else it has no
            effect.
        seen: what one observes when it changes.
        english, chinese: help, if there is no field to take it from.
    """

    name: str
    path: str = ""
    flags: tuple = ()
    off_flags: tuple = ()
    form: str = VALUE
    names: tuple = ()
    megatron: object = SAME
    convert: object = None
    status: str = WORKS
    reason: str = ""
    reason_zh: str = ""
    needs: tuple = ()
    seen: str = ""
    english: str = ""
    chinese: str = ""

    @property
    def section(self):
        """Name of the section, "" without a path."""
        return self.path.partition(".")[0]

    @property
    def info(self):
        """The pydantic FieldInfo that ``path`` leads to, or None."""
        return field_info(self.path) if self.path else None

    @property
    def help_en(self):
        """One line of help."""
        return self.english or (self.info.description if self.info is not None else self.reason)

    @property
    def help_zh(self):
        """One line of help in Chinese."""
        return self.chinese or (self.info.json_schema_extra["zh"] if self.info is not None else self.reason_zh)

    @property
    def expects(self):
        """What values it takes, in words."""
        if self.info is not None and self.convert is None:
            return expectation(self.info)
        if self.form in (ON, OFF, SWITCH):
            return "a switch: True or False (also yes/no, on/off)"
        return expectation(self.info) if self.info is not None else "a value"

    @property
    def choices(self):
        """Allowed strings, () if it is no choice."""
        return choices(self.info) if self.info is not None and self.convert is None else ()

    @property
    def guide_default(self):
        """The guide's default, Ellipsis if there is none."""
        if self.info is None:
            return None
        if self.info.is_required():
            return ...
        return self.info.get_default(call_default_factory=True)

    @property
    def megatron_default(self):
        """Megatron's default; the guide's if it is the same."""
        return self.guide_default if self.megatron is SAME else self.megatron

    @property
    def all_names(self):
        """Every name by which a Namespace may hold it."""
        return (self.name, *self.names)


@cache
def field_info(path):
    """The pydantic FieldInfo at ``section.field`` or ``section.field.key``; None if there is no such field."""
    section, *fields = path.split(".")
    kind, info = SECTIONS.get(section), None
    for name in fields:
        info = kind.own_fields().get(name) if kind is not None else None
        kind = nested_section(info) if info is not None else None
    return info


def flag_of(name):
    """``--name-with-dashes``."""
    return "--" + name.replace("_", "-")


def is_switch(info):
    """True if the field takes True and False only."""
    return info is not None and info.annotation is bool and any(mark is Bool.__metadata__[-1] for mark in info.metadata)


def row(name, path, form=None, flag=None, also=(), off=None, **details):
    """A Row with the usual flags: ``--name`` for a value, ``--name`` and ``--no-name`` for a Megatron switch.

    Args:
        form: guessed from the field if None.
        flag (str): the option string if it is not ``--name``.
        also (tuple[str]): further option strings; their names count in a Namespace too.
        off (str): the option string that sets False.
    """
    info = field_info(path) if path else None
    if path and info is None:
        raise KeyError(f"row {name}: no field at {path}")
    form = form or (ON if is_switch(info) else VALUE)
    flags = (flag or flag_of(name), *also)
    off_flags = ()
    if form == OFF:
        off_flags, flags = (flag or "--no-" + flag_of(name)[2:], *also), (flag_of(name),)
    elif form == ON and not name.startswith("no_"):
        off_flags = (off or "--no-" + flag_of(name)[2:],)
    names = tuple(dict.fromkeys(other[2:].replace("-", "_") for other in also if form != OFF))
    names = tuple(dict.fromkeys(other for other in (*names, *details.pop("names", ())) if other != name))
    return Row(name, path, flags, off_flags, form, names, **details)


def yaml_only(path, **details):
    """A Row without a flag: a second place of a setting that upstream's yaml has."""
    return Row(path, path, names=(), **details)


def ignored(reason, reason_zh):
    """Details of a row that has no effect here."""
    return {"status": IGNORED, "reason": reason, "reason_zh": reason_zh}


def refused(reason, reason_zh):
    """Details of a row that is an error unless it is left at its default."""
    return {"status": REFUSED, "reason": reason, "reason_zh": reason_zh}
