"""Section, the base class of all sections: unknown keys are refused with a suggestion, errors name key and value."""

from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.sections.field import is_link, option_of
from mindspeed_ms.config.values import Explained, Kind, Registered
from mindspeed_ms.spelling import did_you_mean


@cache
def _own_fields(section):
    return {name: info for name, info in section.model_fields.items() if not is_link(info)}


REQUIRED = "is required and has no default"
_COLLECTING = ContextVar("collecting", default=False)


@contextmanager
def collecting():
    """Context manager: sections leave rules about several fields to `checks`, so that all problems are reported together."""
    token = _COLLECTING.set(True)
    try:
        yield
    finally:
        _COLLECTING.reset(token)


def is_collecting():
    """Whether `collecting` is active."""
    return _COLLECTING.get()


class MissingField(AttributeError):
    """Error about a field that a section does not have; it looks for a suggestion only when it is printed."""

    def __init__(self, section, name):
        super().__init__()
        self.section, self.field = section, name

    def __str__(self):
        return f"{self.section.__name__} has no field {self.field!r}.{did_you_mean(self.field, self.section.model_fields)}"


class Section(BaseModel):
    """Base of all sections.

    Raises:
        ConfigError: at construction and at every assignment, naming each wrong key, its value and the expected one.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), arbitrary_types_allowed=True)
    config_name: ClassVar[str] = ""
    # further key in yaml -> field; collected from the fields
    spellings: ClassVar[dict[str, str]] = {}
    # mapping that upstream has -> {its key: field}; settings of such a mapping are the fields
    groups: ClassVar[dict[str, dict[str, str]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_):
        cls.spellings = {name: field for field, info in cls.own_fields().items() for name in option_of(info).yaml_names}

    def __init__(self, **values):
        problems = []
        values = self.rewrite(self._own_spelling(values, problems), problems)
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems += [problem for item in error.errors(include_url=False) for problem in _problems_of(item, type(self))]
        if problems:
            raise ConfigError(problems) from None
        self.derive()

    def derive(self):
        """Hook: fill fields of None that follow from other fields."""

    def __setattr__(self, name, value):
        name = self.spellings.get(name, name)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            problems = [problem for item in error.errors(include_url=False) for problem in _problems_of(item, type(self))]
            raise ConfigError([problem.under(self.config_name) for problem in problems]) from None

    def __getattr__(self, name):
        if name in type(self).spellings:
            return getattr(self, type(self).spellings[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise MissingField(type(self), name) from None

    @classmethod
    def rewrite(cls, values, problems):
        """Hook: turn other forms of the same settings into fields before validation. Returns the new dict."""
        for group, names in cls.groups.items():
            if group not in values:
                continue
            values = dict(values)
            nested = values.pop(group)
            if nested is not None and not isinstance(nested, dict):
                problems.append(Problem(group, f"expects a mapping with keys of {', '.join(names)}", nested))
            for name, value in nested.items() if isinstance(nested, dict) else ():
                target = names.get(name)
                if target is None:
                    problems.append(Problem(f"{group}.{name}", f"expects one of {', '.join(names)}", value))
                elif values.get(target, value) != value:
                    problems.append(Problem(f"{group}.{name}", f"was also given as {target} = {values[target]!r}", value))
                else:
                    values[target] = value
        return values

    @classmethod
    def _own_spelling(cls, values, problems):
        result = {}
        for name, value in values.items():
            target = cls.spellings.get(name, name)
            if target in result and result[target] != value:
                problems.append(Problem(name, f"was also given as {target} = {result[target]!r}; keep one of them", value))
            result[target] = value
        return result

    @classmethod
    def own_fields(cls):
        """dict name -> pydantic FieldInfo of the settings of this section, without the links."""
        return _own_fields(cls)

    def __getitem__(self, name):
        if name not in type(self).own_fields() and name not in self.spellings:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name, default=None):
        """The field `name`, or `default` if there is no such field or it is None."""
        value = self[name] if name in type(self).own_fields() or name in self.spellings else None
        return default if value is None else value

    def fill(self, **values):
        """Set derived values without counting them as set by the user."""
        for name, value in values.items():
            self.__dict__[name] = value

    def to_dict(self):
        """Plain dict of all settings (no links), ready for yaml."""
        return self.model_dump()


def expectation(info):
    """Accepted values of the pydantic field `info`, in words."""
    words = _kinds(Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation)
    return " or ".join(dict.fromkeys(words)) or "another type"


def _kinds(annotation):
    own = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Kind)]
    if own:
        return [str(own[-1])]
    if annotation is type(None):
        return ["null"]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [f"a mapping with keys of {', '.join(annotation.own_fields())}"]
    if annotation is Any:
        return ["anything"]
    if get_origin(annotation) is dict or annotation is dict:
        return ["a mapping"]
    return [word for part in get_args(annotation) for word in _kinds(part)]


def nested_section(info):
    """Section class of the pydantic field `info`, or None."""
    return next(
        (
            part
            for part in (info.annotation, *get_args(info.annotation))
            if isinstance(part, type) and issubclass(part, Section)
        ),
        None,
    )


def _problems_of(item, section):
    path, info = [], None
    for part in item["loc"]:
        if section is None or not isinstance(part, str):
            break
        path.append(part)
        owner, info = section, section.model_fields.get(part)
        section = nested_section(info) if info is not None else None
    key = ".".join(path)
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return [problem.under(key) for problem in cause.problems]
    if item["type"] == "extra_forbidden":
        known = [*owner.own_fields(), *owner.spellings]
        return [Problem(key, f"is no setting of {owner.config_name}.{did_you_mean(path[-1], known)}", item["input"])]
    if item["type"] == "missing":
        return [Problem(key, f"{REQUIRED}: expects {expectation(info)}")]
    hint = _choice_hint(item["input"], info)
    return [Problem(key, f"expects {expectation(info)}.{hint}".replace("..", "."), item["input"])]


def choices(info):
    """The strings a one_of or registered field takes, () for any other field."""
    for mark in info.metadata:
        if isinstance(mark, Registered):
            return tuple(mark.choices())
    return tuple(item for part in (info.annotation, *get_args(info.annotation)) for item in _literals(part))


def _literals(annotation):
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _choice_hint(value, info):
    if not isinstance(value, str):
        return ""
    reasons = [mark.reasons[value] for mark in info.metadata if isinstance(mark, Explained) and value in mark.reasons]
    return f" {reasons[0]}" if reasons else did_you_mean(value, choices(info))
