"""Streaming reader of `.csv` files: rows with their line numbers; never the whole file in memory.

Python's reader, not Arrow's: behind a row that is longer than a block Arrow takes a cell that begins with NUL for a part of the
rows around it, and it knows no line numbers. Tokenizing is far slower than either.
"""

import csv
import io

_READ = 1 << 18
_LONGEST_CELL = 1 << 28  # a quote that is never closed makes the rest of the file one cell


class CsvStreamError(ValueError):
    """Error: a file is no csv; `line` (int) is the place."""

    def __init__(self, line, text):
        super().__init__(text)
        self.line = line


def csv_rows(read):
    """Yield (line, cells) of each row that is not empty; the first one has the names of the columns.

    Args:
        read (Callable[[int], bytes]): reads at most so many bytes, b"" at the end; UTF-8, with or without a byte order mark.

    Raises:
        CsvStreamError: the text is broken.
    """
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(_lines(read), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise CsvStreamError(line, f"broken csv: {error}. Is a quote not closed or not doubled?") from error


def _lines(read):
    for number, line in enumerate(_byte_lines(read), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CsvStreamError(number, f"not UTF-8 text ({error.reason} at byte {error.start} of the line).") from error
        # CR alone ends a row too, as in old files; only line ends: U+2028 and the like belong to a text
        yield from io.StringIO(text, newline="") if "\r" in text[:-2] else (text,)


def _byte_lines(read):
    waiting = []
    while data := read(_READ):
        head, *others = data.split(b"\n")
        waiting.append(head)
        if others:
            yield b"".join(waiting) + b"\n"
            yield from (line + b"\n" for line in others[:-1])
            waiting = others[-1:]
    if any(waiting):
        yield b"".join(waiting)
