"""Readers of input files: batches in order, with bounded memory. pyarrow reads columns and undoes compression.

Batches depend on the file alone: the same file gives the same batches in each run, so that a run can be continued.
"""

import contextlib

from mindspeed_ms.tasks.preprocess.batches import Batch
from mindspeed_ms.tasks.preprocess.csv_stream import CsvStreamError, csv_rows
from mindspeed_ms.tasks.preprocess.decompression import DAMAGED, decompressed
from mindspeed_ms.tasks.preprocess.errors import PreprocessError, RecordError
from mindspeed_ms.tasks.preprocess.json_stream import JsonStreamError, json_objects

BATCH_BYTES = 1 << 18  # small: at the end no process works on a large rest alone
_MOST_ROWS = 8192


def read_batches(file, columns=None):
    """Yield the batches (Batch) of an InputFile.

    Args:
        file (InputFile): what to read.
        columns (Optional[list[str]]): of files with columns only these are read; None: all.

    Raises:
        PreprocessError: the file is damaged, or lacks one of `columns`.
    """
    import pyarrow

    if not file.size:
        return
    try:
        yield from _READERS[file.format](file, columns)
    except (pyarrow.ArrowException, OSError, *DAMAGED) as error:
        raise PreprocessError(
            f"{file.path} cannot be read as {file.format[1:]}: {str(error).rstrip('.')}. Is it complete, and "
            "of the format that its name says?"
        ) from error


@contextlib.contextmanager
def _opened(file):
    """Open an input file: (reader of decompressed bytes, function that returns the position in the file on disk)."""
    with open(file.path, "rb") as raw, decompressed(raw, file.compression) as stream:
        yield stream, raw.tell


def _lines(file, columns):
    """Batches of lines from blocks of whole lines; a longer line makes its block longer."""
    _check_columns(file, columns, ["text"] if file.format == ".txt" else None)
    kind, first, waiting = file.format[1:], 1, []
    with _opened(file) as (stream, position):
        while True:
            data = stream.read(BATCH_BYTES)
            end = data.rfind(b"\n") + 1
            if data and not end:
                waiting.append(data)
                continue
            block = b"".join([*waiting, data[:end] if data else b""])
            if block:
                yield Batch(file.path, kind, block, first, first == 1, position())
                first += block.count(b"\n")
            if not data:
                return
            waiting = [data[end:]] if end < len(data) else []


def _json(file, columns):
    values, size, begins = [], 0, True
    with _opened(file) as (stream, position):
        try:
            for line, text in json_objects(stream.read):
                values.append((line, text))
                size += len(text)
                if size >= BATCH_BYTES:
                    yield Batch(file.path, "json", values, values[0][0], begins, position())
                    values, size, begins = [], 0, False
        except JsonStreamError as error:
            raise RecordError(
                f"{file.path}, line {error.line}",
                f"{error} A .json file is one array of objects, or objects one after the other.",
                "broken JSON",
            ) from error
        if values:
            yield Batch(file.path, "json", values, values[0][0], begins, position())


def _parquet(file, columns):
    import pyarrow.parquet

    # without pre_buffer and with a small buffer a large row group is read page by page, not whole
    with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=BATCH_BYTES) as source:
        _check_columns(file, columns, source.schema_arrow.names)
        metadata = source.metadata
        size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        rows = max(1, min(_MOST_ROWS, BATCH_BYTES * metadata.num_rows // max(size, 1)))
        # a batch over two row groups would have two dictionaries, which Arrow cannot join inside nested columns
        groups = range(metadata.num_row_groups)
        batches = (
            batch
            for group in groups
            for batch in source.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
        )
        yield from _row_batches(file, batches, lambda first: file.size * (first - 1) // max(metadata.num_rows, 1))


def _arrow(file, columns):
    import pyarrow

    with pyarrow.OSFile(file.path, "rb") as raw:
        if raw.read(6) == b"ARROW1":
            source = pyarrow.ipc.open_file(raw)
            batches = (source.get_batch(number) for number in range(source.num_record_batches))
        else:
            raw.seek(0)
            source = batches = pyarrow.ipc.open_stream(raw)
        _check_columns(file, columns, source.schema.names)
        chosen = (batch.select(columns) if columns else batch for batch in batches)
        yield from _row_batches(file, chosen, lambda first: raw.tell())


def _csv(file, columns):
    """Batches of a csv file; all columns are text: '007' stays '007'."""
    with _opened(file) as (stream, position):
        try:
            rows = csv_rows(stream.read)
            _, names = next(rows, (1, []))
            _check_twice(file, names)
            _check_columns(file, columns, names)
            values, size, begins = [], 0, True
            for row in rows:
                values.append(row)
                size += sum(map(len, row[1]))
                if size >= BATCH_BYTES or len(values) == _MOST_ROWS:
                    yield Batch(file.path, "csv", (names, values), values[0][0], begins, position())
                    values, size, begins = [], 0, False
        except CsvStreamError as error:
            raise RecordError(f"{file.path}, line {error.line}", str(error), "broken csv") from error
        if values:
            yield Batch(file.path, "csv", (names, values), values[0][0], begins, position())


def _check_twice(file, names):
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise PreprocessError(
            f"{file.path}: the first line of a csv file names its columns, but {sorted(twice)[0]!r} stands there twice."
        )


def _row_batches(file, batches, consumed):
    """Batches of about BATCH_BYTES of rows, from larger or smaller ones."""
    import pyarrow

    first = 1
    for batch in batches:
        step = max(1, min(_MOST_ROWS, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, step):
            part, sink = batch.slice(start, step), pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, part.schema) as writer:
                writer.write_batch(part)
            yield Batch(file.path, "rows", sink.getvalue().to_pybytes(), first, first == 1, consumed(first + part.num_rows))
            first += part.num_rows


def _check_columns(file, columns, names):
    missing = [name for name in columns or () if names is not None and name not in names]
    if missing:
        raise PreprocessError(
            f"{file.path}: asked for the key {missing[0]!r}, found {', '.join(map(repr, names)) or 'none'}. "
            "Name the right one with --json-keys KEY..."
        )


def count_bytes(files):
    """Total bytes of the files, for progress."""
    return sum(file.size for file in files)


_READERS = {".jsonl": _lines, ".txt": _lines, ".json": _json, ".parquet": _parquet, ".arrow": _arrow, ".csv": _csv}
