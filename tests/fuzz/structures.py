"""Changes within the structure of binary files: fields of protobuf, cells of SQLite, opcodes of pickles."""

import contextlib
import itertools
import pickletools
import sqlite3
import struct
from random import Random
from typing import TypeAlias

from tests.fuzz import mutations

Field: TypeAlias = tuple[int, int, int | bytes]
"""Number, wire type, and value: an integer, or the bytes of a field that has a length."""

_VARINT, _FIXED64, LENGTH, _FIXED32 = 0, 1, 2, 5
_INTEGERS = (0, 1, 2, 3, 6, 63, 64, 127, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63)
_BITS = tuple(
    int.from_bytes(struct.pack("<d", number), "little") for number in (float("nan"), float("inf"), 1e308, -1.0, 5e-324)
)
_TEXTS = (
    *("", "x", "\x00", "null", "[]", "{}", "[1]", '{"a":[1]}', "[[[[1]]]]", '"x"', "[1e400]", "NaN", "1e999", "-5"),
    *("[" * 3000 + "]" * 3000, '{"a":' * 3000, "9" * 5000, "[" + "9" * 400 + "]", '["a", null, {"b": 2}]', "\u202e"),
    *(
        "rank 99999999",
        "rank -1",
        "host",
        "compute",
        "ProfilerStep#99999999999999999999",
        "1x2x3",
        "0x0x0",
        "a" * 70_000,
    ),
)


# Protobuf ------------------------------------------------------------------------------------------------------------


def protobuf(data: bytes, random: Random) -> bytes:
    """Return a message in which one field, at some depth, has another value or type, is gone, moved, or repeated."""
    fields = _parsed(data)
    if not fields:
        return mutations.text(data, random)
    at = random.randrange(len(fields))
    number, kind, value = fields[at]
    is_message = isinstance(value, bytes) and bool(_parsed(value)) and not value.isascii()
    if isinstance(value, bytes) and (is_message or _parsed(value)) and random.random() < (0.9 if is_message else 0.4):
        fields[at] = (number, kind, protobuf(value, random))
        return b"".join(map(encoded, fields))
    draw = random.random()
    if draw < 0.15:
        del fields[at]
    elif draw < 0.25:
        fields[at:at] = [fields[at]] * random.choice((1, 2, 50))
    elif draw < 0.3:
        other = random.randrange(len(fields))
        fields[at], fields[other] = fields[other], fields[at]
    elif draw < 0.35:
        fields[at] = (random.choice((1, 3, 10, 45, 536_870_911)), kind, value)
    elif draw < 0.45:
        fields[at] = (number, *_any_value(random))
    else:
        fields[at] = (number, kind, _value_like(value, kind, random))
    return b"".join(map(encoded, fields))


def _any_value(random: Random) -> tuple[int, int | bytes]:
    kind = random.choice((_VARINT, _FIXED64, LENGTH, _FIXED32))
    return kind, _value_like(b"" if kind == LENGTH else 0, kind, random)


