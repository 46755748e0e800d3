"""Parse JSON of any origin to values that can be serialized again."""

import json
from typing import Any

MAX_DEPTH = 100
"""Levels of lists and objects that a text may have: what is copied, compared or written again may recurse."""

TOO_DEEP = "[…]"
"""Text in place of a value that is nested too deeply."""


def parse(text: str | bytes, *, strict: bool = True) -> Any:
    r"""Return the value of a JSON text, without lone surrogates. `strict` is that of json.loads.

    Raises ValueError if it is not JSON, not UTF-8 or nested too deeply.

    >>> parse(r'{"host": "node\ud800-7", "smile": "\ud83d\ude00"}')
    {'host': 'node?-7', 'smile': '😀'}
    """
    escapes = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
    try:
        value = json.loads(text, strict=strict)
        if _brackets(text) > MAX_DEPTH and is_deep(value):
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        return replace_surrogates(value) if escapes else value
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None


def to_text(value: Any) -> str:
    """JSON text of a parsed value of any depth; `TOO_DEEP` for one nested more than `MAX_DEPTH` levels deep.

    >>> to_text([1, {"a": None}])
    '[1, {"a": null}]'
    """
    return TOO_DEEP if is_deep(value) else json.dumps(value)


def _brackets(text: str | bytes) -> int:
    """Return an upper bound of a JSON text's depth."""
    return text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")


def is_deep(value: Any) -> bool:
    """Whether a parsed value is nested more than `MAX_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    depth = 1
    while level and depth <= MAX_DEPTH:
        inside = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
        depth += 1
    return bool(level)


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with lone surrogates, which no encoding can represent, as '?'.

    Raises RecursionError if it is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False)
    encodable = text.encode("utf-8", "replace").decode()
    return value if encodable == text else json.loads(encodable)
