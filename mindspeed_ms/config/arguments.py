"""Megatron's command line: the argument parser, and settings from a Namespace."""

import argparse
import os
import sys

from mindspeed_ms.config import argument_table
from mindspeed_ms.config.argument_table import TABLE
from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.giving_way import give_way_to_flags
from mindspeed_ms.config.row import IGNORED, REFUSED, WORKS
from mindspeed_ms.config.schema import field_info
from mindspeed_ms.config.sections.field import LIST, OFF, ON, SWITCH, default_of
from mindspeed_ms.config.settings import ARGUMENTS, COMMAND_LINE, MEGATRON_DEFAULT, Setting, Settings
from mindspeed_ms.config.values import read_bool, read_dtype
from mindspeed_ms.config.yaml_loader import plain_value
from mindspeed_ms.layout.model_description import GATED_ACTIVATIONS
from mindspeed_ms.spelling import did_you_mean

_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
_STRING_KINDS = ("a string", "a list of words")


class ArgumentParser(argparse.ArgumentParser):
    """argparse.ArgumentParser whose errors suggest the nearest known flag.

    The Namespace has `typed_options`, names of the typed arguments, and `typed_flags`, the spelling of each.
    """

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does; errors about unknown flags suggest the nearest known one.

        Raises:
            SystemExit: code 2, after a message on stderr, for unknown flags and missing values.
        """
        result, rest = self.parse_known_args(args, namespace)
        if rest:
            # words behind an unknown flag are its value, no mistakes of their own
            unknown = [word for word in rest if word.strip() and word[:1] in _DASHES and not _is_number(word)] or rest
            words = [str(word) for word in (sys.argv[1:] if args is None else args)]
            self.error("unknown arguments: " + " ".join(self._hint(word, words) for word in unknown))
        return result

    def _hint(self, word, words):
        """Suggestion (str) for an unknown word of the command line."""
        before = words[words.index(word) - 1] if word in words[1:] else ""
        action = self._option_string_actions.get(before)
        word = word if word.strip() else repr(word)
        if action is not None and action.nargs == 0 and word[:1] not in _DASHES:
            return f"{word} (behind {before}, which takes no value: leave {word} out)."
        # text programs replace two dashes by one long dash
        plain = "--" + word.lstrip(_DASHES).split("=")[0] if word[:1] in _DASHES else word
        return f"{word}.{did_you_mean(plain, self._option_string_actions, cutoff=0.75)}"

    def error(self, message):
        """Print one clear line instead of several hundred flags, then exit with code 2."""
        if os.environ.get("LOCAL_RANK", "0") != "0":  # the first rank of a machine speaks
            self.exit(2)
        message = message.replace("ignored explicit argument", "takes no value, but was given")
        self.exit(2, f"{self.prog}: error: {message} (all flags: {self.prog} --help)\n")

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, and record which options were typed."""
        words = sys.argv[1:] if args is None else list(args)
        result, rest = super().parse_known_args(words, namespace)
        flags = [flag for flag in (str(word).split("=")[0] for word in words) if flag in self._option_string_actions]
        typed = {self._option_string_actions[flag].dest: flag for flag in flags}
        result.typed_options = [*getattr(result, "typed_options", ()), *typed]
        result.typed_flags = {**getattr(result, "typed_flags", {}), **typed}
        result.typed_again = [*getattr(result, "typed_again", ()), *self._given_again(words)]
        return result, rest

    def _given_again(self, words):
        """Flags that were given before with other values."""
        flag, given, again = None, {}, []
        for word in map(str, words):
            name, _, value = word.partition("=")
            if name in self._option_string_actions:
                flag = name
                given.setdefault(self._option_string_actions[flag].dest, []).append([flag, *([value] if value else [])])
            elif flag is not None:
                given[self._option_string_actions[flag].dest][-1].append(word)
        for calls in given.values():
            again += [calls[-1][0]] if any(call[1:] != calls[-1][1:] for call in calls) else []
        return again


def _is_number(word):
    try:
        float(word)
    except ValueError:
        return False
    return True


def argument_parser(extra_args_provider=None, defaults=None):
    """The parser with every flag of the argument table, Megatron's defaults, and our own `--config FILE...`.

    Args:
        extra_args_provider (callable | None): `provider(parser) -> parser` that adds the caller's own arguments.
        defaults (dict | None): defaults by Namespace name, over Megatron's.

    Returns:
        ArgumentParser: its Namespace has `typed_options`.
    """
    parser = ArgumentParser(description="Megatron arguments of mindspeed_ms", allow_abbrev=False)
    parser.add_argument(
        "--config",
        nargs="+",
        metavar="FILE",
        help="yaml files (nested sections or the 38BV3 trio), later ones win; typed flags win over all",
    )
    parser.add_argument("--default-config", nargs="+", metavar="FILE", help=argparse.SUPPRESS)  # see config.beneath
    groups = {}
    for row in TABLE:
        title = row.section or row.status
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if row.flags or row.off_flags:
            _add_row(groups[title], row)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    parser.set_defaults(**(defaults or {}))
    return parser


