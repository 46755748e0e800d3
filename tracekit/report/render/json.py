"""Document -> strict JSON: its values."""

import json

from tracekit.report.document import Document


def render(document: Document) -> str:
    """Return the values of a document as JSON."""
    return json.dumps(document.values, indent=2, ensure_ascii=document.is_ascii, allow_nan=False) + "\n"
