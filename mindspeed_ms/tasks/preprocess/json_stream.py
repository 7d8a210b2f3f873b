"""Streaming reader of `.json` files: an array of objects, or objects in sequence; never the whole file in memory."""

import codecs
import json
import re

_SPACE = re.compile(r"[ \t\r\n]*")
_READ = 1 << 18
_MARGIN = 8  # an escape or a literal that the end of the buffer cuts is shorter
_DECODER = json.JSONDecoder()


class JsonStreamError(ValueError):
    """Error: a file is no JSON; `line` (int) is the place."""

    def __init__(self, line, text):
        super().__init__(text)
        self.line = line


def json_objects(read):
    """Yield (line, text) of each element of an array, or of each value of a sequence of values.

    Args:
        read (Callable[[int], bytes]): reads at most so many bytes, b"" at the end; UTF-8.

    Raises:
        JsonStreamError: the text is broken; the line of the break is named.
    """
    buffer = _Buffer(read)
    first = buffer.peek()
    if not first:
        return
    in_array = first == "["
    if in_array:
        buffer.skip(1)
        if buffer.peek() == "]":
            return _expect_end(buffer)
    while buffer.peek():
        yield buffer.value()
        after = buffer.peek()
        if in_array:
            if after == "]":
                return _expect_end(buffer)
            if after not in (",", ""):
                raise JsonStreamError(buffer.line, f"expected ',' or ']' behind an element, found {after!r}.")
            buffer.skip(1)
    if in_array:
        raise JsonStreamError(buffer.line, "the array does not end with ']': is the file complete?")
    return None


def _expect_end(buffer):
    buffer.skip(1)
    if buffer.peek():
        raise JsonStreamError(buffer.line, f"the array ends here, but more follows: {buffer.text[:40]!r}.")


class _Buffer:
    """Unconsumed part of the text.

    Attributes:
        text (str), position (int): the buffered text and where the unread part of it begins.
        line (int): number of the line that `position` is in, from 1.
    """

    def __init__(self, read):
        self._read, self._decoder = read, codecs.getincrementaldecoder("utf-8-sig")()
        self._ended = False
        self.text, self.position, self.line = "", 0, 1

    def _more(self, size=_READ):
        """Read further text; False at the end of the file."""
        if self._ended:
            return False
        data = self._read(size)
        self._ended = not data
        try:
            self.text = self.text[self.position :] + self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.position) + data.count(b"\n", 0, error.start)
            raise JsonStreamError(line, f"not UTF-8 text ({error.reason}).") from error
        self.position = 0
        return True

    def peek(self):
        """Next character that is no space; "" at the end."""
        while True:
            self.skip(_SPACE.match(self.text, self.position).end() - self.position)
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._more():
                return ""

    def skip(self, count):
        """Consume `count` characters."""
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count

    def value(self):
        """Consume the next value: (line, text)."""
        size = _READ
        while True:
            try:
                _, end = _DECODER.raw_decode(self.text, self.position)
                line, text = self.line, self.text[self.position : end]
                self.skip(end - self.position)
                return line, text
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _MARGIN
                if not (cut and self._more(size)):
                    line = self.line + self.text.count("\n", self.position, error.pos)
                    raise JsonStreamError(line, f"broken JSON: {error.msg}.") from error
                size *= 2  # a long value is not parsed again for each small piece
