"""Cause of lost time: what a replay removes, and how findings that it explains are priced."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.dependency_graph import Graph

Transform: TypeAlias = Callable[[Graph], Graph]
"""Returns the graph without a cause. Raises InsufficientDataError where the graph lacks what it needs."""
COMPARES, REMOVES, REORDERS = 0, 50, 100
"""Places in the order of removal: from 0 on transforms that compare recorded durations, before those that remove work,
and last those that move it."""


class Kind(Enum):
    """What a cause is about: host time, or a kind of device time."""

    HOST = "host"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    CONTENTION = "contention"
    STRAGGLERS = "stragglers"


class Pricing(IntEnum):
    """Place of a cause in the order of pricing, so that no time is priced twice."""

    INDEPENDENT = 0
    """Its price contains no other cause, and no other price is without it."""
    SOURCE = 1
    """Makes ranks or launches late: those are priced without it, if it has a warning."""
    LATE_RANKS = 2
    """Ranks that arrive late, for which a SOURCE may be the reason. `Removal.ranks` are such ranks."""
    CONSEQUENCE = 3
    """Contains the time of all of these."""


class Contention(Enum):
    """A slowdown by concurrent work that a transform removes itself, so that durations are not updated for it."""

    PREPARATION = "preparation and compute by each other"
    COMPUTE = "compute by collectives"


@dataclass(frozen=True, eq=False, kw_only=True)
class Cause:
    """A cause of lost time: the rules that report it, the transform that removes it, and its places in two orders.

    Plug-ins add one by the entry point group ``tracekit.causes``; a rule prices its findings by `WhatIf(cause)`.
    """

    name: str
    codes: tuple[str, ...]
    """The rules whose findings it prices: the first one speaks of it, the last one of several late ranks."""
    summary: str
    """What the replay removes."""
    basis: str
    """What the answer rests on."""
    loss: str = ""
    """What the time is lost to: "waiting for late ranks"; by default the title."""
    kind: Kind
    transform: Transform
    place: int = REMOVES
    """Place in the order of removal; causes at the same place are removed in the order of the registry."""
    confidence: float = 0.9
    """Confidence of an answer if waits are known and the replay reproduces the recording, 0 to 1."""
    pricing: Pricing = Pricing.INDEPENDENT
    is_attainable: bool = False
    """Whether a fix saves what the replay saves: it removes exactly these nodes, and no guess or comparison with the
    fastest chose them. False for ideals, such as transfers in no time, of which a part always remains."""
    contains: tuple["Cause", ...] = ()
    """The causes of which a part is its time: they are priced without it, as waits for copies without the copies."""
    idle_part: str = ""
    """The part of the idle time of late ranks (`late_ranks.PARTS`) that it explains."""
    is_before_window: bool = False
    """Whether it saves time before the first work of a window, too: the first batch is loaded there."""
    is_usual_before_window: bool = False
    """Whether that counts only up to what the other steps save before their first work, in the median: the host may
    also start the profiler there."""
    is_transfer_time: bool = False
    """Whether it contains the excess of collectives that stalled once."""
    idle_ns: Callable[[Graph], Ints] | None = None
    """Time that the device idles because of each node, in ns, if the host waits meanwhile or is not slower itself: on
    ranks that have more such nodes than most."""
    is_hidden_elsewhere: bool = False
    """Whether its rule measures only host time after which the device is idle; a replay removes all of it."""
    removed_contention: Contention | None = None
    removed_stalls: tuple[str, ...] = ()
    """The single stalls that it removes, by what the host does in them (`host_stalls.CAUSES`)."""
    excluded_stalls: tuple[str, ...] = ()
    """The single stalls that contain none of its time, because the host is in another state."""
    is_of_finding: bool = False
    """Whether only the stalls of one finding (`Graph.stalls`) are removed; so the cause of a run is none."""

    @property
    def title(self) -> str:
        """Name as words: late-launch is "late launch"."""
        return self.name.replace("-", " ")

    @property
    def loss_in_words(self) -> str:
        """What the time is lost to, as a noun."""
        return self.loss or self.title

    def code(self, ranks: tuple[int, ...] = ()) -> str:
        """Code of the rule that speaks of this cause, on some ranks."""
        return self.codes[-1 if len(ranks) > 1 else 0]
