"""Changes of texts, bytes and values, drawn from a random generator."""

import copy
import json
import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (
    "1e400", "-1e400", "1e999999999", "1e999990", "NaN", "Infinity", "-Infinity", "9223372036854775808",
    "-9223372036854775809", "170141183460469231731687303715884105728", "9" * 5000, "0.1e-999999999", "-0.0", "-1",
    "4611686018427387904", "18446744073709551615", "1e308", "5e-324", "0.1",
)  # fmt: skip
NUMBERS_IN_NAMES = (
    "0", "00", "-1", "1.5", "2147483648", "4611686018427387904", "9223372036854775807", "9223372036854775808",
    "99999999999999999999", "9" * 400, "9" * 5000, "\u0663", "\u00b2", "x", "",
)  # fmt: skip
VALUES = (
    None, True, False, -1, 0, 1 << 31, 1 << 62, 1 << 63, -(1 << 63) - 1, 1 << 200, 1.5, 1e308, math.inf, -math.inf,
    math.nan, "", "x", "1e400", "NaN", "\x00", "\ud800", "::error::x", "=1+1", "\x1b[31m", "<b>", "\u202e", "../../x",
    [], [1], {}, {"a": {"b": [None]}}, [[1, "a"], None],
)  # fmt: skip
DEPTHS = (60, 900, 1100, 20_000, 200_000)
BRACKETS = (*'[]{}",:\\', "\x00", " ", "a", "\n", "\u00e9")
PLACE = "@PLACE@"


def value(document: Any, random: Random) -> Any:
    """Return a copy of a JSON-like value in which one item, somewhere, is another, is gone, or stands twice."""
    changed = copy.deepcopy(document)
    holder, key = _somewhere(changed, random)
    if holder is None:
        return random.choice(VALUES)
    draw = random.random()
    if draw < 0.15:
        del holder[key]
    elif draw < 0.25 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * random.choice((1, 2, 50))
    elif draw < 0.5 and isinstance(holder[key], str) and any(map(str.isdecimal, holder[key])):
        holder[key] = digits(holder[key], random)
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    return changed


def digits(text: str, random: Random) -> str:
    """Return a text in which the number, or one of several, is another: a step, a rank, a size in a name."""
    begin, end = random.choice([found.span() for found in re.finditer(r"\d+", text)])
    return text[:begin] + random.choice(NUMBERS_IN_NAMES) + text[end:]


def number_place(document: Any, random: Random) -> tuple[Any, Any]:
    """Return a container in the document and the key of a number in it. Raises ValueError if there is none."""
    for _ in range(1000):
        holder, key = _leaf(document, random)
        if holder is not None and type(holder[key]) in (int, float):
            return holder, key
    raise ValueError("no number")


def _leaf(document: Any, random: Random) -> tuple[Any, Any]:
    holder, key = None, None
    while isinstance(document, dict | list) and document:
        holder, key = document, random.choice(list(document) if isinstance(document, dict) else range(len(document)))
        document = holder[key]
    return holder, key


def _somewhere(document: Any, random: Random) -> tuple[Any, Any]:
    """Return a container in the document and the key of one of its items; None, None if there is none."""
    holder, key = None, None
    current = document
    while isinstance(current, dict | list) and current:
        holder, key = current, random.choice(list(current) if isinstance(current, dict) else range(len(current)))
        current = holder[key]
        if random.random() < 0.25:
            break
    return holder, key


def json_text(document: Any, random: Random) -> str:
    """Return the JSON text of a document in which a value is a number beyond all types, or nested deeply."""
    changed = copy.deepcopy(document)
    holder, key = _somewhere(changed, random)
    if holder is None:
        return random.choice(NUMBERS)
    holder[key] = PLACE
    return json.dumps(changed).replace(f'"{PLACE}"', random.choice(NUMBERS) if random.random() < 0.6 else _deep(random))


def _deep(random: Random) -> str:
    depth = random.choice(DEPTHS)
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    return opening * depth + ("1" if opening != "[" else "") + (closing * depth if random.random() < 0.8 else "")


def text(data: bytes, random: Random) -> bytes:
    """Return bytes with a part cut out, repeated, moved, replaced or flipped, or with stray bytes."""
    changes: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _cut, _repeat, _stray, _truncate, _swap)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        data = random.choice(changes)(data, random)
    return data


def _span(data: bytes, random: Random) -> tuple[int, int]:
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + random.choice((1, 2, 8, 100, 4000)))


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\xff"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _cut(data: bytes, random: Random) -> bytes:
    begin, end = _span(data, random)
    return data[:begin] + data[end:]


def _repeat(data: bytes, random: Random) -> bytes:
    begin, end = _span(data, random)
    return data[:end] + data[begin:end] * random.choice((1, 3, 100)) + data[end:]


def _stray(data: bytes, random: Random) -> bytes:
    at = random.choice((0, len(data), random.randrange(len(data) + 1)))
    return data[:at] + random.choice(BRACKETS).encode() * random.choice((1, 1, 10, 3000, 60_000)) + data[at:]


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _swap(data: bytes, random: Random) -> bytes:
    begin, end = _span(data, random)
    at = random.randrange(len(data) + 1)
    part = data[begin:end]
    rest = data[:begin] + data[end:]
    return rest[:at] + part + rest[at:]
