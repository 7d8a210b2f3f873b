"""Conversion of a Megatron launch script (.sh) to our yaml, with the result for each flag.

The script is read, never run: assignments, `$NAME` and `${NAME:-default}`, `$((...))` with whole numbers, and
the words behind the training program's name. Anything else of the shell is left alone and reported.
"""

import ast
import operator
import os
import re
import shlex
from dataclasses import dataclass

from mindspeed_ms.config.argument_table import all_flags, row_at, row_of_flag
from mindspeed_ms.config.arguments import argument_parser, settings_of_arguments
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.printing import dump_yaml
from mindspeed_ms.config.resolve import complete
from mindspeed_ms.config.row import IGNORED, REFUSED
from mindspeed_ms.config.sections.field import LIST, SWITCH, VALUE
from mindspeed_ms.config.settings import build
from mindspeed_ms.spelling import did_you_mean

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ENDS = ("|", ">", ">>", "2>&1", "&", ";", "&&", "||", "2>", "&>")


@dataclass
class Conversion:
    """Result of a conversion: `yaml_text`, and `fate`, the list of (flag, result) that `fate_text` shows as a table."""

    yaml_text: str
    fate: list

    @property
    def fate_text(self):
        width = max((len(flag) for flag, _ in self.fate), default=0)
        return "\n".join(f"{flag:<{width}}  {text}" for flag, text in self.fate)


