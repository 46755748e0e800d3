"""Patterns of a memory snapshot's pickle: events of a known layout are matched at once, not opcode by opcode."""

import re
from functools import lru_cache

MOST_KEYS = 16
MEMOIZE = b"\x94"

_REFERENCE = rb"(?:h.|j.{4})"
_PUT = rb"(?:\x94|q.|r.{4})?"
_SIZED = rb"(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_INTEGER = rb"K.|M..|J.{4}|\x8a" + _SIZED
_TEXT = rb"\x8c" + _SIZED + _PUT
# A list that continues in a second batch is read by opcodes.
_STACK = rb"\]%b\(%b+e(?!\()" % (_PUT, _REFERENCE)

ONE_REFERENCE = re.compile(_REFERENCE, re.DOTALL)
KNOWN_STACK = re.compile(rb"\](%b)\((%b+)e(?!\()" % (_PUT, _REFERENCE), re.DOTALL)
"""A list of references only, such as a stack of frames. Groups: the opcode that memoizes it, the references."""


@lru_cache(maxsize=64)
def event_with_keys(keys: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Return the pattern of one such dict with exactly these keys. Groups: each value.

    All values are memoized by MEMOIZE, as the standard library's pickler writes since protocol 4.
    """
    text = rb"\x8c" + _SIZED + MEMOIZE
    stack = rb"\]\x94\((?:%b)++e(?!\()" % _REFERENCE
    value = b"|".join((_REFERENCE, _INTEGER, text, stack))
    return re.compile(rb"\}\x94\(" + b"".join(re.escape(key) + b"(" + value + b")" for key in keys) + b"u", re.DOTALL)


@lru_cache
def dict_of_size(keys: int) -> re.Pattern[bytes]:
    """Return the pattern of a dict with `keys` keys that are references.

    Groups: the opcode that memoizes it; then each key and its value: a reference, an integer, a short text or a list of
    references.
    """
    pair = rb"(%b)(%b)" % (_REFERENCE, b"|".join((_REFERENCE, _INTEGER, _TEXT, _STACK)))
    return re.compile(rb"\}(%b)\(%bu" % (_PUT, pair * keys), re.DOTALL)
