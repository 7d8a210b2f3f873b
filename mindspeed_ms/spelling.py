"""Spelling suggestions: the known word nearest to a mistyped one, for error messages. Imports nothing heavy."""

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
