"""Settings: values of the user by config path, each with its place, before the sections are built."""

from dataclasses import dataclass, replace

from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.config.errors import ConfigError, Problem, WarningNotice
from mindspeed_ms.config.schema import SECTIONS, AllConfig
from mindspeed_ms.config.sections.base import REQUIRED, collecting, nested_section
from mindspeed_ms.config.values import read_bool
from mindspeed_ms.spelling import did_you_mean, nearest_word

COMMAND_LINE = "command line"
ARGUMENTS = "arguments"
TRIO_SECTIONS = ("train_config", "accelerate_config")  # beside model_config.llm
MEGATRON_DEFAULT = "Megatron's default"

ALWAYS_GIVEN = ("dataset_config.batch_size", "optimizer_config.learning_rate")
LENGTHS = ("training_config.training_iters", "dataset_config.train_samples", "training_config.epochs")  # one of them


@dataclass(frozen=True)
class Setting:
    """One value that the user set.

    Args:
        path: config path, `section.field` or `section.field.key`.
        value: the value as it was read.
        key: how the user wrote it: key path in a file, or flag.
        place: "file:line", "command line", "arguments", or a program's "dict".
        written: the value as the user wrote it, of which a conversion made `value`.
    """

    path: str
    value: object
    key: str
    place: str
    written: object = None

    def origin(self):
        """Text of the setting's place and, if it differs from the path, its key."""
        return self.place if self.key == self.path else f"{self.place} ({self.key})"


class Settings:
    """Settings by path; a later one replaces an earlier one.

    Attributes: `problems` found while reading; `notices` for the user; `starts_from_megatron`: whether
        they are flags without files below, whose defaults are Megatron's; `later`: {feature that does not run yet: [Setting]
        with the flags that belong to it and set nothing}; `lacks_checkpoint`: the one that knows the model cannot be read, and
        `problems` says so.
    """

    def __init__(self):
        self.by_path = {}
        self.problems = []
        self.notices = []
        self.later = {}
        self.starts_from_megatron = self.lacks_checkpoint = False
        self.general = {}

    def add(self, path, value, key=None, place="", written=None):
        """Set one value; it replaces an earlier one of the same path."""
        self.by_path.pop(path, None)
        self.by_path[path] = Setting(path, value, key or path, place, written)

    def update(self, other):
        """Add all settings of `other`, which replace those of the same path."""
        for path, setting in other.by_path.items():
            self.by_path.pop(path, None)
            self.by_path[path] = setting
        self.problems += other.problems
        self.notices += other.notices
        self.later.update(other.later)
        self.general.update(other.general)

    def was_set(self, path):
        """True if the user set the path (Megatron's default does not count)."""
        setting = self.by_path.get(path)
        return setting is not None and setting.place != MEGATRON_DEFAULT

    def value(self, path, default=None):
        """The value set for a path, or `default`."""
        setting = self.by_path.get(path)
        return default if setting is None or setting.value is None else setting.value

    def warn(self, text):
        """Add a warning: the user gets something else than was asked for."""
        self.notices.append(WarningNotice(text))

    def is_on(self, path):
        """Whether the path was set to a value that reads as True; the section reports values that are no switch."""
        try:
            return read_bool(self.value(path, False))
        except ValueError:
            return False

    def locate(self, problem):
        """The problem with the user's own key and place, if the user set its path."""
        path = problem.key
        while path:
            setting = self.by_path.get(path)
            if setting is not None:
                key = setting.key + problem.key[len(path) :]
                value = problem.value if setting.written is None or problem.value != setting.value else setting.written
                return Problem(key, problem.message, value, setting.place)
            path = path.rpartition(".")[0]
        return self._by_flag(problem)

    def _by_flag(self, problem):
        """The problem of a path that was not set, under its flag if there are settings from the command line."""
        row = row_at(problem.key)
        if row is None or not row.flags or not any(item.place == COMMAND_LINE for item in self.by_path.values()):
            return problem
        return replace(problem, key=f"{row.flags[0]} ({problem.key})")


def nested_settings(data, places=None, place=""):
    """Settings of a nested dict `{section: {field: value}}`.

    Args:
        data (dict): the sections.
        places (dict): key path (tuple) -> "file:line".
        place (str): place of values that are not in `places`.
    """
    settings = Settings()
    places = places or {}
    for name, section in data.items():
        where = places.get((name,), place)
        if name == "general_config":
            settings.general.update(section or {})
        elif name not in SECTIONS:
            known = [*SECTIONS, "general_config"]
            hint = did_you_mean(name, [*TRIO_SECTIONS, *known])
            settings.problems.append(Problem(name, f"is no section; there are {', '.join(known)}.{hint}", place=where))
        elif section is not None and not isinstance(section, dict):
            settings.problems.append(Problem(name, "expects a mapping of settings", section, where))
        else:
            add_section(settings, name, section or {}, (name,), lambda path: places.get(path, place))
    return settings


