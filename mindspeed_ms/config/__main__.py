"""`python -m mindspeed_ms.config check|explain|schema|convert|docs ...`: see `--help`."""

import os
import sys

from mindspeed_ms.config.errors import ConfigError
from mindspeed_ms.spelling import did_you_mean

_USAGE = """usage: python -m mindspeed_ms.config COMMAND ...

  check FILE... [--world N] [any Megatron flag]   validate, then print settings, layout, layers, parameters
  explain KEY...                                  what one option means: path, name, flag or key of the trio
  schema [FILE]                                   JSON schema of yaml files, for editors
  convert SCRIPT.sh [OUT.yaml]                    a Megatron launch script as our yaml, with the fate of each flag
  docs [--check] [ROOT]                           write docs/arguments.md, docs/arguments_zh.md, configs/schema/config.json
"""


def check(words):
    """Validate files and flags; prints a report. Exit code 1 with all problems on stderr if there are any."""
    from mindspeed_ms.config.arguments import argument_parser
    from mindspeed_ms.config.readers import init_configs_from_args
    from mindspeed_ms.config.report import report

    parser = argument_parser()
    parser.prog = "python -m mindspeed_ms.config check FILE..."
    # files may be given before, between and behind the flags; those behind --config belong to it
    behind = words.index("--config") if "--config" in words else len(words)
    files = [word for word in words[:behind] if word.endswith((".yaml", ".yml")) and not word.startswith("-")]
    files = [*dict.fromkeys([*_leading(words), *files])]
    args = parser.parse_args([word for index, word in enumerate(words) if word not in files or index > behind])
    args.config = [*files, *(args.config or [])] or None
    if not args.config and not args.typed_options:
        raise ConfigError([_problem("nothing to check: name yaml files, or Megatron flags")])
    print(report(init_configs_from_args(args)))


def _leading(words):
    """Words before the first flag."""
    return words[: next((index for index, word in enumerate(words) if word.startswith("-")), len(words))]


def explain(words):
    """Print the explanation of each named option."""
    from mindspeed_ms.config.explain import explain as text_of

    if not words:
        raise ConfigError([_problem("explain needs the name of an option")])
    print("\n\n".join(text_of(word) for word in words))


def schema(words):
    """Write the JSON schema to a file, or print it."""
    from mindspeed_ms.config.json_schema import schema_text

    _write(words[0] if words else None, schema_text())


def convert(words):
    """Turn a launch script into yaml; the fate of each flag goes to stderr and into the yaml's head."""
    from mindspeed_ms.config.convert import convert_script

    if not words:
        raise ConfigError([_problem("convert needs a launch script")])
    result = convert_script(words[0])
    _write(words[1] if len(words) > 1 else None, result.yaml_text)
    print(result.fate_text, file=sys.stderr)


def docs(words):
    """Write the reference pages and the JSON schema; with --check only compare them."""
    from mindspeed_ms.config.docs import write_generated

    root = next((word for word in words if not word.startswith("-")), ".")
    stale = write_generated(root, only_check="--check" in words)
    if stale and "--check" in words:
        raise ConfigError([_problem(f"not current: {', '.join(stale)}; run python -m mindspeed_ms.config docs")])
    print("\n".join(stale) if stale else "all files are current")


def _problem(text):
    from mindspeed_ms.config.errors import Problem

    return Problem("", text)


def _write(path, text):
    if path is None:
        sys.stdout.write(text)
    else:
        if _differs(path, text):
            raise ConfigError([_problem(f"{path} exists already and holds something else: give a new name, or remove it")])
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError([_problem(f"{path} cannot be written: {error.strerror}")]) from error


def _differs(path, text):
    """Whether a file is there that writing `text` would destroy."""
    try:
        with open(path, "rb") as file:
            return file.read() != text.encode()
    except OSError:
        return os.path.lexists(path) and not os.path.isdir(path)


COMMANDS = {"check": check, "explain": explain, "schema": schema, "convert": convert, "docs": docs}


def main(words=None):
    """Entry point; returns the exit code: 0, 1 for problems in a configuration, 2 for a wrong call."""
    words = sys.argv[1:] if words is None else list(words)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"no command {words[0]!r}.{did_you_mean(words[0], COMMANDS)}\n\n{_USAGE}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(words[1:]) and words[0] != "check":  # check takes Megatron's arguments, --help included
        print(_USAGE)
        return 0
    try:
        COMMANDS[words[0]](words[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:  # ConfigError and LayoutError are ValueErrors
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
