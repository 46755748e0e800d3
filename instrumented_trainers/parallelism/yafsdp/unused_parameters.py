"""Exchange which parameters were used on any rank."""

from collections.abc import Sequence

import torch

from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, PendingCollective
from instrumented_trainers.parallelism.yafsdp.unit import Unit


class ParameterUsage:
    """Exchanges the use of parameters among ranks, once per publication of gradients.

    A shard must be stepped if any rank used its parameter, and must be left alone (no weight decay, no momentum) if
    none did, as in a run on one process. So each rank sends a flag per parameter, and only a rank with an unused
    parameter waits for the result.
    """

    def __init__(self, units: Sequence[Unit], lane: Lane) -> None:
        self._lane = lane
        self._first_flag: dict[Unit, int] = {}
        count = 0
        for unit in units:
            self._first_flag[unit] = count
            count += len(unit.parameters)
        self._flags = torch.ones(count, dtype=torch.int32, device=units[0].device)
        self._pending: PendingCollective | None = None

    def publish(self, units: Sequence[Unit]) -> None:
        """Send which trainable parameters of the units, whose gradients are due, got a gradient on this rank."""
        if not units or self._lane.ranks.count == 1:
            return
        if self._pending is not None:
            self._pending.wait()  # nobody may have waited for the last one, and the flags are used again
        self._flags.fill_(1)
        for unit in units:
            for index in unit.without_gradient:
                self._flags[self._first_flag[unit] + index] = 0
        self._pending = self._lane.all_reduce_max(self._flags)

    def unused(self, units: Sequence[Unit]) -> dict[Unit, set[int]]:
        """Return which trainable parameters of the units got a gradient on no rank."""
        unused = {unit: unit.without_gradient for unit in units}
        if self._pending is None or not any(unused.values()):
            return unused
        self._pending.wait()
        used = self._flags.tolist()
        return {
            unit: {index for index in indices if not used[self._first_flag[unit] + index]}
            for unit, indices in unused.items()
        }
