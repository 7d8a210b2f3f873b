"""Texts of a configuration: yaml that reads back, all settings, and a page of the user's settings with their origin."""

import yaml

from mindspeed_ms.config.errors import WarningNotice, shorten
from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import default_of, option_of
from mindspeed_ms.config.yaml_loader import plain_value


class _Dumper(yaml.SafeDumper):
    """Yaml dumper that quotes every string which would read back as something else."""


def _string(dumper, text):
    quoted = plain_value(text) != text or "${" in text or text != text.strip() or "\n" in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted and "\n" not in text else None)


def _list(dumper, items):
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _string)
_Dumper.add_representer(list, _list)


def dump_yaml(data):
    """Yaml text of plain data: one setting per line, lists on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000)


def written_settings(section):
    """Settings of a section (dict) that must be written to read it back: given ones and those that are no default.

    Args:
        section (Section): one section.
    """
    result = {}
    for name, info in type(section).own_fields().items():
        value = getattr(section, name)
        if name not in section.model_fields_set and (option_of(info).derived or value == default_of(info)):
            continue
        result[name] = written_settings(value) if isinstance(value, Section) else value
    return result


def to_yaml(all_config, path=None):
    """Yaml text of an AllConfig that reads back to an equal one.

    Args:
        all_config (AllConfig): what to write.
        path (str | None): file to write too.

    Returns:
        str
    """
    data = {name: written_settings(section) for name, section in all_config.sections().items()}
    data = {name: settings for name, settings in data.items() if settings}
    if all_config.general_config:
        data["general_config"] = dict(all_config.general_config)
    text = dump_yaml(data) if data else "{}\n"
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text


def settings_text(all_config):
    """Text of every setting with its value, section by section."""
    return dump_yaml(all_config.to_dict())


def page(all_config):
    """One page of text: each setting of the user with value and origin, then the notices.

    Args:
        all_config (AllConfig): read by one of the readers (otherwise: values given to the constructors).

    Returns:
        str
    """
    origins = dict(all_config.provenance)
    if not origins:
        origins = {
            f"{name}.{field}": "program"
            for name, section in all_config.sections().items()
            for field in type(section).own_fields()
            if field in section.model_fields_set
        }
    lines = []
    for name, section in all_config.sections().items():
        rows = [(path[len(name) + 1 :], origin) for path, origin in origins.items() if path.startswith(name + ".")]
        if not rows:
            continue
        lines.append(name)
        lines += [f"  {field:<42} {shorten(_value(section, field), 60):<30} {origin}" for field, origin in rows]
    count = sum(len(type(section).own_fields()) for section in all_config.sections().values())
    set_count = len({".".join(path.split(".")[:2]) for path in origins})
    lines.append(
        f"{count - set_count} other settings have the guide's default; "
        "`python -m mindspeed_ms.config explain KEY` tells about any of them"
    )
    lines += [f"{'warning' if isinstance(notice, WarningNotice) else 'note'}: {notice}" for notice in all_config.notices]
    return "\n".join(lines)


def _value(section, field):
    for name in field.split("."):
        section = getattr(section, name) if section is not None else None
    return section
