"""Types of fields and readers of single values: numbers, switches, data types, lists."""

import ast
import json
import math
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from mindspeed_ms.config.patterns import read_pattern

_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
_DTYPES = {"float32": ("fp32", "float", "single"), "float16": ("fp16", "half"), "bfloat16": ("bf16",)}
DTYPE_NAMES = tuple(_DTYPES)


def read_bool(value):
    """True or False from a bool, 0/1, or the words true/false, yes/no, on/off.

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("not a switch")


def read_int(value):
    """int from an int, a float without fraction (1e4), or a string of either ("1_000"). A bool is no number.

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, str):
        text = value.strip()
        value = float(text) if any(mark in text.lower() for mark in ".e") else int(text)
    if isinstance(value, bool) or not hasattr(value, "__int__"):
        raise ValueError("not an integer")
    if int(value) != value:
        raise ValueError("not an integer")
    return int(value)


def read_float(value):
    """float from an int, a float or a string of one ("1e-5"). A bool, nan and infinity are no numbers here.

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__float__")):
        raise ValueError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def read_dtype(value):
    """ "float32", "float16" or "bfloat16" from their usual spellings or from a dtype of MindSpore, numpy or torch.

    Raises:
        ValueError: if it is another type.
    """
    word = str(getattr(value, "__name__", value)).strip().lower().rsplit(".", 1)[-1]
    for name, spellings in _DTYPES.items():
        if word == name or word in spellings:
            return name
    raise ValueError("not a data type")


def read_str(value):
    """str; numbers and switches are no strings.

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, str):
        return value
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise ValueError("not a string")


def read_list(value):
    """list from a list or tuple, from its text ("[[4, 4], [4, 2]]"), or from text with commas or blanks ("4,4,2", "4 4 2").

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[:1] not in ("[", "("):
            text = f"[{text}]"
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            value = text[1:-1].replace(",", " ").split()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [read_list(item) if isinstance(item, (list, tuple)) else item for item in value]
    raise ValueError("not a list")


def read_words(value):
    """list of strings from a list, or from a string separated by blanks or commas.

    Raises:
        ValueError: if it is something else.
    """
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, (list, tuple)):
        return [item if isinstance(item, str) else str(item) for item in value]
    raise ValueError("not a list")


def read_layer_list(value):
    """`[n, ...]` or `[[n, ...], ...]` of whole numbers, all rows of one length.

    Raises:
        ValueError: if it is something else.
    """
    rows = read_list(value)
    if not rows:
        raise ValueError("empty")
    if not any(isinstance(row, list) for row in rows):
        return [read_int(item) for item in rows]
    if not all(isinstance(row, list) for row in rows) or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("rows of different length")
    return [[read_int(item) for item in row] for row in rows]


def read_int_list(value):
    """list of ints; see `read_list`.

    Raises:
        ValueError: if it is something else.
    """
    return [read_int(item) for item in read_list(value)]


def read_layer_pattern(value):
    """list of ints from a number, a list, or the text of one, such as "([1]*3+[0]*1)*3".

    Raises:
        ValueError: if it is something else.
    """
    if not isinstance(value, str):
        return read_int_list(value)
    try:
        return read_int_list(read_pattern(value))
    except ValueError:
        return read_int_list(value.strip() or None)


def read_float_list(value):
    """list of floats; see `read_list`.

    Raises:
        ValueError: if it is something else.
    """
    return [read_float(item) for item in read_list(value)]


def read_json_mapping(value):
    """Dict of a mapping, or of its text: JSON, or as Python writes it.

    Raises:
        ValueError: if it is something else.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except json.JSONDecodeError as error:
            try:
                found = ast.literal_eval(value.strip())
            except (SyntaxError, MemoryError, RecursionError):
                raise ValueError(f"neither JSON nor Python: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


class Kind(str):
    """Name of a field's type in errors, such as "expects KIND"; found in the field's annotation."""


def _kind(python_type, reader, words, schema=None, **limits):
    marks = [Field(**limits)] if limits else []
    marks += [BeforeValidator(reader), Kind(words)]
    if schema:
        marks.append(WithJsonSchema(schema))
    return Annotated[(python_type, *marks)]


_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _limits_text(limits):
    return " and ".join(f"{_SIGNS[name]} {limit}" for name, limit in limits.items())


def integer(**limits):
    """Type of a whole number within `gt`, `ge`, `lt`, `le`."""
    return _kind(int, read_int, f"an integer {_limits_text(limits)}".strip(), **limits)


def number(**limits):
    """Type of a float within `gt`, `ge`, `lt`, `le`; whole numbers are read as floats."""
    return _kind(float, read_float, f"a number {_limits_text(limits)}".strip(), **limits)


class Explained(Kind):
    """Kind of a string that is one of some choices; `reasons` says why further known words are none of them."""

    reasons = MappingProxyType({})


def one_of(*choices, reasons=None):
    """Type of a string that is one of `choices`; `reasons` (dict) says why further known words are none of them.

    The word none, which files and flags read as null, is one if it is listed.
    """
    kind = Explained("one of " + ", ".join(choices))
    kind.reasons = reasons or {}
    if "none" not in choices:
        return Annotated[Literal[choices], kind]
    return Annotated[Literal[choices], BeforeValidator(lambda value: "none" if value is None else value), kind]


class Registered(Kind):
    """Kind of a string field whose choices are those of a registry, at any time."""

    def __new__(cls, choices):
        """`choices` returns them."""
        kind = super().__new__(cls, "a registered kind")
        kind.choices = choices
        return kind

    def __str__(self):
        return "one of " + ", ".join(self.choices())

    def __get_pydantic_json_schema__(self, core_schema, handler):
        return {"type": "string", "enum": list(self.choices())}


def registered(choices):
    """Type of a string that is one of `choices()`, asked whenever a value is checked: users may register more."""

    def read(value):
        if value not in choices():
            raise ValueError("not registered")
        return value

    return Annotated[str, BeforeValidator(read), Registered(choices)]


_LIST_OR_TEXT = {"anyOf": [{"type": "array"}, {"type": "string"}]}
Bool = _kind(bool, read_bool, "a switch: True or False (also yes/no, on/off)")
Int = integer()
PositiveInt = integer(gt=0)
Count = integer(ge=0)
Float = number()
PositiveFloat = number(gt=0)
NotNegative = number(ge=0)
Probability = number(ge=0, le=1)
Str = _kind(str, read_str, "a string")
Dtype = _kind(str, read_dtype, "one of float32, float16, bfloat16", {"type": "string", "enum": list(DTYPE_NAMES)})
LayerList = _kind(list, read_layer_list, "a list of integers, or one such list per stage, all of one length", _LIST_OR_TEXT)
IntList = _kind(list[int], read_int_list, "a list of integers", _LIST_OR_TEXT)
LayerPattern = _kind(
    list[int],
    read_layer_pattern,
    "a whole number, a list of integers, or a pattern such as ([1]*3+[0]*1)*3",
    {"anyOf": [{"type": "integer"}, {"type": "array"}, {"type": "string"}]},
)
FloatList = _kind(list[float], read_float_list, "a list of numbers", _LIST_OR_TEXT)
StrList = _kind(list[str], read_words, "a list of words", _LIST_OR_TEXT)
JsonMapping = _kind(
    dict, read_json_mapping, "a mapping, or one as JSON text", {"anyOf": [{"type": "object"}, {"type": "string"}]}
)
Free = Annotated[Any, Kind("anything")]
