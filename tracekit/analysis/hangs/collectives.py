"""Calls of all ranks matched to collectives: the groups, who came, who did not, and the first call that differs."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tracekit.model.hang_dump import Call, CallState, HangDumps, RankDump

_WORLD = ("default_pg", "default")


@dataclass(frozen=True)
class Group:
    """One process group. Several may have one name, each with other ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the ranks in the group."""
    is_inferred: bool = False
    """Whether the dumps do not state the ranks: they are those that called something in the group."""

    def __str__(self) -> str:
        """Return the group for a message."""
        described = self.description if self.description not in ("", "undefined") else ""
        return f'group "{self.name}"' + (f" ({described})" if described else "")

    def __hash__(self) -> int:
        """Hash of the name: one of all ranks would be computed for each call and member, quadratic in the ranks."""
        return hash(self.name)


class Groups:
    """The groups of a job, found by a rank and the name that the rank has for the group."""

    def __init__(self, dumps: HangDumps) -> None:
        self._stated: dict[tuple[int, str], Group] = {}
        self._by_name: dict[str, list[Group]] = defaultdict(list)
        self._inferred: dict[str, Group] = {}
        for rank, dump in dumps.ranks.items():
            self._add_stated(rank, dump)
        self.world_size = _world_size(dumps)
        self._infer(dumps)

    def of(self, call: Call) -> Group:
        """Return the group of a call."""
        stated = self._stated.get((call.rank, call.group))
        if stated is not None:
            return stated
        candidates = [group for group in self._by_name[call.group] if call.rank in group.ranks]
        return candidates[0] if candidates else self._inferred[call.group]

    def _add_stated(self, rank: int, dump: RankDump) -> None:
        for name, (description, ranks) in dump.groups.items():
            if ranks is None:
                continue
            existing = next((group for group in self._by_name[name] if set(group.ranks) == set(ranks)), None)
            group = existing or Group(name, description, ranks)
            if existing is None:
                self._by_name[name].append(group)
            self._stated[rank, name] = group

    def _infer(self, dumps: HangDumps) -> None:
        callers: dict[str, set[int]] = defaultdict(set)
        descriptions: dict[str, str] = {}
        for dump in dumps.ranks.values():
            for call in dump.calls:
                callers[call.group].add(call.rank)
                descriptions.setdefault(call.group, call.description)
        for name, ranks in callers.items():
            description = descriptions[name]
            of_world = description in _WORLD or (name == "0" and not description)
            members = range(self.world_size) if of_world else ranks
            self._inferred[name] = Group(name, description, tuple(sorted(members)), is_inferred=True)


def _world_size(dumps: HangDumps) -> int:
    sizes = [dump.world_size for dump in dumps.ranks.values() if dump.world_size]
    stated = [rank for dump in dumps.ranks.values() for _, ranks in dump.groups.values() for rank in ranks or ()]
    return max([*sizes, max(stated, default=-1) + 1, max(dumps.ranks, default=-1) + 1])


Signature = tuple[object, ...]
# Ranks may have other inputs (of scatter, only the source has any) or other outputs (of gather, only the target has).
_ANY_INPUT = frozenset({"scatter"})
_ANY_OUTPUT = frozenset({"gather"})
_ANY_SIZES = frozenset({"all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "all_gather_v",
                        "reduce_scatter_v", "coalesced"})  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One collective over the ranks of its group."""

    group: Group
    seq: int
    calls: Mapping[int, Call]
    missing_ranks: tuple[int, ...]
    """Members that have neither called it nor a later one."""

    @property
    def op(self) -> str:
        """Return the operation that most ranks called."""
        return Counter(call.op for call in self.calls.values()).most_common(1)[0][0]

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        """Return the ranks for which it is not complete."""
        return tuple(rank for rank, call in self.calls.items() if call.is_pending)

    @property
    def completed_ranks(self) -> tuple[int, ...]:
        """Return the ranks for which it is complete."""
        return tuple(rank for rank, call in self.calls.items() if call.state is CallState.COMPLETED)

    @property
    def first_call(self) -> Call:
        """Return the earliest call that is not complete."""
        pending = [call for call in self.calls.values() if call.is_pending]
        return min(pending or self.calls.values(), key=lambda call: (call.created_ns or 0, call.rank))


