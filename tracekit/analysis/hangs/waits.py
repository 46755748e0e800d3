"""Which ranks wait for which: the graph of ranks and the calls that they wait in, and where its chains end."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tracekit.analysis.hangs import causes
from tracekit.analysis.hangs.causes import Activity
from tracekit.analysis.hangs.collectives import CallTable, Collective, Group, Groups
from tracekit.model.hang_dump import Call, CallState, HangDumps, RankDump


@dataclass(frozen=True)
class Wait:
    """A call that is not complete: the ranks in it, and the ranks that it needs and that have not called it."""

    group: Group
    seq: int
    op: str
    waiting_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    first_call: Call
    collective: Collective | None = None
    """None for a send or receive."""


@dataclass
class WaitGraph:
    """Ranks -> waits -> ranks."""

    waits: tuple[Wait, ...]
    of_rank: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The positions of the waits that each rank is in."""

    def roots(self) -> "list[Root]":
        """Ends of the chains of waiting ranks, the one that most ranks lead to first."""
        edges: dict[Node, list[Node]] = defaultdict(list)
        for rank, waits in self.of_rank.items():
            edges[(_RANK, rank)] += [(_WAIT, wait) for wait in waits]
        for number, wait in enumerate(self.waits):
            edges[(_WAIT, number)] += [(_RANK, rank) for rank in wait.missing_ranks]
        sources: dict[Node, list[Node]] = defaultdict(list)
        for node, targets in edges.items():
            for target in targets:
                sources[target].append(node)
        roots = [
            Root(
                tuple(sorted(n for kind, n in part if kind == _RANK)),
                tuple(sorted(n for kind, n in part if kind == _WAIT)),
                _leading_to(part, sources),
            )
            for part in _components(edges)
            if not any(target not in part for node in part for target in edges.get(node, ()))
        ]
        return sorted(roots, key=lambda root: (-len(root.led_ranks), root.ranks))


@dataclass(frozen=True)
class Root:
    """An end of chains: one rank that waits for nobody; one wait that all have come to; or a cycle of both."""

    ranks: tuple[int, ...]
    waits: tuple[int, ...]
    led_ranks: tuple[int, ...]
    """The ranks that wait for it, directly or through others; of a cycle also its own."""


Node = tuple[int, int]
_RANK, _WAIT = 0, 1

_NCCL = "nccl"
# Functions of torch.distributed for all ranks of a group -> operations as the flight recorder names them.
_OPERATIONS = {
    "all_reduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "all_gather": "all_gather",
    "all_gather_into_tensor": "_all_gather_base", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "_reduce_scatter_base", "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all", "barrier": "all_reduce_barrier",
}  # fmt: skip


def graph(dumps: HangDumps, groups: Groups, table: CallTable) -> WaitGraph:
    """Return who waits for whom."""
    waits = [
        Wait(c.group, c.seq, c.op, c.waiting_ranks, c.missing_ranks, c.first_call, c)
        for c in table.pending
    ]  # fmt: skip
    waits += _messages(dumps, groups)
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, wait in enumerate(waits):
        for rank in wait.waiting_ranks:
            dump = dumps.ranks[rank]
            has_left = dump.reason in ("exit", "error") and not any(call.error for call in dump.calls)
            if not has_left and causes.may_wait_in(causes.state(dump), wait.first_call.backend):
                of_rank[rank].append(number)
    return WaitGraph(tuple(waits), {rank: tuple(numbers) for rank, numbers in of_rank.items()})


def with_inferred_calls(dumps: HangDumps) -> HangDumps:
    """Return the dumps with the calls that stacks show and whose group is certain: the only one without a call yet."""
    return replace(dumps, ranks={rank: _with_inferred_call(dump) for rank, dump in dumps.ranks.items()})


def _with_inferred_call(dump: RankDump) -> RankDump:
    op = _OPERATIONS.get(causes.state(dump).operation) if is_blocked(dump) else None
    names = groups_without_calls(dump)
    has_first_calls = not dump.calls or dump.calls[0].seq == 1  # the recorder's ring drops the oldest calls
    if op is None or len(names) != 1 or not has_first_calls or dump.main_thread is None:
        return dump
    description = dump.groups[names[0]][0]
    call = Call(
        dump.rank, len(dump.calls), names[0], description, 1, op, _NCCL, CallState.SCHEDULED,
        frames=dump.main_thread.frames, is_recorded=False,
    )  # fmt: skip
    return replace(dump, calls=(*dump.calls, call))


