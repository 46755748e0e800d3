"""Parse JSON of any origin to values that can be serialized again."""

import json
from typing import Any

from tracekit.ingest import budget

_SHALLOW, _SMALL = 16, 1 << 16  # levels and characters that every budget has: most texts are lines or events

TOO_DEEP = "[…]"
"""Text in place of a value that is nested too deeply."""


def parse(text: str | bytes, *, strict: bool = True) -> Any:
    r"""Return the value of a JSON text, without lone surrogates. `strict` is that of json.loads.

    Raises ValueError if it is not JSON, not UTF-8, nested too deeply, or has far more values than documents have: the
    message then states how to allow more.

    >>> parse(r'{"host": "node\ud800-7", "smile": "\ud83d\ude00"}')
    {'host': 'node?-7', 'smile': '😀'}
    """
    escapes = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
    if len(text) > _SMALL and (problem := _problem_of_size(text)):
        raise ValueError(problem)
    try:
        value = json.loads(text, strict=strict)
        if _brackets(text) > _SHALLOW and is_deep(value):
            raise ValueError(deep())
        return replace_surrogates(value) if escapes else value
    except RecursionError:
        raise ValueError(deep()) from None


def deep() -> str:
    """Predicate of a value that is nested too deeply, with what to do."""
    return f"nested more than {budget.depth()} levels deep; {budget.remedy()}"


def parse_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    r"""The objects of a text with one JSON value a line, and how many other lines that are not empty were skipped.

    Raises ValueError for far more lines or values than logs have.

    >>> parse_lines('{"a": 1}\n3\n\n')
    ([{'a': 1}], 1)
    """
    if problem := _problem_of_size(text, values_per_line=2):
        raise ValueError(problem)
    objects, skipped = [], 0
    for line in text.splitlines():
        try:
            value = parse(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        elif line.strip():
            skipped += 1
    return objects, skipped


def to_text(value: Any) -> str:
    """JSON text of a parsed value of any depth; `TOO_DEEP` for one nested more levels deep than its budget.

    >>> to_text([1, {"a": None}])
    '[1, {"a": null}]'
    """
    return TOO_DEEP if is_deep(value) else json.dumps(value)


def _brackets(text: str | bytes) -> int:
    """Return an upper bound of a JSON text's depth."""
    return text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")


def _problem_of_size(text: str | bytes, *, values_per_line: int = 0) -> str:
    """Predicate of a text with more values than its budget, with what to do; else ''.

    A container or a comma adds at most one value to a list, or a key and its value to an object. A line adds its text.
    """
    most = budget.value_count(len(text))
    if len(text) * max(1, values_per_line) <= most:
        return ""
    if isinstance(text, bytes):
        values = _brackets(text) + text.count(b",") + values_per_line * text.count(b"\n")
    else:
        values = _brackets(text) + text.count(",") + values_per_line * text.count("\n")
    return f"has more than {most:,} values; {budget.remedy()}" if values > most else ""


def is_deep(value: Any) -> bool:
    """Whether a parsed value is nested more levels deep than its budget."""
    level = [value] if isinstance(value, dict | list) else []
    depth, most = 1, budget.depth() if level else 0
    while level and depth <= most:
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
