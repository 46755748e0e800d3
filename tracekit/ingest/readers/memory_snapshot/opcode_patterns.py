"""What a memory snapshot's pickle consists of, as patterns: told once by opcodes, it is then read by its shape."""

import re
from functools import lru_cache

MOST_KEYS = 16
MEMOIZE = b"\x94"

_REFERENCE = rb"(?:h.|j.{4})"
_PUT = rb"(?:\x94|q.|r.{4})?"
_SIZED = rb"(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_INTEGER = rb"K.|M..|J.{4}|\x8a" + _SIZED
_TEXT = rb"\x8c" + _SIZED + _PUT
# A list that goes on in a second batch is left to the opcodes.
_STACK = rb"\]%b\(%b+e(?!\()" % (_PUT, _REFERENCE)

ONE_REFERENCE = re.compile(_REFERENCE, re.DOTALL)
KNOWN_STACK = re.compile(rb"\](%b)\((%b+)e(?!\()" % (_PUT, _REFERENCE), re.DOTALL)
"""A list of nothing but references, as stacks of frames are. Groups: how it is remembered, the references."""


@lru_cache(maxsize=64)
def event_with_keys(keys: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Return the pattern of one such dict with these very keys. Groups: each value.

    All is remembered by MEMOIZE, as the pickler of the standard library writes it from protocol 4 on.
    """
    text = rb"\x8c" + _SIZED + MEMOIZE
    stack = rb"\]\x94\((?:%b)++e(?!\()" % _REFERENCE
    value = b"|".join((_REFERENCE, _INTEGER, text, stack))
    return re.compile(rb"\}\x94\(" + b"".join(re.escape(key) + b"(" + value + b")" for key in keys) + b"u", re.DOTALL)


@lru_cache
def dict_of_size(keys: int) -> re.Pattern[bytes]:
    """Return the pattern of a dict whose `keys` keys were told before.

    Groups: how it is remembered; then each key and its value, which is a reference, an integer, a short text or a list
    of references.
    """
    pair = rb"(%b)(%b)" % (_REFERENCE, b"|".join((_REFERENCE, _INTEGER, _TEXT, _STACK)))
    return re.compile(rb"\}(%b)\(%bu" % (_PUT, pair * keys), re.DOTALL)
