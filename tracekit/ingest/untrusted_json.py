"""Parse JSON of any origin to values that can be serialized again."""

import json
from typing import Any


def parse(text: str | bytes, *, strict: bool = True) -> Any:
    r"""Return the value of a JSON text, without lone surrogates. `strict` is that of json.loads.

    Raises ValueError if it is not JSON, not UTF-8 or nested too deeply.

    >>> parse(r'{"host": "node\ud800-7", "smile": "\ud83d\ude00"}')
    {'host': 'node?-7', 'smile': '😀'}
    """
    escapes = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
    try:
        value = json.loads(text, strict=strict)
        return replace_surrogates(value) if escapes else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with lone surrogates, which no encoding can represent, as '?'.

    Raises RecursionError if it is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False)
    encodable = text.encode("utf-8", "replace").decode()
    return value if encodable == text else json.loads(encodable)
