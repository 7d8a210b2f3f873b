"""Records of evaluation data: jsonl, json and csv files, one file or a folder of them; each with its place for messages."""

import csv
import json
import os
from dataclasses import dataclass

from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError, check_characters
from mindspeed_ms.tasks.evaluation.errors import EvaluationError

_ENDINGS = (".jsonl", ".json", ".csv")
_SPLITS = ("_test", "_val", "_dev", "_validation", "_train")


@dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        fields (dict): what the file says.
        place (str): "file, line N".
        subject (str): name of the file without ending and split ("anatomy_test.csv": "anatomy").
    """

    fields: dict
    place: str
    subject: str

    def text(self, *names, is_optional=False):
        """Value (str) of the first of the fields `names` that is there; None if optional.

        Raises:
            EvaluationError: it is missing, or no text.
        """
        value = self.value(*names, is_optional=is_optional)
        if value is not None and not isinstance(value, str):
            raise EvaluationError(f"{self.place}: {self._named(names)} is {value!r}: expected a text.")
        return value

    def texts(self, name, least=2):
        """Value (list[str]) of a field with at least `least` texts.

        Raises:
            EvaluationError: it is anything else.
        """
        value = self.value(name)
        if not isinstance(value, list) or len(value) < least or not all(isinstance(one, str) for one in value):
            raise EvaluationError(f"{self.place}: {name!r} is {value!r}: expected a list of at least {least} texts.")
        return value

    def value(self, *names, is_optional=False):
        """Value of the first of the fields `names` that is there.

        Raises:
            EvaluationError: none is, and it is not optional.
        """
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        if is_optional:
            return None
        raise EvaluationError(
            f"{self.place}: the field {' or '.join(map(repr, names))} is missing; there are {sorted(self.fields)}."
        )

    def _named(self, names):
        return next((repr(name) for name in names if name in self.fields), repr(names[0]))


def read_records(path, columns=None):
    """Records of a file, or of all data files of a folder in the order of their names.

    Args:
        path (str): .jsonl, .json (an array) or .csv file, or a folder.
        columns (Optional[sequence[str]]): names of the columns of csv files without a header.

    Returns:
        list[Record], at least one

    Raises:
        EvaluationError: no such path, no data file, a broken line.
    """
    if not os.path.exists(path):
        raise EvaluationError(f"{path} does not exist.")
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(_ENDINGS)]
    records = [record for file in files for record in _records_of(file, columns)]
    if not records:
        raise EvaluationError(f"{path} holds no records: expected {', '.join(_ENDINGS)} files.")
    return records


def _records_of(file, columns):
    subject = os.path.splitext(os.path.basename(file))[0]
    for ending in _SPLITS:
        subject = subject.removesuffix(ending)
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            rows = _csv_rows(file, opened, columns) if file.endswith(".csv") else _json_rows(file, opened)
            return [Record(fields, f"{file}, line {line}", subject) for line, fields in rows]
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{file} is no UTF-8: {error}.") from None


def _json_rows(file, opened):
    if file.endswith(".json"):
        yield from _array(file, opened)
        return
    for number, line in enumerate(opened, 1):
        if line.strip():
            yield number, _object(file, number, _parsed(file, number, line))


def _array(file, opened):
    values = _parsed(file, 1, opened.read())
    if not isinstance(values, list):
        raise EvaluationError(f"{file} holds a JSON {type(values).__name__}: expected an array of objects (or a .jsonl file).")
    for number, value in enumerate(values, 1):
        yield number, _object(file, number, value)


def _parsed(file, number, text):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise EvaluationError(f"{file}, line {line}: no JSON: {error.msg} (column {error.colno}).") from None
    except RecursionError:
        raise EvaluationError(f"{file}, line {number}: JSON that is nested too deeply.") from None


def _object(file, number, value):
    if not isinstance(value, dict):
        raise EvaluationError(f"{file}, line {number}: a JSON {type(value).__name__}, expected an object.")
    try:
        check_characters([json.dumps(value, ensure_ascii=False)])
    except TokenizerError as error:
        raise EvaluationError(f"{file}, line {number}: {error}") from None
    return value


def _csv_rows(file, opened, columns):
    reader = csv.reader(opened, strict=True)
    header = None
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                if {"question", "answer"} <= {name.strip().lower() for name in row}:
                    header = [name.strip() for name in row]
                    continue
                header = list(columns or ())
            if len(row) != len(header):
                raise EvaluationError(f"{file}, line {reader.line_num}: {len(row)} columns, expected {len(header)}: {header}.")
            yield reader.line_num, dict(zip(header, row))
    except csv.Error as error:
        raise EvaluationError(f"{file}, line {reader.line_num}: no CSV: {error}.") from None