def add_section(settings, name, section, keys, place_of):
    """Add the settings of one section.

    Args:
        settings (Settings): changed in place.
        name (str): the section.
        section (dict): its settings as written.
        keys (tuple): key path of the mapping in the file.
        place_of (callable): key path (tuple) -> place.
    """
    kind = SECTIONS[name]
    seen = {}
    for key, value in section.items():
        for inner, field, item in _leaves(kind, str(key), value):
            where = (*keys, *inner)
            path, written = f"{name}.{field}", ".".join(where)
            if path in seen and seen[path][1] != item:
                settings.problems.append(
                    Problem(
                        written,
                        f"was also given as {seen[path][0]} = {seen[path][1]!r}; keep one of them",
                        item,
                        place_of(where),
                    )
                )
            seen[path] = (written, item)
            settings.add(path, item, written, place_of(where))


def _leaves(kind, key, value):
    """(keys as written, field path, value) of each single setting in `key: value`."""
    field = kind.spellings.get(key, key)
    info = kind.own_fields().get(field)
    group = kind.groups.get(key)
    nested = nested_section(info) if info is not None else None
    if not isinstance(value, dict) or (group is None and nested is None):
        return [((key,), field, value)]
    if group is not None:
        return [((key, name), group.get(name, f"{key}.{name}"), item) for name, item in value.items()]
    return [((key, name), f"{field}.{nested.spellings.get(name, name)}", item) for name, item in value.items()]


def build(settings, required=()):
    """Build an AllConfig from settings; `checks` holds the rules over several fields.

    Args:
        settings (Settings): the user's settings.
        required (tuple[str]): sections that are built even if nothing of them was set.

    Returns:
        AllConfig: its `provenance` and `notices` are filled.

    Raises:
        ConfigError: all problems of single values together.
    """
    problems = list(settings.problems)
    values = {name: {} for name in SECTIONS}
    for path, setting in settings.by_path.items():
        section, *rest = path.split(".")
        target = values[section]
        for part in rest[:-1]:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                break  # the whole mapping was set to something else: its own check reports that
        else:
            target[rest[-1]] = setting.value
    sections, unknown = {}, ("model_config",) if settings.lacks_checkpoint else ()
    with collecting():
        for name, kind in SECTIONS.items():
            if name == "model_config" and not values[name] and name not in required:
                continue
            links = {link: sections[link] for link in kind.model_fields if link in sections}
            try:
                sections[name] = kind(**values[name], **links)
            except ConfigError as error:
                found = [
                    problem for problem in error.problems if not (name in unknown and problem.message.startswith(REQUIRED))
                ]
                problems += [settings.locate(_elsewhere(problem.under(name), name)) for problem in found]
                sections.update(_stand_in(kind, name))
    if problems:
        raise ConfigError(_flags_in_one(problems, settings) if settings.starts_from_megatron else problems)
    result = AllConfig(**sections, general_config=settings.general)
    result.provenance = {path: setting.origin() for path, setting in settings.by_path.items()}
    result.settings = settings
    result.notices = list(dict.fromkeys(settings.notices))
    return result


def _flags_in_one(problems, settings):
    """The problems, with those about required flags that are missing joined to one."""
    missing = [problem.key.partition(" ")[0] for problem in problems if problem.message.startswith(REQUIRED)]
    if "--hidden-size" in missing and "--ffn-hidden-size" in missing:
        missing.remove("--ffn-hidden-size")  # it follows from the other one
    if not missing:
        return problems
    missing += missing_flags(settings)
    message = (
        "must be given: flags describe the whole model, what they leave out is Megatron's default, and these have none "
        "(--config names yaml files instead)"
    )
    rest = [problem for problem in problems if not problem.message.startswith(REQUIRED)]
    return [Problem(", ".join(missing), message, place=COMMAND_LINE), *rest]


def missing_flags(settings):
    """Flags (list[str]) that every training in Megatron is given, of those that were not."""
    missing = [row_at(path).flags[0] for path in ALWAYS_GIVEN if not settings.was_set(path)]
    return missing if any(map(settings.was_set, LENGTHS)) else [*missing, row_at(LENGTHS[0]).flags[0]]


def _stand_in(kind, name):
    return {} if name == "model_config" else {name: kind()}


def _elsewhere(problem, section):
    """Add to a problem about an unknown key the section that has it, if any."""
    if "is no setting of" not in problem.message:
        return problem
    word = problem.key.rpartition(".")[2]
    known = {
        field: name for name, kind in SECTIONS.items() if name != section for field in (*kind.own_fields(), *kind.spellings)
    }
    text, _, nearer = problem.message.partition(" Did you mean ")
    field = word if word in known else None if nearer else nearest_word(word, known, cutoff=0.8)
    if field is None:
        return problem
    return Problem(problem.key, f"{text} Did you mean {known[field]}.{field}?", problem.value)
