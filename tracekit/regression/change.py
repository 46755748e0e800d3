"""The change of one metric between two runs, and the verdict on it."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.regression.metrics import metric_of


class Verdict(StrEnum):
    """The result of comparing one metric, from the candidate's point of view."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Change:
    """How one metric differs between the reference and the candidate.

    Medians are over steps, their mean over recordings, in the metric's own unit. `change` and its interval `low` to
    `high` are relative to the reference, or in points (0.01 = one) for a share; they are null where the reference is
    0, and the interval also where there are too few samples.
    """

    metric: str
    reference: float
    candidate: float
    reference_samples: int
    candidate_samples: int
    change: float | None
    low: float | None
    high: float | None
    is_certain: bool
    """Whether the interval excludes no change at all."""
    verdict: Verdict
    more_samples: int = 0
    """About how many more samples a side would decide, where the verdict is inconclusive."""
    more_recordings: int = 0
    """The same of recordings, where recordings differ too much and not the steps within each."""

    @property
    def difference(self) -> float:
        """Return candidate minus reference, in the metric's own unit."""
        return self.candidate - self.reference

    @property
    def is_worsening(self) -> bool:
        """Whether the candidate's median is on the bad side of the reference's."""
        return metric_of(self.metric).is_worse(self.difference)
