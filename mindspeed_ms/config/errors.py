"""Errors and warnings of the configuration: all problems are reported together, each with its key path and value."""

from dataclasses import dataclass, replace

_NOT_GIVEN = object()


@dataclass(frozen=True)
class Problem:
    """One error in a configuration.

    Args:
        key: key path (`model_config.hidden_size`) or flag (`--hidden-size`) it is about; "" if none.
        message: expected value, and what to do instead.
        value: the value that was found; left out of the text if not given.
        place: file and line ("model.yaml:12"), or "command line", or "".
    """

    key: str
    message: str
    value: object = _NOT_GIVEN
    place: str = ""

    def under(self, prefix):
        """The same problem with its path inside the section `prefix`."""
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)

    def __str__(self):
        subject = self.key
        if self.value is not _NOT_GIVEN:
            subject = f"{subject} = {shorten(self.value)}" if subject else shorten(self.value)
        text = f"{subject}: {self.message}" if subject else self.message
        return f"{self.place}: {text}" if self.place else text


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` lists everything found, not only the first.

    Args:
        problems (Problem | list[Problem]): problems found.
    """

    def __init__(self, problems):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__(self._text())

    def __reduce__(self):
        """Pickle by the problems, since the text alone does not give them back."""
        return type(self), (self.problems,)

    def _text(self):
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems in the configuration:"]
        return "\n".join(lines + [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)])


class WarningNotice(str):
    """A notice that a run logs as a warning: the user gets something else than was asked for."""


def shorten(value, limit=120):
    """repr of a value, cut in the middle if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]} ... {text[-15:]}"
