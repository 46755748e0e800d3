"""Document -> strict JSON: its values."""

import math
from collections.abc import Mapping
from typing import Any

from tracekit.model import escaping
from tracekit.report.document import Document


def render(document: Document) -> str:
    """Return the values of a document as JSON."""
    return escaping.json_text(document.values)


def to_json_value(value: object) -> Any:
    """Return a value of a type that JSON has: null for NaN and infinity, hex digits for bytes, text for other types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | str) else str(value)
