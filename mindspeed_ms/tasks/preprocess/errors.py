"""Exceptions of a preprocessing run, and of one record of its input."""


class PreprocessError(ValueError):
    """Error: a run cannot start or continue; the message says what to do."""


class RecordError(PreprocessError):
    """Error: one record of the input cannot be used.

    Args:
        place (str): file and line or row.
        text (str): the problem, and what to do.
        reason (str): the same in a few words, for counting when such records are skipped.
    """

    def __init__(self, place, text, reason):
        super().__init__(f"{place}: {text}")
        self.place, self.text, self.reason = place, text, reason

    def __reduce__(self):
        return type(self), (self.place, self.text, self.reason)


class Unusable(Exception):
    """Error inside a handler: the record is left out and counted under `reason` (a few words); `detail` is about it alone."""

    def __init__(self, reason, detail=""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class BadRecord(Exception):
    """Error inside a handler, which does not know the record's place; becomes a RecordError."""

    def __init__(self, text, reason):
        super().__init__(text, reason)
        self.text, self.reason = text, reason


def column(record, name, purpose, option):
    """Value of a record's column.

    Args:
        record (dict): a record of the input.
        name (str): the column.
        purpose (str): use of the column, for the message.
        option (str): the option that names the column, with an example.

    Raises:
        BadRecord: the record has no such column.
    """
    try:
        return record[name]
    except KeyError:
        found = ", ".join(map(repr, record)) or "none"
        raise BadRecord(
            f"asked for the key {name!r} ({purpose}), found {found}. Name the right one with {option}.",
            f"key {name!r} is missing",
        ) from None
