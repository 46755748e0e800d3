"""The process groups of any job."""

from typing import Protocol

from tracekit.simulate.hybrid_topology import HybridWorld
from tracekit.simulate.job import Job
from tracekit.simulate.program import Collective
from tracekit.simulate.topology import Group, World


class Groups(Protocol):
    """The process groups of a job, their links, and how long transfers take."""

    def group(self, kind: str, rank: int) -> Group:
        """Return the group of a kind that a rank belongs to."""

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of groups that the job has."""

    def transfer_ns(self, collective: Collective, group: Group) -> int:
        """Return the time of a collective once all its ranks have arrived, if nothing else uses the link."""

    def slowdown(self, group: Group, step: int) -> float:
        """Return the factor by which a slow link lengthens the group's transfers in a step."""


def world(job: Job) -> Groups:
    """Return the process groups of a job."""
    return World(job) if job.hybrid is None else HybridWorld(job)
