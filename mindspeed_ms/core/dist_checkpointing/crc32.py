"""CRC-32 with the methods of a hash: the check sum of zip files, and so of torch.save."""

import zlib


class Crc32:
    """CRC-32 of bytes that come one after another, with the methods of the hashes of `hashlib`."""

    def __init__(self):
        self._value = 0

    def update(self, data):
        """Add bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self):
        """Eight hexadecimal digits."""
        return f"{self._value:08x}"
