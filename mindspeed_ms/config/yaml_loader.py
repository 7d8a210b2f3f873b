"""Yaml loader: 1e-5 is a number, duplicate keys are errors, ${NAME} is an environment variable.

Every value keeps its file and line.
"""

import os
import re
from dataclasses import dataclass, field

import yaml

from mindspeed_ms.config.errors import ConfigError, Problem

_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_HEX = re.compile(r"[-+]?0x[0-9a-fA-F_]+\Z")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_NULL = ("", "~", "null", "none")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class Document:
    """One yaml file: `data` as plain dicts, `places` from key path (tuple) to "file:line"."""

    name: str
    data: dict
    places: dict = field(default_factory=dict)


def load_yaml(path):
    """Read one yaml file.

    Args:
        path (str): file name ending in .yaml or .yml.

    Returns:
        Document.

    Raises:
        ConfigError: for a wrong name, broken yaml, duplicate keys, unset environment variables, a top
            level that is no mapping.
        FileNotFoundError: if there is no such file.
    """
    path = os.fspath(path) if hasattr(path, "__fspath__") else path
    if not isinstance(path, str):
        raise ConfigError(Problem("file_path", "expects the name of a yaml file as a string", path))
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(Problem("file_path", "expects a yaml file, with a name that ends in .yaml or .yml", path))
    if os.path.isdir(path):
        raise ConfigError(Problem("file_path", "is a folder; name the yaml files in it", path))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"configuration file {path!r} does not exist (looked in {os.getcwd()})")
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise ConfigError(Problem("", f"is no text in UTF-8: {error}", place=os.path.basename(path))) from None
    return parse_yaml(text, os.path.basename(path))


def parse_yaml(text, name="yaml"):
    """Parse yaml text; errors call it `name`. See `load_yaml`."""
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        hint = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        if mark and text.splitlines()[mark.line : mark.line + 1] and "\t" in text.splitlines()[mark.line]:
            hint += "; a tab? indent with blanks"
        if mark and "${" in text.splitlines()[min(mark.line, text.count("\n") - 1)]:
            hint += "; inside { } and [ ] put quotes around ${...}"
        raise ConfigError(Problem("", f"is no valid yaml: {hint}", place=f"{name}{line}")) from None
    if node is None:
        return Document(name, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(Problem("", "expects 'key: value' lines at the top level", place=f"{name}:1"))
    reader = _Reader(name)
    data = reader.value(node, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(name, data, reader.places)


class _Reader:
    """Converts yaml nodes to values."""

    def __init__(self, name):
        self.name = name
        self.places = {}
        self.problems = []
        self.open_nodes = []

    def value(self, node, path):
        self.places[path] = f"{self.name}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if any(node is other for other in self.open_nodes):
            self.complain(node, path, "contains itself")
            return None
        self.open_nodes.append(node)
        if isinstance(node, yaml.SequenceNode):
            result = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            result = self.mapping(node, path)
        self.open_nodes.pop()
        return result

    def mapping(self, node, path):
        result, merged = {}, {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(key_node, path, "expects a plain word as key")
                continue
            key = key_node.value
            if key == "<<" and not key_node.style:
                merged.update(self.merge(value_node, path))
                continue
            if key in result:
                self.complain(key_node, (*path, key), "is given twice in this mapping; keep one")
            result[key] = self.value(value_node, (*path, key))
            self.places[(*path, key)] = f"{self.name}:{key_node.start_mark.line + 1}"
        return {**merged, **result}

    def merge(self, node, path):
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged = {}
        for part in reversed(parts):
            value = self.value(part, path) if isinstance(part, yaml.MappingNode) else None
            if value is None:
                self.complain(node, path, "expects a mapping after <<")
            merged.update(value or {})
        return merged

    def scalar(self, node, path):
        if node.tag.startswith("!") or "python/" in node.tag:
            self.complain(node, path, f"has the unknown tag {node.tag}")
            return None
        if not node.style and "${" in _ENVIRONMENT.sub("", node.value):
            self.complain(node, path, f"has a ${{ that begins no ${{NAME}} or ${{NAME:-default}}: {node.value}")
        text = _ENVIRONMENT.sub(lambda match: self.environment(match, node, path), node.value)
        return plain_value(text) if not node.style else text

    def environment(self, match, node, path):
        value = os.environ.get(match.group(1), match.group(2))
        if value is None:
            self.complain(
                node,
                path,
                f"needs the environment variable {match.group(1)}, which is not set; "
                f"set it, or write ${{{match.group(1)}:-default}}",
            )
            return ""
        return value

    def complain(self, node, path, message):
        place = f"{self.name}:{node.start_mark.line + 1}"
        self.problems.append(Problem(".".join(map(str, path)), message, place=place))


def plain_value(text):
    """The value of an unquoted word in yaml: None, bool, int, float or the word itself."""
    word = text.strip()
    lower = word.lower()
    if lower in _NULL:
        return None
    if lower in _TRUE:
        return True
    if lower in _FALSE:
        return False
    if _INT.match(word):
        return int(word.replace("_", ""))
    if _HEX.match(word):
        return int(word, 16)
    if _FLOAT.match(word):
        return float(word.replace("_", ""))
    return _SPECIAL.get(lower, text)
