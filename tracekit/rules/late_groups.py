"""Rule on ranks that straggle together: a node, a replica, a tensor-parallel group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.model.run import Run
from tracekit.rules.rule import Finding
from tracekit.rules.stragglers import Straggler


@dataclass(frozen=True)
class LateGroup(Straggler):
    """Ranks that straggle together, such as those of one node.

    What it does: reports ranks that arrive late together at collectives, while the others are idle, as one finding
    named by what these ranks share: a node, a replica, a coordinate of another mesh axis, a process group. The others
    lose more than `min_wait_ratio` of the step for them, in at least `min_steps_ratio` of the steps since the first
    such step, by a time that varies by at most `max_spread_ratio`. It names what the late ranks take longer for: their
    kernels, or their launches.

    Why it costs: a collective moves data only after the last rank arrives, so one slow node slows all.

    How it is measured: as in RANK001, for ranks together. Ranks are late together if the others would wait at least
    twice as long for all of them as for any one, and would still wait for each one if all but that one came early. In a
    hybrid mesh, where the ranks of a late node have no collective in common with other nodes, each of them must be late
    in its own process groups, and must not wait itself for more than half as long as the other ranks do. At most half
    of the ranks are a late group. Nodes come from the host names in file names, else from device indices that start
    again every few ranks, else from the GPUs per node in run.json; axes from the mesh or groups in run.json, else from
    the names of process groups. The cost is the saving of a replay in which nobody waits for these ranks. Below
    `min_cost_ratio` of the step the finding is information.

    How to fix: check what these ranks share before the ranks themselves: power and clocks of the node, its network
    adapters, its CPUs and storage, other jobs on it, the batch of the replica (uneven sequence lengths). Take the node
    out of the job to separate hardware from data.

    Blind spots: needs traces of ranks inside and outside of the group, and three collectives that both join. All ranks
    of a pipeline stage are not reported: how long stages take is what rules on pipelines judge. Waits between stages do
    not count. If more than half of the ranks are late, nobody straggles.
    """

    code: ClassVar[str] = "RANK004"

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per group of ranks that straggles."""
        yield from self._findings(run, pl.col("late_ranks").list.len() > 1)
