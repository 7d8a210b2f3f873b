"""Field of a section, the only place that declares an option: default, help, Megatron's names and flags, status."""

from dataclasses import dataclass

from pydantic import Field

# forms of a flag on the command line
VALUE, LIST, ON, OFF, SWITCH = "value", "list", "on", "off", "switch"
SAME = "same as the guide"
YAML_ONLY = "yaml only"
# what a checkpoint's setting means for a run that loads it
COMPARED, TAKEN = "compared", "taken"


@dataclass(frozen=True)
class Alias:
    """A further option that sets the same path; it has a name in the Namespace and a flag, but no place in yaml.

    Args:
        name: Megatron's name in the Namespace.
        english, chinese: one line of help.
        value: the path is set to it if the flag is given.
        convert: takes the place of `value`, see `Option`.
        form, megatron: see `Option`.
        seen: what one observes; "" if it is the field's.
    """

    name: str
    english: str
    chinese: str
    value: object = None
    convert: object = None
    form: str = ON
    megatron: object = None
    seen: str = ""


@dataclass(frozen=True)
class Option:
    """Facts of a field beside its type, default and English help; pydantic keeps them as `json_schema_extra`.

    Args:
        chinese: one line of help.
        seen: what one observes when the value changes: parameters, layout, output, operators, optimizer, lr, log, file,
            data, memory or error.
        derived: how a None is filled in when the section is built; "" if it is not.
        yaml_names: further keys in yaml.
        name: Megatron's name in the Namespace, "" if it is the field's own. YAML_ONLY: there is no flag, as for every field
            of a nested section that has no name.
        names: further names in a Namespace.
        form: VALUE (one value), LIST (several), ON / OFF (a flag without value that sets True / False), SWITCH (with an
            optional True or False); "" is ON for a switch and VALUE for the rest.
        flag: option string, "" for `--name-with-dashes` (OFF: `--no-name-with-dashes`).
        also: further option strings; their names count in a Namespace too.
        off: option string that sets an ON switch to False, "" for `--no-name-with-dashes`.
        megatron: Megatron's default; SAME if it is the guide's. None means "not given".
        convert: `convert(value, view) -> {path: value}` of `mindspeed_ms.config.conversions`; None copies the value.
        needs: Megatron's default has no effect unless one of these was given ("name", or "name=value").
        ignored, refused: why a value other than the default has no effect, or is an error: (English, Chinese).
        note: what differs from Megatron: (English, Chinese).
        aliases: further options that set this path.
        checkpoint: COMPARED if the same weights compute something else under another value: a checkpoint with another value
            is of another model. TAKEN if not so, but `use_checkpoint_args` takes it from the checkpoint, as it does those.
        later: name of a feature that is checked, but does not run yet; a start refuses values other than the default.
        later_parts: beginnings of the paths that belong to that feature.
    """

    chinese: str
    seen: str = ""
    derived: str = ""
    yaml_names: tuple = ()
    name: str = ""
    names: tuple = ()
    form: str = ""
    flag: str = ""
    also: tuple = ()
    off: str = ""
    megatron: object = SAME
    convert: object = None
    needs: tuple = ()
    ignored: tuple = ()
    refused: tuple = ()
    note: tuple = ()
    aliases: tuple[Alias, ...] = ()
    checkpoint: str = ""
    later: str = ""
    later_parts: tuple = ()

    def __call__(self, schema):
        """Pydantic's hook for the JSON schema: write the description in both languages."""
        schema["description"] = f"{schema['description']} {self.chinese}"


def field(default, english, chinese, seen="", **facts):
    """A field of a section.

    Args:
        default: the guide's default (nested yaml and constructors); `...` if there is none. Lists and
            dicts are copied, a class is called.
        english (str): one line of help.
        chinese (str): the same in Chinese.
        seen (str): what one observes when the value changes, see `Option`; a nested section has none of its own.
        facts: see `Option`.
    """
    option = Option(chinese, seen, **facts)
    if isinstance(default, (list, dict)):
        return Field(default_factory=default.copy, description=english, json_schema_extra=option)
    if isinstance(default, type):
        return Field(default_factory=default, description=english, json_schema_extra=option)
    return Field(default, description=english, json_schema_extra=option)


def option_of(info):
    """The Option of a pydantic field; None for a link to another section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, Option) else None


def default_of(info):
    """The default of a pydantic field, Ellipsis if it is required."""
    return ... if info.is_required() else info.get_default(call_default_factory=True)


def link(section):
    """A reference to another section: shared by identity, never written out."""
    return Field(default_factory=section, exclude=True, repr=False, json_schema_extra={"link": True})


def is_link(info):
    """True if the pydantic field `info` was made by `link`."""
    return isinstance(info.json_schema_extra, dict) and bool(info.json_schema_extra.get("link"))
