"""JSON that somebody else wrote, read so that whatever it says can be written again."""

import json
from typing import Any


def parse(text: str | bytes, *, strict: bool = True) -> Any:
    r"""Return what JSON says, `writable`. `strict` is that of json.loads.

    Raises ValueError where it is no JSON, no UTF-8, or nested too deeply to be read.

    >>> parsed(r'{"host": "node\ud800-7", "smile": "\ud83d\ude00"}')
    {'host': 'node?-7', 'smile': '😀'}
    """
    escapes = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
    try:
        found = json.loads(text, strict=strict)
        return replace_surrogates(found) if escapes else found
    except RecursionError:
        raise ValueError("nested too deeply") from None


def replace_surrogates(found: Any) -> Any:
    """Return what JSON said with halves of characters, which it can name and no encoding can write, as '?'.

    Raises RecursionError where it is nested too deeply.
    """
    told = json.dumps(found, ensure_ascii=False)
    written = told.encode("utf-8", "replace").decode()
    return found if written == told else json.loads(written)