def convert_script(path, environment=None):
    """Read a launch script.

    Args:
        path (str): the script.
        environment (dict | None): variables that the script takes from outside; os.environ if None.

    Returns:
        Conversion

    Raises:
        ConfigError: if no call of a training program is found.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"launch script {path!r} does not exist (looked in {os.getcwd()})")
    with open(path, encoding="utf-8") as file:
        words, unknown = launch_words(file.read(), os.environ if environment is None else environment)
    if words is None:
        raise ConfigError(
            Problem("", "calls no Python training program that this reader can see", place=os.path.basename(path))
        )
    return convert_words(words, os.path.basename(path), unknown)


def launch_words(text, environment):
    """(words behind the training program, variables without a value) of a script; (None, ...) if no call is found."""
    variables, unknown, call = dict(environment), [], None
    for line in _statements(text):
        match = _ASSIGNMENT.match(line)
        if match:
            variables[match.group(1)] = _expand(_unquote(match.group(2)), variables, unknown)
        elif re.search(r"\.py\b", line) and re.search(r"\b(torchrun|python3?|msrun|torch\.distributed|bash)\b|launch", line):
            call = _expand(line, variables, unknown)
    if call is None:
        return None, unknown
    words = shlex.split(call, comments=True)
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words) - 1)
    rest = words[start + 1 :]
    end = next((index for index, word in enumerate(rest) if word in _ENDS), len(rest))
    return rest[:end], unknown


def _statements(text):
    # a line goes on if it ends in a backslash, inside quotes, or inside an array's brackets
    statement = ""
    for line in text.splitlines():
        if not statement and line.lstrip().startswith("#"):
            continue
        statement += line.rstrip()[:-1] + " " if line.rstrip().endswith("\\") else line + "\n"
        is_open = line.rstrip().endswith("\\") or _open_quote(statement) is not None or _open_array(statement)
        if not is_open:
            yield statement.strip()
            statement = ""
    if statement.strip():
        yield statement.strip()


def _open_array(text):
    return bool(re.match(r"\s*(?:export\s+)?[A-Za-z_]\w*=\(", text)) and not text.rstrip().endswith(")")


def _open_quote(text):
    quote, comment = None, False
    for index, letter in enumerate(text):
        if comment:
            comment = letter != "\n"
        elif quote is None and letter == "#" and (index == 0 or text[index - 1].isspace()):
            comment = True
        elif quote is None and letter in "'\"":
            quote = letter
        elif letter == quote:
            quote = None
    return quote


def _unquote(text):
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"":
        end = text.find(text[0], 1)
        return text[1:end].replace("\\\n", " ").replace("\n", " ")
    if text.startswith("("):
        # quotes keep words with blanks together until the call is split
        return " ".join(shlex.quote(word) if " " in word else word for word in shlex.split(text[1:-1], comments=True))
    return text if text.startswith("$((") else (text.split("#")[0].split() or [""])[0]


def _expand(text, variables, unknown):
    def value_of(match):
        name = match.group(1) or match.group(3)
        value = variables.get(name, match.group(2))
        if value is None:
            unknown.append(name)
            return "${" + name + "}"
        return value

    text = re.sub(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?", r"${\1}", text)
    text = _VARIABLE.sub(value_of, text)
    return _ARITHMETIC.sub(lambda match: str(_arithmetic(match.group(1), variables, match.group(0))), text)


def _arithmetic(text, variables, whole):
    try:
        return _number(ast.parse(text.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, TypeError):
        return whole


def _number(node, variables):
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left, variables), _number(node.right, variables))
    raise ValueError(node)


def convert_words(words, source, unknown=()):
    """Convert the words of a command line; see `convert_script`."""
    parser = argument_parser()
    known, fate = [], []
    for flag, values in _grouped(words):
        row = row_of_flag(flag)
        if row is None:
            hint = did_you_mean(flag, all_flags(), cutoff=0.75)
            fate.append((flag, f"UNKNOWN, left out.{hint}"))
        else:
            text = " ".join([flag, *values])
            if row.form in (VALUE, LIST) and not values:
                fate.append((text, "LEFT OUT: has no value in the script"))
                continue
            # a placeholder such as "your data path" falls apart where the script does not quote it again
            known += [flag, *(values if row.form in (LIST, SWITCH) else [" ".join(values)] if row.form == VALUE else [])]
            fate.append((text, _fate(row)))
    args = parser.parse_args(known)
    settings = settings_of_arguments(args)
    refused = [f"{problem.key}: {problem.message}" for problem in settings.problems]
    settings.problems = []
    for path in [path for path in settings.by_path if row_at(path) is not None and row_at(path).status == REFUSED]:
        refused.append(f"{settings.by_path.pop(path).key}: is not available: {row_at(path).reason}")
    if args.sequence_parallel and (args.tensor_model_parallel_size or 1) == 1:
        settings.by_path.pop("parallel_config.sequence_parallel", None)
        fate = [
            (flag, "left out: tensor_model_parallel_size is 1, where Megatron switches it off too")
            if flag == "--sequence-parallel"
            else (flag, text)
            for flag, text in fate
        ]
    complete(settings)
    for key, message in _take_out_invalid(settings):
        refused.append(f"{key}: {message}")
        fate = [(flag, f"LEFT OUT: {message}" if flag.split()[0] == key else text) for flag, text in fate]
    fate = [(flag, _noticed(flag, text, settings.notices)) for flag, text in fate]
    lines = [f"# from {source}; Megatron's defaults are written out where they differ from ours"]
    lines += [f"# note: {notice}" for notice in dict.fromkeys(settings.notices)]
    lines += [f"# LEFT OUT: {problem}" for problem in refused]
    lines += [
        f"# ${{{name}}} comes from the environment"
        for name in dict.fromkeys(unknown)
        if any(f"${{{name}}}" in word for word in words)
    ]
    lines += [f"# {flag}: {text}" for flag, text in fate if text.startswith("UNKNOWN")]
    return Conversion("\n".join(lines) + "\n" + dump_yaml(_nested(settings)), fate)


def _take_out_invalid(settings):
    """Remove values that their setting refuses; list of (flag, expected value)."""
    try:
        build(settings)
    except ConfigError as error:
        problems = error.problems
    else:
        return []
    by_key = {setting.key: path for path, setting in settings.by_path.items()}
    taken = [problem for problem in problems if problem.key in by_key]
    for problem in taken:
        settings.by_path.pop(by_key[problem.key], None)
    return [(problem.key, problem.message) for problem in taken]


def _noticed(flag, text, notices):
    # a value that was understood but has no effect
    start = f"{flag.split()[0]}: "
    reason = next((notice[len(start) :] for notice in notices if notice.startswith(start)), None)
    return f"ignored: {reason}" if reason and text.startswith("->") else text


def _grouped(words):
    flag, values = None, []
    for word in words:
        if word.startswith("--"):
            if flag:
                yield flag, values
            flag, _, value = word.partition("=")
            values = [value] if value else []
        elif flag:
            values.append(word)
    if flag:
        yield flag, values


def _fate(row):
    if row.status == IGNORED:
        return f"ignored: {row.reason}"
    if row.status == REFUSED:
        return f"LEFT OUT: {row.reason}"
    return f"-> {row.path}"


def _nested(settings):
    result = {}
    for path, setting in settings.by_path.items():
        *sections, field = path.split(".")
        target = result
        for name in sections:
            target = target.setdefault(name, {})
        target[field] = setting.value
    return result
