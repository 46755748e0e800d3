"""The distributed job of a trace, as the header of its file states it."""

from collections.abc import Mapping
from typing import Any

from tracekit.model.manifest import MAX_RANKS


def distributed_info(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The distributed job as a header states it; empty if it states none."""
    info = header.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def stated_rank(value: object, *, lowest: int) -> int | None:
    """Return a rank, or a number of ranks, that a header states; None if it is not plausible."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if lowest <= value < MAX_RANKS + lowest else None
