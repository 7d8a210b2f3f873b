"""Row: one option as argparse, the readers and the reference pages see it; derived from the fields of a section."""

from dataclasses import dataclass

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.base import choices, expectation, nested_section
from mindspeed_ms.config.sections.field import OFF, ON, SAME, SWITCH, VALUE, YAML_ONLY, Option, default_of, option_of
from mindspeed_ms.config.values import Bool

WORKS, IGNORED, REFUSED = "works", "ignored", "refused"


@dataclass(frozen=True)
class Row:
    """One option of the argument table.

    Args:
        name: Megatron's name in the Namespace.
        path: config path that it sets, "" if none.
        info: pydantic FieldInfo at `path`, None if there is none.
        flags: option strings; the first one is the usual one.
        off_flags: option strings that set it to False.
        names: further names in a Namespace.
        is_alias: True if another row has the same path and copies its value there.
        status: WORKS, IGNORED or REFUSED; the last two concern values other than the default.
        reason, reason_zh: why it is ignored or refused, or what differs from Megatron.
        feature: the feature that does not run yet and that an option without a path belongs to, or "".
        help_en, help_zh: one line of help.
        form, megatron, convert, needs, seen: see `sections.field.Option`.
    """

    name: str
    path: str = ""
    info: object = None
    flags: tuple = ()
    off_flags: tuple = ()
    form: str = VALUE
    names: tuple = ()
    is_alias: bool = False
    megatron: object = SAME
    convert: object = None
    status: str = WORKS
    reason: str = ""
    reason_zh: str = ""
    feature: str = ""
    needs: tuple = ()
    seen: str = ""
    help_en: str = ""
    help_zh: str = ""

    @property
    def section(self):
        """Name of the section, "" without a path."""
        return self.path.partition(".")[0]

    @property
    def expects(self):
        """Accepted values, in words."""
        if self.info is not None and self.convert is None:
            return expectation(self.info)
        if self.form in (ON, OFF, SWITCH):
            return "a switch: True or False (also yes/no, on/off)"
        return expectation(self.info) if self.info is not None else "a value"

    @property
    def choices(self):
        """Allowed strings; () if the option is no choice."""
        return choices(self.info) if self.info is not None and self.convert is None else ()

    @property
    def guide_default(self):
        """The guide's default; Ellipsis if there is none."""
        return default_of(self.info) if self.info is not None else None

    @property
    def megatron_default(self):
        """Megatron's default; the guide's if it is the same."""
        return self.guide_default if self.megatron is SAME else self.megatron

    @property
    def all_names(self):
        """Every name of the option in a Namespace."""
        return (self.name, *self.names)


def rows_of(section, path=None):
    """Rows of a section's fields in order, each followed by the rows of its aliases.

    Args:
        section (type): class of the section.
        path (str | None): where the section is, if it is nested in another one.
    """
    for name, info in section.own_fields().items():
        place, nested = f"{path or section.config_name}.{name}", nested_section(info)
        if nested is not None:
            yield from rows_of(nested, place)
            continue
        option = option_of(info)
        yield _field_row(place, info, option, option.name or (name if path is None else YAML_ONLY))
        yield from (_alias_row(place, info, option, alias) for alias in option.aliases)


def _field_row(path, info, option, name):
    has_flag = name != YAML_ONLY
    form = (option.form or (ON if is_switch(info) else VALUE)) if has_flag else VALUE
    flags, off_flags = _flags(name, form, option) if has_flag else ((), ())
    others = [*(flag[2:].replace("-", "_") for flag in option.also if form != OFF), *option.names]
    return Row(
        name if has_flag else path,
        path,
        info,
        flags,
        off_flags,
        form,
        tuple(dict.fromkeys(other for other in others if other != name)),
        megatron=option.megatron,
        convert=option.convert,
        status=IGNORED if option.ignored else REFUSED if option.refused else WORKS,
        reason=_text(option, 0),
        reason_zh=_text(option, 1),
        needs=option.needs,
        seen=option.seen,
        help_en=info.description,
        help_zh=option.chinese,
    )


def _text(option, language):
    return (option.ignored or option.refused or option.note or ("", ""))[language]


def _flags(name, form, option):
    """(option strings that set a value or True, those that set False)."""
    usual, no = flag_of(name), "--no-" + flag_of(name)[2:]
    if form == OFF:
        return (usual,), (option.flag or no, *option.also)
    off_flags = (option.off or no,) if form == ON and not name.startswith("no_") else ()
    return (option.flag or usual, *option.also), off_flags


def _alias_row(path, info, option, alias):
    return Row(
        alias.name,
        path,
        info,
        *_flags(alias.name, alias.form, Option("")),
        alias.form,
        is_alias=True,
        megatron=alias.megatron,
        convert=alias.convert or conversions.sets(path, alias.value),
        seen=alias.seen or option.seen,
        help_en=alias.english,
        help_zh=alias.chinese,
    )


def flag_of(name):
    """Flag `--name-with-dashes` of a name."""
    return "--" + name.replace("_", "-")


def is_switch(info):
    """True if the field takes only True and False."""
    return info is not None and info.annotation is bool and any(mark is Bool.__metadata__[-1] for mark in info.metadata)
