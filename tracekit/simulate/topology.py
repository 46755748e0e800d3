"""Process groups, their links, and how long transfers take."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from tracekit.conventions.strategies import PP, RING_PASSES
from tracekit.simulate.job import HSDP, Job, groups_of
from tracekit.simulate.kernels import Rates, rates, ring_s
from tracekit.simulate.program import REPLICATE, SHARD, Collective

NODE, NETWORK = "node", "network"
ITEM_BYTES = {"BFloat16": 2, "Float": 4}
WORLD = "world"
"""The group of all ranks."""


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
    """The process groups of a job, their links, and how long transfers take."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rates_of = lru_cache(maxsize=None)(self._rates)

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
        return max(1, round(1e9 * self._transfer_s(collective, group)))

    def slowdown(self, group: Group, step: int) -> float:
        """Return the factor by which a slow link in its ring lengthens the group's collectives in a step."""
        links = self._job.impairments.slow_links
        hit = [factor for rank, (factor, since) in links.items() if rank in group.ranks and step >= since]
        return max(hit, default=1.0) if group.link == NETWORK or self._job.gpus <= self._job.node else 1.0

    def _transfer_s(self, collective: Collective, group: Group) -> float:
        size_bytes = ITEM_BYTES[collective.dtype] * max(collective.sent, collective.received)
        return RING_PASSES[collective.op] * float(ring_s(size_bytes, self._rates_of(group), len(group.ranks)))

    def _rates(self, group: Group) -> Rates:
        speeds = rates(self._job.hardware, spans_nodes=group.link == NETWORK)
        if self._job.strategy == HSDP and group.link == NETWORK:  # one ring per GPU of a node shares its network
            return replace(speeds, bus_bytes_per_s=speeds.bus_bytes_per_s / self._job.node)
        return speeds


def channel(sender: int, receiver: int, kind: str) -> str:
    """Return the kind of the groups in which ranks at one place of a pipeline send to those at another one.

    What they send is of `kind` F (activations) or B (gradients).
    """
    return f"{PP}:{sender}>{receiver}:{kind}"


class HybridWorld(World):
    """The process groups of a job with a layout, one for each place on an axis of its mesh."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._hybrid = job.mesh
        hybrid = job.mesh
        all_ranks = [list(range(hybrid.layout.world_size))]
        groups: dict[str, list[Group]] = {}
        number = 0
        for kind, listed in {WORLD: all_ranks, **groups_of(hybrid)}.items():
            description = "default_pg" if kind == WORLD else f"mesh_{kind}"
            groups[kind] = []
            for ranks in listed:
                link = NODE if len({hybrid.slot(rank) // job.node for rank in ranks}) == 1 else NETWORK
                groups[kind].append(Group(str(number), description, tuple(ranks), link))
                number += 1
        self._groups = groups
        self._of = lru_cache(maxsize=None)(self._find)
        self._boundary_of = lru_cache(maxsize=None)(self._boundary)

    def group(self, kind: str, rank: int) -> Group:
        """Return the group of an axis, of all ranks, or of a channel between two, that a rank belongs to."""
        return self._of(kind, rank)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of groups that have more than one rank."""
        return tuple(self._groups)

    def slowdown(self, group: Group, step: int) -> float:
        """Return the factor by which a slow link lengthens the group's transfers."""
        impairments = self._job.impairments
        if group.parent is not None:
            return impairments.slow_boundaries.get(self._boundary_of(group), 1.0)
        links = impairments.slow_links.items()
        hit = [factor for rank, (factor, since) in links if rank in group.ranks and step >= since]
        return max([impairments.slow_axes.get(group.description.removeprefix("mesh_"), 1.0), *hit])

    def _transfer_s(self, collective: Collective, group: Group) -> float:
        """Return the time of a transfer; ranks of an all-to-all send to all at once, so its busiest rank decides."""
        if group.parent is None and collective.splits is None:
            return super()._transfer_s(collective, group)
        elements = max(collective.sent, collective.received) if group.parent is not None else collective.slowest
        hops = 1 if group.parent is not None else len(group.ranks) - 1
        speeds = self._rates_of(group)
        return float(ITEM_BYTES[collective.dtype] * elements / speeds.bus_bytes_per_s + speeds.hop_s * hops)

    def _boundary(self, group: Group) -> int:
        """Return the stage on the side of the first of the two ranks' places that a channel crosses."""
        places = sorted(self._hybrid.layout.coordinate(rank)[PP] for rank in group.ranks)
        return places[0] if places[1] - places[0] == 1 else places[1]

    def _find(self, kind: str, rank: int) -> Group:
        if kind.startswith(f"{PP}:"):
            return self._channel(kind, rank)
        return next(group for group in self._groups[kind] if rank in group.ranks)

    def _channel(self, kind: str, rank: int) -> Group:
        places, sent = kind.split(":")[1:]
        parent = self.group(PP, rank)
        sender, receiver = (parent.ranks[int(place)] for place in places.split(">"))
        same = self._hybrid.slot(sender) // self._job.node == self._hybrid.slot(receiver) // self._job.node
        link = f"{NODE if same else NETWORK} {sender}>{receiver}"  # links between two ranks are shared by nobody
        return Group(channel(sender, receiver, sent), parent.description, (sender, receiver), link, parent)

    def _rates(self, group: Group) -> Rates:
        if group.link.startswith(NODE):
            return rates(self._job.hardware, spans_nodes=False)
        speeds = rates(self._job.hardware, spans_nodes=True)
        # A node's network is shared evenly by its GPUs, a ring has the shares of its ranks there.
        nodes = Counter(self._hybrid.slot(rank) // self._job.node for rank in group.ranks)
        max_ranks = max(nodes.values())
        share = 1 if group.parent is not None else max_ranks
        return replace(speeds, bus_bytes_per_s=speeds.bus_bytes_per_s * share / self._job.node)


def world(job: Job) -> World:
    """Return the process groups of a job."""
    return World(job) if job.hybrid is None else HybridWorld(job)