def _add_row(group, row):
    default = None if row.megatron_default is ... else row.megatron_default
    text = _help(row).replace("%", "%%")
    if row.form in (ON, OFF):
        default = bool(default)
        if row.flags:
            group.add_argument(*row.flags, dest=row.name, action="store_true", default=default, help=text)
        if row.off_flags:
            off = text if not row.flags or row.form == OFF else argparse.SUPPRESS
            group.add_argument(*row.off_flags, dest=row.name, action="store_false", default=default, help=off)
        return
    details = {"dest": row.name, "default": default, "help": text, "type": _reader(row)}
    if row.form == LIST:
        details |= {"nargs": "+"}
    elif row.form == SWITCH:
        details |= {"nargs": "?", "const": True, "metavar": "True|False"}
    elif row.choices:
        details |= {"metavar": "{" + ",".join(row.choices) + "}"}
    else:
        details |= {"metavar": row.name.rsplit("_", 1)[-1].upper()}
    if row.form != LIST and row.path and not row.is_alias and "a list of" in row.expects:
        details |= {"nargs": "+", "action": _OneList}
    group.add_argument(*row.flags, **details)


def _help(row):
    text = row.help_en or row.reason
    if row.status == IGNORED:
        text = f"[ignored: {row.reason}] {text}" if text != row.reason else f"[ignored: {text}]"
    elif row.status == REFUSED:
        text = f"[not available: {row.reason}] {text}" if text != row.reason else f"[not available: {text}]"
    return text


def _reader(row):
    # an unreadable value stays text: the section reports it together with all other problems
    if row.form == SWITCH:
        return _switch_or_text
    return str if any(kind in row.expects for kind in _STRING_KINDS) and row.path else _value_or_text


def _switch_or_text(text):
    try:
        return read_bool(text)
    except ValueError:
        return text


def _value_or_text(text):
    if not text.strip():
        return text  # an empty shell variable is no null: what expects a number or a list says so
    value = plain_value(text)
    return text if isinstance(value, bool) else value


class _OneList(argparse.Action):
    """A list that is written with commas, with blanks (`--num-layer-list 2 2 1 1`), or in brackets: one value."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else " ".join(map(str, values)))


class ArgumentView:
    """Access to arguments for conversions: values, whether they were typed, problems and notices.

    Attributes: `settings` collected so far; `has_files`: yaml files lie below the arguments.
    """

    def __init__(self, values, typed, has_files, settings):
        self.values = values
        self.typed = typed
        self.has_files = has_files
        self.settings = settings
        self.place = COMMAND_LINE if "typed_options" in self.values else ARGUMENTS

    def get(self, name):
        """Value of an argument; Megatron's default if it is not in the Namespace."""
        row = argument_table.row_of_name(name)
        for known in row.all_names:
            if known in self.values:
                return self.values[known]
        return None if row.megatron_default is ... else row.megatron_default

    def is_typed(self, name):
        """True if the argument was given (typed, or in a foreign Namespace different from Megatron's default)."""
        return argument_table.row_of_name(name).name in self.typed

    def problem(self, name, message):
        """Report a problem with an argument."""
        problem = Problem(self.flag(name), message, self.get(name), self.place)
        if problem not in self.settings.problems:  # a value may be looked at as a default and as typed
            self.settings.problems.append(problem)

    def notice(self, name, message):
        """Add a notice about an argument."""
        self.settings.notices.append(f"{self.flag(name)}: {message}")

    def flag(self, name):
        """The flag of an argument as the user typed it, else its first flag."""
        row = argument_table.row_of_name(name)
        written = self.values.get("typed_flags", {})
        for known in row.all_names:
            if known in written:
                return written[known]
        if (self.get(name) is False and row.off_flags) or not row.flags:
            return row.off_flags[0] if row.off_flags else row.name
        return row.flags[0]


def settings_of_arguments(args, below=None):
    """Settings of a Namespace; it is not changed.

    Args:
        args (argparse.Namespace): of our parser, of Megatron's, or made by hand.
        below (Settings | None): settings of yaml files: only typed arguments replace them, and defaults are the
            guide's.

    Returns:
        Settings: with the problems and notices found.
    """
    settings = Settings()
    values, settings.problems = _without_empty(vars(args))
    typed = _typed_names(values)
    view = ArgumentView(values, typed, below is not None, settings)
    if below is None:
        settings.starts_from_megatron = view.place == COMMAND_LINE
        _add_defaults(settings, view)
    else:
        settings.update(below)
    given = {}
    for row in TABLE:
        if row.name in typed:
            _add_typed(settings, view, row, given)
    _add_unknown(settings, values)
    give_way_to_flags(settings)
    for flag in values.get("typed_again", ()):
        settings.notices.append(f"{flag} was given more than once; the last one counts")
    if below is None or "hidden_size" in typed:
        _add_feed_forward_size(settings)
    return settings


