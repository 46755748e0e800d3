"""How often a loss happens: in every step, in some steps again and again, once, or at the beginning only."""

from collections.abc import Collection
from enum import Enum

_FEWEST_FOR_RARE = 6
"""In fewer steps, what happens every third step may show once."""


class Recurrence(Enum):
    """What the steps of a window show of how often a loss happens."""

    STEADY = "in every step"
    RECURRING = "in some steps, again and again"
    RARE = "once in a long window"
    UNKNOWN = "once in a short window"
    WARM_UP = "in the first steps only"

    @property
    def is_repeated(self) -> bool:
        """Whether it will happen again: its price is the mean over all steps, and it warns."""
        return self in (Recurrence.STEADY, Recurrence.RECURRING)


def of_count(count: int, steps: int) -> Recurrence:
    """Recurrence of what happens in some of a window's steps.

    >>> of_count(2, 5), of_count(1, 8), of_count(1, 3)
    (<Recurrence.RECURRING: 'in some steps, again and again'>, <Recurrence.RARE: 'once in a long window'>, \
<Recurrence.UNKNOWN: 'once in a short window'>)
    """
    if count > 1:
        return Recurrence.STEADY if count >= steps else Recurrence.RECURRING
    return Recurrence.RARE if steps >= _FEWEST_FOR_RARE else Recurrence.UNKNOWN


def of_first_uses(affected: Collection[int], steps: Collection[int]) -> Recurrence:
    """Recurrence of what happens at first uses, too: in no step after the first ones, at most half, it is warm-up.

    >>> of_first_uses({3, 4}, range(3, 8)).name, of_first_uses({3, 5}, range(3, 8)).name
    ('WARM_UP', 'RECURRING')
    """
    first = sorted(steps)[: len(affected)]
    is_warm_up = set(affected) == set(first) and 2 * len(affected) <= len(steps)
    return Recurrence.WARM_UP if is_warm_up else of_count(len(affected), len(steps))


def sentence(count: int, steps: int) -> str:
    """Say how often something happens in the profiled steps, without a full stop.

    >>> sentence(2, 5), sentence(1, 8)
    ('It happens in 2 of 5 profiled steps, so it recurs', 'It happens once in 8 profiled steps, so it may be rare')
    """
    if count > 1:
        which = f"all {steps}" if count >= steps else f"{count} of {steps}"
        return f"It happens in {which} profiled steps, so it recurs"
    is_rare = of_count(count, steps) is Recurrence.RARE
    return f"It happens once in {steps} profiled steps, " + (
        "so it may be rare" if is_rare else "too few to show how often it recurs"
    )