class CallTable:
    """All calls of collectives by group, number and rank."""

    def __init__(self, dumps: HangDumps, groups: Groups) -> None:
        self._calls: dict[Group, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
        self._last: dict[tuple[Group, int], int] = {}
        for dump in dumps.ranks.values():
            for call in dump.calls:
                if not call.is_p2p:
                    group = groups.of(call)
                    self._calls[group][call.seq][call.rank] = call
                    self._last[group, call.rank] = max(call.seq, self._last.get((group, call.rank), call.seq))

    @cached_property
    def pending(self) -> tuple[Collective, ...]:
        """Return the collectives that are not complete on some rank, in the order of their groups and numbers."""
        return tuple(
            self.collective(group, seq)
            for group, by_seq in self._calls.items()
            for seq, calls in sorted(by_seq.items())
            if any(call.is_pending for call in calls.values())
        )

    def collective(self, group: Group, seq: int) -> Collective:
        """Return one collective."""
        calls = self._calls[group][seq]
        missing = tuple(
            rank for rank in group.ranks if rank not in calls and self._last.get((group, rank), seq - 1) < seq
        )
        return Collective(group, seq, calls, missing)

    def calls(self, group: Group, seq: int) -> Mapping[int, Call]:
        """Return the calls of one number in a group by rank."""
        return self._calls[group].get(seq, {})


OP, SIZE, DTYPE = "op", "size", "dtype"
_MAX_STEPS_BACK = 10_000


@dataclass(frozen=True)
class Mismatch:
    """Calls of one number in a group that do not match."""

    group: Group
    seq: int
    kind: str
    """What differs first: "op", "size" or "dtype"."""
    expected: Call
    """A call of the majority."""
    expected_ranks: tuple[int, ...]
    deviating: dict[int, Call]
    """The other calls by rank."""
    is_tied: bool
    """Whether there is no majority."""
    explanations: dict[int, str]
    """What each deviating rank did otherwise."""
    is_reordered: bool = False
    """Whether a deviating rank makes the same two calls in the opposite order."""


def signature(call: Call) -> Signature:
    """Properties that all ranks must share: operation, elements and types, as far as the operation demands it.

    Backends count elements, so that shapes of equally many elements match.
    """
    if call.parts:
        return (call.op, *map(signature, call.parts))
    if call.op in _ANY_SIZES:
        return (call.op,)
    inputs = () if call.op in _ANY_INPUT else (call.input_numel, call.input_dtypes)
    outputs = () if call.op in _ANY_OUTPUT or not call.output_numel else (call.output_numel, call.output_dtypes)
    return (call.op, inputs, outputs)


def by_signature(calls: Mapping[int, Call]) -> list[tuple[Signature, tuple[int, ...]]]:
    """Return the signatures of calls and their ranks, the most frequent first.

    A call that is not recorded has no sizes: then only operations are compared.
    """
    has_sizes = all(call.is_recorded for call in calls.values())
    ranks: dict[Signature, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks[signature(call) if has_sizes else (call.op,)].append(rank)
    return sorted(((key, tuple(members)) for key, members in ranks.items()), key=lambda item: (-len(item[1]), item[1]))


def unequal_exchange(collective: Collective) -> bool:
    """Return whether an all-to-all sends other amounts than it receives, over all its ranks."""
    calls = collective.calls.values()
    if collective.missing_ranks or not all(call.op.startswith(("all_to_all", "alltoall")) for call in calls):
        return False
    sent, received = sum(call.input_numel for call in calls), sum(call.output_numel for call in calls)
    return len(calls) == len(collective.group.ranks) and sent != received


def sizes(call: Call) -> str:
    """Return the sizes and types of a call for a message.

    >>> from tracekit.model.hang_dump import CallState
    >>> sizes(Call(0, 0, "0", "", 1, "all_reduce", "nccl", CallState.STARTED, input_sizes=((4, 2),),
    ...            input_dtypes=("Float",), output_sizes=((4, 2),), output_dtypes=("Float",)))
    '[4, 2] Float'
    """
    inputs = _tensors(call.input_sizes, call.input_dtypes)
    outputs = _tensors(call.output_sizes, call.output_dtypes)
    return inputs or outputs if inputs == outputs or not (inputs and outputs) else f"{inputs} -> {outputs}"


def first_mismatch(table: CallTable, collective: Collective) -> Mismatch | None:
    """Return the first of the mismatching calls that lead to a collective; None if its calls match."""
    if len(by_signature(collective.calls)) < 2:
        return _unequal(collective) if unequal_exchange(collective) else None
    group, seq = collective.group, collective.seq
    for _ in range(_MAX_STEPS_BACK):
        if len(by_signature(table.calls(group, seq - 1))) < 2:
            break
        seq -= 1
    return _mismatch(table, group, seq)


def _tensors(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> str:
    kinds = dtypes if len(dtypes) == len(shapes) else [dtypes[0] if dtypes else ""] * len(shapes)
    texts = [f"{list(shape)} {kind}".rstrip() for shape, kind in zip(shapes[:3], kinds, strict=False)]
    return ", ".join(texts) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")


def _mismatch(table: CallTable, group: Group, seq: int) -> Mismatch:
    calls = table.calls(group, seq)
    classes = by_signature(calls)
    (_, ranks), (_, other_ranks) = classes[:2]
    deviating = {rank: call for rank, call in sorted(calls.items()) if rank not in ranks}
    expected = calls[ranks[0]]
    explanations = {rank: _explanation(table, group, seq, rank, ranks[0]) for rank in deviating}
    kind = _kind(expected, deviating[other_ranks[0]])
    theirs = _calls_from(table, group, seq, ranks[0])
    is_reordered = any(_swaps(_calls_from(table, group, seq, rank), theirs) for rank in deviating)
    is_tied = len(ranks) == len(other_ranks)
    return Mismatch(group, seq, kind, expected, ranks, deviating, is_tied, explanations, is_reordered)


def _unequal(collective: Collective) -> Mismatch:
    calls = dict(sorted(collective.calls.items()))
    sent = sum(call.input_numel for call in calls.values())
    received = sum(call.output_numel for call in calls.values())
    text = f"the ranks send {sent:,} elements and expect {received:,}"
    first = next(iter(calls))
    return Mismatch(
        collective.group, collective.seq, SIZE, calls[first], (first,), calls, True, dict.fromkeys(calls, text)
    )


def _kind(expected: Call, other: Call) -> str:
    if expected.op != other.op or len(expected.parts) != len(other.parts):
        return OP
    same_sizes = (expected.input_numel, expected.output_numel) == (other.input_numel, other.output_numel)
    return DTYPE if same_sizes and not expected.parts else SIZE


def _explanation(table: CallTable, group: Group, seq: int, rank: int, reference: int) -> str:
    """Difference between a rank's calls from a number on and those of a reference rank, by aligning both."""
    calls, theirs = _calls_from(table, group, seq, rank), _calls_from(table, group, seq, reference)
    keys, their_keys = [signature(call) for call in calls], [signature(call) for call in theirs]
    if calls[0].op == theirs[0].op:
        return f"passes {sizes(calls[0]) or 'nothing'}, others pass {sizes(theirs[0]) or 'nothing'}"
    if _swaps(calls, theirs):
        return f"calls {calls[0].op} before {theirs[0].op}, others call them in the opposite order"
    if _continues(keys, their_keys[1:]) or (theirs[0].op not in {call.op for call in calls} and len(their_keys) < 2):
        return f"calls {calls[0].op} where others call {theirs[0].op}: it may have skipped this {theirs[0].op}"
    if _continues(their_keys, keys[1:]):
        return f"calls an additional {calls[0].op}, which others do not"
    return f"calls {calls[0].op} where others call {theirs[0].op}"


def _swaps(calls: list[Call], theirs: list[Call]) -> bool:
    """Return whether a rank makes the first two calls of another one in the opposite order, and the rest alike."""
    keys, their_keys = [signature(call) for call in calls], [signature(call) for call in theirs]
    is_opposite = len(keys) > 1 and calls[0].op != theirs[0].op and keys[:2] == their_keys[1::-1]
    return is_opposite and not any(a != b for a, b in zip(keys[2:], their_keys[2:], strict=False))


def _continues(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> bool:
    """Return whether two sequences are the same as far as both go."""
    return bool(first) and bool(second) and not any(a != b for a, b in zip(first, second, strict=False))


def _calls_from(table: CallTable, group: Group, seq: int, rank: int) -> list[Call]:
    calls: list[Call] = []
    while (call := table.calls(group, seq).get(rank)) is not None and len(calls) < _MAX_STEPS_BACK:
        calls.append(call)
        seq += 1
    return calls
