"""Table of a zip file's records, for the kind that torch.save writes: not compressed, nothing outside of the file."""

import os
import struct

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import shown

_END = struct.Struct("<4s4H2LH")
_END64_PLACE = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LARGE16, _LARGE32 = 0xFFFF, 0xFFFFFFFF
_MOST_TABLE_BYTES = 256 << 20


def read_records(descriptor, path, start, stop, sums=None):
    """Records of the zip file in bytes `start` to `stop` of an open file: {name: (first byte, end)}, absolute.

    `sums`, a dict, gets the check sum (CRC-32) that the table says of each.

    Raises:
        CheckpointError: truncated, damaged, compressed, or with names or places outside of it.
    """
    try:
        return _read_records(descriptor, start, stop, {} if sums is None else sums)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {error}.") from error


def _read_records(descriptor, start, stop, sums):
    tail_start = max(start, stop - _END.size - _LARGE16)
    tail = os.pread(descriptor, stop - tail_start, tail_start)
    place = tail.rfind(b"PK\5\6")
    if place < 0 or place + _END.size > len(tail):
        raise ValueError("it is truncated: the table of its records, at its end, is missing")
    _, _, _, _, count, size, offset, comment = _END.unpack_from(tail, place)
    end = tail_start + place
    if end + _END.size + comment != stop:
        raise ValueError("bytes follow the table of its records")
    if count == _LARGE16 or size == _LARGE32 or offset == _LARGE32:
        signature, _, place64, _ = _END64_PLACE.unpack(_part(descriptor, end - _END64_PLACE.size, end, start, end))
        first = start + place64
        fields = _END64.unpack(_part(descriptor, first, first + _END64.size, start, end))
        if signature != b"PK\6\7" or fields[0] != b"PK\6\6":
            raise ValueError("the table of its records is damaged")
        (count, size, offset), end = fields[7:], first
    table_start = start + offset
    if size > _MOST_TABLE_BYTES or count * _ENTRY.size > size:
        raise ValueError(f"its table says {count} records in {size} bytes")
    table = _part(descriptor, table_start, table_start + size, start, end)
    records, position = {}, 0
    for _ in range(count):
        name, nbytes, offset, position, checksum = _entry(table, position)
        if name in records:
            raise ValueError(f"it has two records {shown(name)}")
        sums[name] = checksum
        records[name] = _place(descriptor, name, nbytes, start, start + offset, table_start)
    _check_apart(records)
    return records


def _part(descriptor, first, last, start, stop):
    """Bytes `first` to `last`, which must be within `start` to `stop`."""
    if not start <= first <= last <= stop:
        raise ValueError("the table of its records points outside of it")
    data = os.pread(descriptor, last - first, first)
    if len(data) != last - first:
        raise ValueError("it is truncated")
    return data


def _entry(table, position):
    """Name, bytes and offset of the record described at `position` of the table, the position of the next one, its CRC-32."""
    signature, _, _, flags, method, _, _, checksum, stored, size, name_bytes, extra_bytes, comment_bytes, _, _, _, offset = (
        _ENTRY.unpack_from(table, position)
    )
    if signature != b"PK\1\2":
        raise ValueError("the table of its records is damaged")
    name_start = position + _ENTRY.size
    extra_start = name_start + name_bytes
    after = extra_start + extra_bytes + comment_bytes
    if after > len(table):
        raise ValueError("the table of its records is damaged")
    name = table[name_start:extra_start].decode()
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise ValueError(f"its record {shown(name)} has a name outside of the file's own folder")
    if _LARGE32 in (size, stored, offset):
        size, stored, offset = _large(table[extra_start : extra_start + extra_bytes], size, stored, offset)
    if flags & 1 or method or stored != size:
        raise ValueError(
            f"its record {shown(name)} is {'encrypted' if flags & 1 else 'compressed'}: torch.save stores it plain"
        )
    return name, size, offset, after, checksum


def _large(extra, *values):
    """Values of which those that are 0xFFFFFFFF are replaced by the 64-bit ones of the zip64 field."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            large = iter(
                struct.unpack(f"<{min(size, len(extra) - 4) // 8}Q", extra[4 : 4 + min(size, len(extra) - 4) // 8 * 8])
            )
            values = [next(large, None) if value == _LARGE32 else value for value in values]
            break
        extra = extra[4 + size :]
    if None in values:
        raise ValueError("the table of its records is damaged")
    return values


def _place(descriptor, name, nbytes, start, offset, stop):
    """First byte and end of a record's data; `offset` is that of its header, `stop` the end of all records."""
    if not start <= offset <= stop - _LOCAL.size:
        raise ValueError(f"its record {shown(name)} is outside of it")
    encoded = name.encode()
    header = os.pread(descriptor, _LOCAL.size + len(encoded), offset)
    signature, _, _, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    if signature != b"PK\3\4" or method or header[_LOCAL.size :] != encoded or name_bytes != len(encoded):
        raise ValueError(f"the header of its record {shown(name)} is damaged")
    first = offset + _LOCAL.size + name_bytes + extra_bytes
    if first + nbytes > stop:
        raise ValueError(f"its record {shown(name)} is outside of it")
    return first, first + nbytes


def _check_apart(records):
    end, before = 0, ""
    for name, (first, last) in sorted(records.items(), key=lambda record: record[1]):
        if first < end:
            raise ValueError(f"its records {shown(before)} and {shown(name)} overlap")
        end, before = last, name