def _value_like(value: int | bytes, kind: int, random: Random) -> int | bytes:
    if isinstance(value, bytes):
        texts = random.choice(_TEXTS).encode(), random.randbytes(random.choice((1, 8, 40)))
        return random.choice((*texts, texts[0], value[: len(value) // 2]))
    if kind == _FIXED64 and random.random() < 0.5:
        return random.choice(_BITS)
    near = (value + 1, value - 1, -value)
    return random.choice((*_INTEGERS, *near)) & ((1 << 64) - 1)


def _parsed(data: bytes) -> list[Field] | None:
    """Return the fields of a message, None if the bytes are none."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29 or at < 0:
            return None
        if kind == _VARINT:
            value, at = _varint(data, at)
            fields.append((number, kind, value))
        elif kind in (_FIXED64, _FIXED32):
            width = 8 if kind == _FIXED64 else 4
            fields.append((number, kind, int.from_bytes(data[at : at + width], "little")))
            at += width
        elif kind == LENGTH:
            size, at = _varint(data, at)
            if at < 0:
                return None
            fields.append((number, kind, data[at : at + size]))
            at += size
        else:
            return None
        if at < 0 or at > len(data):
            return None
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and where it ends, -1 if it does not."""
    value = 0
    for place in range(10):
        if at + place >= len(data):
            return 0, -1
        value |= (data[at + place] & 0x7F) << (7 * place)
        if data[at + place] < 0x80:
            return value, at + place + 1
    return 0, -1


def encoded(field: Field) -> bytes:
    number, kind, value = field
    tag = _varint_bytes(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint_bytes(len(value)) + value
    if kind == _VARINT:
        return tag + _varint_bytes(value)
    width = 8 if kind == _FIXED64 else 4
    return tag + (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _varint_bytes(value: int) -> bytes:
    encoded = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


# SQLite --------------------------------------------------------------------------------------------------------------

_CELLS = (
    *(None, -1, 0, 1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63), 1.5, 1e308, float("inf"), "", "x", "NaN"),
    *("1e400", "\x00", b"", b"\xff\xfe", "[" * 3000, "{}", '{"a":1}', "\u202e", "9" * 400, "rank 7", "a" * 70_000),
)


def sqlite(data: bytes, random: Random) -> bytes:
    """Return a database in which cells of a table have other values, or rows, a column or a table are missing."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.deserialize(data)
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    filled = [name for name in tables if database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone()]
    if not tables:
        return data
    table = random.choice(filled if filled and random.random() < 0.9 else tables)
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    with contextlib.suppress(sqlite3.Error):  # such as a second row with the same key
        _change(database, table, column, random)
    changed = database.serialize()
    database.close()
    return changed


def _change(database: sqlite3.Connection, table: str, column: str, random: Random) -> None:
    rows = [row[0] for row in database.execute(f'SELECT rowid FROM "{table}"')]
    some = f"WHERE rowid = {random.choice(rows)}" if rows else ""
    where = some if random.random() < 0.7 else ""
    draw = random.random()
    if draw < 0.7:
        database.execute(f'UPDATE "{table}" SET "{column}" = ? {where}', (random.choice(_CELLS),))
    elif draw < 0.8:
        database.execute(f'DELETE FROM "{table}" {where}')
    elif draw < 0.87:
        database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
    elif draw < 0.92:
        database.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO other')
    elif draw < 0.95:
        database.execute(f'DROP TABLE "{table}"')
    else:
        database.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')


# Pickle --------------------------------------------------------------------------------------------------------------


def pickled(data: bytes, random: Random) -> bytes:
    """Return a pickle in which one opcode is gone, repeated, moved or another's, or has another argument."""
    try:
        places = [place for _, _, place in pickletools.genops(data) if place is not None]
    except ValueError:
        return mutations.text(data, random)
    edges = [*places, len(data)]
    codes = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    at = random.randrange(len(codes))
    draw = random.random()
    if draw < 0.2:
        del codes[at]
    elif draw < 0.35:
        codes[at:at] = [codes[at]] * random.choice((1, 2, 100))
    elif draw < 0.5:
        other = random.randrange(len(codes))
        codes[at], codes[other] = codes[other], codes[at]
    elif draw < 0.65:
        codes[at] = random.choice(codes)
    else:
        codes[at] = random.choice(_OPCODES)
    return b"".join(codes)


_OPCODES = (
    b"N", b"]", b"}", b")", b"\x88", b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + bytes(8) + b"\x01",
    b"G\x7f\xf8" + bytes(6), b"G\x7f\xf0" + bytes(6), b"X\x01\x00\x00\x00x", b"\x8c\x00", b"C\x01\xff", b"0", b"2",
    b"(", b"t", b"a", b"e", b"s", b"u", b"b", b"R", b"\x81", b"\x85", b"\x86", b"\x94", b"h\x00", b"j\xff\xff\xff\x7f",
    b".", b"cos\nsystem\n", b"\x8f", b"\x90", b"\x91", b"Q", b"L" + b"9" * 5000 + b"L\n", b"F1e999\n", b"I1\n",
)  # fmt: skip