def is_blocked(dump: RankDump) -> bool:
    """Return whether the host is in a call of torch.distributed, and the flight recorder has no pending call."""
    may_be_nccl = not dump.calls or any(call.backend == _NCCL for call in dump.calls)
    return (
        dump.has_recorder and may_be_nccl and not dump.pending and causes.state(dump).activity is Activity.COMMUNICATION
    )


def groups_without_calls(dump: RankDump) -> list[str]:
    """Return the names of a rank's groups of several ranks that the rank has no call of."""
    called = {call.group for call in dump.calls}
    return [name for name, (_, ranks) in dump.groups.items() if name not in called and len(ranks or (0, 1)) > 1]


def creates_communicator(call: Call, dump: RankDump) -> bool:
    """Return whether a call is the first one of its group, in which NCCL creates the communicator."""
    is_first = not any(other.is_recorded and other.group == call.group for other in dump.calls)
    return not call.is_recorded and call.backend == _NCCL and is_first


def describe_groups(dumps: Iterable[RankDump]) -> list[str]:
    """Return the groups of blocked ranks that have no call yet, for a message."""
    descriptions = {}
    for dump in dumps:
        for name in groups_without_calls(dump):
            description = dump.groups[name][0]
            descriptions[name] = f'"{name}"' + (f" ({description})" if description not in ("", "undefined") else "")
    return list(descriptions.values())


def _messages(dumps: HangDumps, groups: Groups) -> list[Wait]:
    """Return the sends and receives whose peer has not called them, one for each caller and other side.

    Pending sends of a pair of ranks match its pending receives in their order.
    """
    pending: dict[tuple[Group, int, int], dict[str, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps.ranks.values():
        for call, part in _pending_messages(dump.pending):
            group = groups.of(call)
            ends = (_member(group, part.source), _member(group, part.target))
            if ends[0] is not None and ends[1] is not None:
                pending[group, ends[0], ends[1]][part.op].append(call)
    waits = []
    for (group, source, target), calls in pending.items():
        sends, receives = calls["send"], calls["recv"]
        unmatched = sends[len(receives) :] or receives[len(sends) :]
        if unmatched:
            first = unmatched[0]
            other = target if first.rank == source else source
            waits.append(Wait(group, first.seq, _message_name(first, source, target), (first.rank,), (other,), first))
    return waits


def _pending_messages(calls: Sequence[Call]) -> Iterable[tuple[Call, Call]]:
    """Yield pending sends and receives: the call and, if it is coalesced, each of its parts."""
    for call in calls:
        if call.is_p2p:
            yield from ((call, part) for part in call.parts or (call,) if part.op in ("send", "recv"))


def _message_name(call: Call, source: int, target: int) -> str:
    if call.parts:
        return f"{call.op} send/recv"
    return f"send to rank {target}" if call.op == "send" else f"recv from rank {source}"


def _member(group: Group, rank: int | None) -> int | None:
    return group.ranks[rank] if rank is not None and rank < len(group.ranks) else None


def _components(edges: Mapping[Node, list[Node]]) -> list[frozenset[Node]]:
    """Return the strongly connected parts of a graph (Tarjan's algorithm without recursion)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    parts: list[frozenset[Node]] = []
    for start in list(edges):
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        _enter(start, index, low, stack, on_stack)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    _enter(target, index, low, stack, on_stack)
                    work.append((target, iter(edges.get(target, ()))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    parts.append(_pop_component(node, stack, on_stack))
    return parts


def _enter(node: Node, index: dict[Node, int], low: dict[Node, int], stack: list[Node], on_stack: set[Node]) -> None:
    index[node] = low[node] = len(index)
    stack.append(node)
    on_stack.add(node)


def _pop_component(node: Node, stack: list[Node], on_stack: set[Node]) -> frozenset[Node]:
    part = set()
    while True:
        member = stack.pop()
        on_stack.discard(member)
        part.add(member)
        if member == node:
            return frozenset(part)


def _leading_to(part: frozenset[Node], sources: Mapping[Node, list[Node]]) -> tuple[int, ...]:
    """Ranks from which a part of the graph can be reached; `sources` are the nodes that lead to each node directly."""
    reached, rest = set(part), list(part)
    while rest:
        for node in sources.get(rest.pop(), ()):
            if node not in reached:
                reached.add(node)
                rest.append(node)
    is_cycle = sum(kind == _RANK for kind, _ in part) > 1
    return tuple(sorted(n for kind, n in reached if kind == _RANK and (is_cycle or (kind, n) not in part)))
