"""What a finding costs: what the run would gain without its cause, by replay; where that cannot be told, by facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracekit import units
from tracekit.trace import Run
from tracekit.whatif.saving import saving

_BY_FACTS = 0.7  # how much less sure a cost is that no replay tells


@dataclass(frozen=True)
class Price:
    """The time lost per step, its share of the step, how sure that is, and whether a replay tells it."""

    cost_ns: int
    ratio: float
    confidence: float
    is_replayed: bool

    @property
    def in_words(self) -> str:
        """Return what a message adds; nothing where no replay tells."""
        if not self.is_replayed:
            return ""
        return f"; without it a step takes {units.duration(self.cost_ns)} ({units.share(self.ratio)}) less"


def of(run: Run, cause: str, lost: Mapping[str, Any], confidence: float) -> Price:
    """Return what a cause costs: by replay, else as measured, `lost_ns` and `lost_ratio` of the step that is quoted."""
    saved = saving(run, cause)
    if saved.why_not or not saved.step_ns:
        return Price(lost["lost_ns"], lost["lost_ratio"], confidence * _BY_FACTS, is_replayed=False)
    ratio = min(1.0, max(0.0, saved.saved_ratio))
    return Price(max(0, saved.saved_ns), ratio, min(confidence, max(0.1, saved.confidence)), is_replayed=True)
