"""Collectives between simulated ranks: they start when the last rank has come, and share links with each other."""

from dataclasses import dataclass, field

from tracekit.simulate.device import Device, Work
from tracekit.simulate.program import Collective
from tracekit.simulate.topology import Group


@dataclass(slots=True, eq=False)
class Transfer:
    """One collective of one group: who has come of the simulated ranks, and what remains to be carried."""

    group: Group
    number: int
    collective: Collective
    expected: int
    remaining_ns: float
    arrived: list[tuple[Device, Work]] = field(default_factory=list)
    rate: float = 0.0
    since_ns: int = 0
    version: int = 0

    @property
    def is_carried(self) -> bool:
        """Whether all ranks have come."""
        return len(self.arrived) == self.expected

    def rate_now(self, compute_slows: float) -> float:
        """Return how fast it goes: links are shared evenly, and compute on a member may slow it."""
        shared = max(len(device.transferring[self.group.link]) for device, _ in self.arrived)
        slowed = 1 + compute_slows if compute_slows and any(device.computes for device, _ in self.arrived) else 1.0
        return 1 / (shared * slowed)
