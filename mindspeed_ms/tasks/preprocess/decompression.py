"""Decompression of gzip, bzip2 and zstd files with several members; zeros may fill up the end of a file."""

import bz2
import contextlib
import gzip
import zlib

DAMAGED = (EOFError, zlib.error)  # beside OSError, of which gzip's and bz2's own errors are kinds
_READ = 1 << 18


@contextlib.contextmanager
def decompressed(raw, compression):
    """Reader of the decompressed bytes.

    Args:
        raw (BinaryIO): the compressed file.
        compression (Optional[str]): "gzip", "bz2", "zstd"; None: it is not compressed.
    """
    if compression is None:
        yield raw
    elif compression == "gzip":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    elif compression == "bz2":
        yield _Bz2Reader(raw)
    else:
        import pyarrow

        with pyarrow.CompressedInputStream(raw, compression) as stream:
            yield stream


class _Bz2Reader:
    """Reader of bzip2 members. `bz2.BZ2File` would silently stop at a damaged part behind the first member."""

    def __init__(self, raw):
        self._raw, self._member = raw, bz2.BZ2Decompressor()

    def read(self, size):
        """Read at most `size` bytes; b"" at the end."""
        while True:
            data = b""
            if self._member.eof:
                data = self._member.unused_data.lstrip(b"\0")
                while not data:
                    block = self._raw.read(_READ)
                    if not block:
                        return b""
                    data = block.lstrip(b"\0")
                self._member = bz2.BZ2Decompressor()
            elif self._member.needs_input:
                data = self._raw.read(_READ)
                if not data:
                    raise EOFError("the compressed data ends too early")
            found = self._member.decompress(data, size)
            if found:
                return found
