"""The protobuf wire format: fields by hand, and many messages at once that differ only in a few numbers.

Source: the encoding guide of Protocol Buffers. Numbers that are filled in later have a fixed width: a varint may be
longer than it needs to be, up to ten bytes.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

WIDE, NARROW = 10, 5
"""Bytes of a varint that is filled in later: any int64, or a number below NARROW_LIMIT."""
NARROW_LIMIT = 1 << 7 * NARROW
FIXED = 8
"""Bytes of a fixed64."""

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """Return a number as a varint, a negative one in two's complement of 64 bits.

    >>> varint(300).hex()
    'ac02'
    """
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def integer(field: int, value: int) -> bytes:
    """Return a field of an integer, bool or enum."""
    return varint(field << 3 | _VARINT) + varint(value)


def block(field: int, *parts: bytes) -> bytes:
    """Return a field that holds a message, of its encoded fields, or bytes.

    >>> block(1, integer(2, 5)).hex()
    '0a021005'
    """
    content = b"".join(parts)
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    """Return a field of text; a lone surrogate, which UTF-8 has no bytes for, becomes '?'."""
    return block(field, value.encode("utf-8", "replace"))


def varint_placeholder(field: int, width: int = WIDE) -> bytes:
    """Return a field of an integer that is filled in later: its tag and `width` zeros."""
    return varint(field << 3 | _VARINT) + bytes(width)


def fixed64_placeholder(field: int) -> bytes:
    """Return a field of a fixed64 that is filled in later: its tag and FIXED zeros."""
    return varint(field << 3 | _FIXED64) + bytes(FIXED)


def wide_varints(values: Ints, width: int = WIDE) -> Bytes:
    """Return numbers as varints of `width` bytes, shape (n, width). NARROW bytes need 0 <= value < NARROW_LIMIT."""
    bits = values.astype(np.int64).view(np.uint64)[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    encoded = (bits & np.uint64(0x7F)).astype(np.uint8)
    encoded[:, :-1] |= 0x80
    return encoded


def fixed64s(values: Ints | Floats) -> Bytes:
    """Return numbers as fixed64 or double, shape (n, FIXED)."""
    kind = "<f8" if values.dtype.kind == "f" else "<i8"
    return np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(-1, FIXED)


def fill_templates(templates: Sequence[bytes], which: Ints, fillings: Iterable[tuple[Ints, Ints, Bytes]]) -> bytes:
    """Return copies of templates, ``templates[which[i]]`` in order, with numbers filled in.

    A filling consists of the copies (rows of `which`), the offset in each, and the bytes, shape (n, width).
    """
    lengths = np.array([len(template) for template in templates], np.int64)
    begins = np.cumsum(lengths) - lengths
    sizes = lengths[which]
    starts = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    copies = np.frombuffer(b"".join(templates), np.uint8)[np.repeat(begins[which] - starts, sizes) + np.arange(total)]
    for rows, offsets, filling in fillings:
        copies[(starts[rows] + offsets)[:, None] + np.arange(filling.shape[1])] = filling
    return copies.tobytes()
