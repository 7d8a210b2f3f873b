"""Spelling suggestions: the known word nearest to a mistyped one, for error messages. Imports nothing heavy."""

import argparse
import difflib


def did_you_mean(word, known, cutoff=0.6):
    """ " Did you mean 'x'?" for the known word nearest to `word`, or "" if none is near."""
    nearest = nearest_word(word, known, cutoff)
    return f" Did you mean {nearest!r}?" if nearest else ""


def nearest_word(word, known, cutoff=0.6):
    """Known word nearest to `word`; None if none reaches `cutoff` (difflib ratio)."""
    plain = {name.replace("-", "_").lower(): name for name in known}
    matches = difflib.get_close_matches(str(word).replace("-", "_").lower(), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


_SHORT_NAMES = {
    f"{letter}p": f"{word}-parallel-size"
    for letter, word in (("t", "tensor-model"), ("p", "pipeline-model"), ("e", "expert-model"), ("c", "context"), ("d", "data"))
} | {"bf16": "dtype", "fp16": "dtype"}


class SuggestingParser(argparse.ArgumentParser):
    """argparse.ArgumentParser of a tool: its errors are one line, and suggest the flag that an unknown one is nearest to."""

    def error(self, message):
        """Print one line and exit with code 2."""
        start = "unrecognized arguments: "
        if message.startswith(start):
            flags = list(self._all_flags())
            words = [word.lstrip("-").split("=")[0] for word in message[len(start) :].split() if word.startswith("-")]
            message += "".join(did_you_mean("--" + _SHORT_NAMES.get(word, word), flags) for word in words)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _all_flags(self):
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._all_flags()
