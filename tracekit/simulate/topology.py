"""Process groups, their links, and how long transfers take."""

from dataclasses import dataclass, replace

from tracekit.conventions.strategies import RING_PASSES
from tracekit.simulate.costs import Rates, rates, ring_s
from tracekit.simulate.job import HSDP, Job
from tracekit.simulate.program import REPLICATE, SHARD, Collective

NODE, NETWORK = "node", "network"
ITEM_BYTES = {"BFloat16": 2, "Float": 4}


@dataclass(frozen=True)
class Group:
    """A process group of one rank: its ranks, its name, and the link that its ring is bound by."""

    name: str
    description: str
    ranks: tuple[int, ...]
    link: str
    parent: "Group | None" = None
    """Of a channel between two ranks: the group in which they send and receive."""


class World:
    """The process groups of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rates = {link: self._rates_of(link) for link in (NODE, NETWORK)}

    def group(self, kind: str, rank: int) -> Group:
        """Return the group of a kind that a rank belongs to."""
        job = self._job
        node, local = divmod(rank, job.node)
        if kind == REPLICATE:
            ranks = tuple(range(local, job.gpus, job.node))
            return Group(f"{1 + job.gpus // job.node + local}", "mesh_dp_replicate", ranks, NETWORK)
        if job.strategy == HSDP:
            ranks = tuple(range(node * job.node, (node + 1) * job.node))
            return Group(f"{1 + node}", "mesh_dp_shard", ranks, NODE)
        link = NODE if job.gpus <= job.node else NETWORK
        return Group("0", "default_pg", tuple(range(job.gpus)), link)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of groups that the job has."""
        return (SHARD, REPLICATE) if self._job.strategy == HSDP else (SHARD,)

    def transfer_ns(self, collective: Collective, group: Group) -> int:
        """Return the time of a collective once all its ranks have arrived, if nothing else uses the link."""
        if self._job.impairments.ideal_links:
            return 1
        elements = max(collective.sent, collective.received)
        size_bytes = elements * ITEM_BYTES[collective.dtype]
        took_s = RING_PASSES[collective.op] * float(ring_s(size_bytes, self._rates[group.link], len(group.ranks)))
        return max(1, round(1e9 * took_s))

    def slowdown(self, group: Group, step: int) -> float:
        """Return the factor by which a slow link in its ring lengthens the group's collectives in a step."""
        links = self._job.impairments.slow_links
        hit = [factor for rank, (factor, since) in links.items() if rank in group.ranks and step >= since]
        return max(hit, default=1.0) if group.link == NETWORK or self._job.gpus <= self._job.node else 1.0

    def _rates_of(self, link: str) -> Rates:
        speeds = rates(self._job.hardware, spans_nodes=link == NETWORK)
        if self._job.strategy == HSDP and link == NETWORK:  # one ring per GPU of a node shares the node's network
            return replace(speeds, bus_bytes_per_s=speeds.bus_bytes_per_s / self._job.node)
        return speeds
