"""Batches of input records, some hundred kilobytes each, in the form in which they are sent to the tokenizing processes.

Lines are sent as bytes and parsed there; the reading process only searches for line ends. A line ends with LF alone: U+2028 and
the like are characters of a text, and the CR of CRLF is white space around JSON.
"""

import json
from dataclasses import dataclass

from mindspeed_ms.tasks.preprocess.errors import RecordError


@dataclass(frozen=True)
class Batch:
    """Batch of records that follow each other in one file.

    Attributes:
        path (str): the file.
        kind (str): "jsonl" and "txt": `data` (bytes) are lines; "json": `data` is a list of (line, text of one value);
            "csv": `data` is the names of the columns and a list of (line, cells); "rows": `data` (bytes) is an Arrow stream.
        first (int): number of the first line or row, from 1.
        begins_file (bool): whether it is the file's first.
        consumed (int): bytes of the file on disk that were read up to here.
    """

    path: str
    kind: str
    data: object
    first: int
    begins_file: bool
    consumed: int

    def records(self):
        """Records: (list[str] places, list[dict] records); a line without a record has an Unreadable in its place."""
        pairs = list(_DECODERS[self.kind](self))
        return [place for place, _ in pairs], [record for _, record in pairs]


@dataclass(frozen=True)
class Unreadable:
    """Placeholder of a record that could not be parsed."""

    error: RecordError


def _json_lines(batch):
    for number, line in enumerate(batch.data.split(b"\n"), batch.first):
        if line and not line.isspace():
            place, text = _decoded(batch, line, number)
            if isinstance(text, Unreadable):
                yield place, text
            elif text.strip():
                yield place, _parsed(place, text)


def _json_values(batch):
    for line, text in batch.data:
        place = f"{batch.path}, line {line}"
        yield place, _parsed(place, text)


def _parsed(place, text):
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        return Unreadable(
            RecordError(
                place,
                f"broken JSON: {detail}; the line begins with {text[:60]!r}.{_advice(text)} "
                "Repair or delete it; preprocess_data.py leaves such records out with --on-invalid skip.",
                "broken JSON",
            )
        )
    if not isinstance(record, dict):
        return Unreadable(
            RecordError(
                place,
                f"expected a JSON object with keys, found {type(record).__name__}: {text[:60]!r}.{_advice(text)}",
                "not an object",
            )
        )
    return record


def _advice(text):
    return " If the file is one array of records, let its name end in .json." if text.lstrip().startswith("[") else ""


def _text_lines(batch):
    lines = batch.data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # behind the last line end there is no line
    for number, line in enumerate(lines, batch.first):
        place, text = _decoded(batch, line.removesuffix(b"\r"), number)
        yield place, text if isinstance(text, Unreadable) else {"text": text}


def _decoded(batch, line, number):
    """(place, text) of a line, without the mark at the beginning of a file; an Unreadable if it is not UTF-8."""
    place = f"{batch.path}, line {number}"
    try:
        return place, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        detail = f"not UTF-8 text ({error.reason} at byte {error.start} of the line)"
        return place, Unreadable(RecordError(place, detail, "not UTF-8"))


def _csv_rows(batch):
    names, rows = batch.data
    for line, cells in rows:
        place = f"{batch.path}, line {line}"
        if len(cells) == len(names):
            yield place, dict(zip(names, cells))
        else:
            yield (
                place,
                Unreadable(
                    RecordError(
                        place,
                        f"expected a cell for each of the {len(names)} columns that the first "
                        f"line names, found {len(cells)}. Put cells that have commas or line ends in "
                        "double quotes.",
                        "another number of cells",
                    )
                ),
            )


def _rows(batch):
    import pyarrow

    with pyarrow.ipc.open_stream(batch.data) as stream:
        number = batch.first
        for record in stream.read_all().to_pylist(maps_as_pydicts="lossy"):
            yield f"{batch.path}, row {number}", {name: _without_absent(value) for name, value in record.items()}
            number += 1


def _without_absent(value):
    """Record without absent fields: Arrow fills fields that other records' structs have with None."""
    if isinstance(value, dict):
        return _Struct({name: _without_absent(field) for name, field in value.items()})
    if isinstance(value, list):
        return [_without_absent(entry) for entry in value]
    return value


class _Struct(dict):
    """Fields of a struct that are not null. `struct[name]` of a null field is None: whether a record had it is unknown."""

    def __init__(self, fields):
        super().__init__((name, field) for name, field in fields.items() if field is not None)
        self._null = fields.keys() - self.keys()

    def __missing__(self, name):
        if name not in self._null:
            raise KeyError(name)


_DECODERS = {"jsonl": _json_lines, "json": _json_values, "txt": _text_lines, "csv": _csv_rows, "rows": _rows}