def _without_empty(values):
    """Values of a command line without those of typed flags that are empty, and their problems."""
    problems = []
    for name, flag in values.get("typed_flags", {}).items():
        value, row = values.get(name), argument_table.row_of_name(name)
        words = value if isinstance(value, list) else [value]
        if row and row.status != IGNORED and any(isinstance(word, str) and not word.strip() for word in words):
            expects = row.expects if row.path and not row.convert else "a value"
            message = f"expects {expects}, but is empty (an unset shell variable?): leave the flag away to have the default"
            problems.append(Problem(flag, message, value, COMMAND_LINE))
            values = {key: other for key, other in values.items() if key != name}
            values["typed_options"] = set(values["typed_options"]) - {name}
    return values, problems


def _typed_names(values):
    recorded = values.get("typed_options")
    if recorded is not None:
        rows = (argument_table.row_of_name(name) for name in recorded)
        return {row.name for row in rows if row is not None}
    return {row.name for row in TABLE for name in row.all_names if name in values and _differs(values[name], row)}


def _differs(value, row):
    default = row.megatron_default
    if value is None or default is ...:
        return value is not None
    if row.form in (ON, OFF, SWITCH) and isinstance(value, bool):
        return value != bool(default)
    if isinstance(default, (list, tuple)) or isinstance(value, (list, tuple)):
        lists = isinstance(value, (list, tuple)) and isinstance(default or [], (list, tuple))
        return not lists or list(value) != list(default or [])
    return value != default and _plain(value) != _plain(default)


def _plain(value):
    # torch.float32 and fp32, AttnBackend.auto and auto are the same; 4.0 and 8.0 are not
    for read in (float, read_dtype):
        try:
            return read(value)
        except (TypeError, ValueError):
            continue
    return str(value).rsplit(".", 1)[-1].lower()


def _add_defaults(settings, view):
    for row in TABLE:
        if row.status != WORKS or not row.path or not (row.flags or row.off_flags) or not _is_needed(row, view):
            continue
        value = view.get(row.name)
        if value is None:
            continue
        changes = row.convert(value, view) if row.convert else {row.path: value}
        for path, item in changes.items():
            if item != default_of(field_info(path)):
                settings.add(path, item, view.flag(row.name), MEGATRON_DEFAULT)


def _is_needed(row, view):
    for need in row.needs:
        name, _, wanted = need.partition("=")
        if (wanted and view.get(name) == wanted) or (not wanted and view.is_typed(name) and view.get(name)):
            return True
    return not row.needs


def _add_typed(settings, view, row, given):
    value = view.get(row.name)
    flag = view.flag(row.name)
    if row.status != WORKS and not row.path:
        _judge(settings, row, flag, value, view.place)
        return
    changes = row.convert(value, view) if row.convert else {row.path: value}
    for path, item in changes.items():
        before = given.get(path)
        clash = before is not None and before[1] != item and path != "optimizer_config.betas"
        if clash and row.path == path and not _refines(before[1], item):
            settings.problems.append(
                Problem(flag, f"contradicts {before[0]}, which sets {path} to {before[1]!r}; keep one", item, view.place)
            )
        if row.path == path:
            given[path] = (flag, item)
        settings.add(path, item, flag, view.place, value)


def _refines(before, after):
    # --normalization RMSNorm --use-fused-rmsnorm
    return {before, after} == {"RMSNorm", "FusedRMSNorm"} if isinstance(before, str) else False


def _judge(settings, row, flag, value, place):
    if (not _differs(value, row) and value is not None) or value is None:
        return
    if row.status == IGNORED:
        settings.notices.append(f"{flag}: ignored, {row.reason}")
        if row.feature:
            settings.later.setdefault(row.feature, []).append(Setting("", value, flag, place))
    else:
        settings.problems.append(Problem(flag, f"is not available: {row.reason}", value, place))


def _add_unknown(settings, values):
    recorded = values.get("typed_options") is not None
    unknown = [name for name in values if argument_table.row_of_name(name) is None and name not in argument_table.RUNTIME_NAMES]
    for name in unknown:
        hint = "" if recorded else did_you_mean(name, [row.name for row in TABLE if row.path], cutoff=0.87)
        if hint:
            settings.problems.append(Problem(name, f"is no argument.{hint}", values[name], "arguments"))
    rest = [name for name in unknown if not recorded]
    if rest and not settings.problems:
        settings.notices.append(
            "arguments that the configuration does not know, left to your own code: " + ", ".join(sorted(rest))
        )


def _add_feed_forward_size(settings):
    hidden = settings.value("model_config.hidden_size")
    if settings.value("model_config.ffn_hidden_size") is not None or not isinstance(hidden, int) or hidden <= 0:
        return
    gated = settings.value("model_config.hidden_act") in GATED_ACTIVATIONS
    size = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
    settings.add("model_config.ffn_hidden_size", size, "--ffn-hidden-size", MEGATRON_DEFAULT)
