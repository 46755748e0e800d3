"""Calls of all ranks matched to collectives: who came, who did not, who called something else."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tracekit.analysis.hangs.groups import Group, Groups
from tracekit.model.hang_dump import Call, CallState, HangDumps

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


def _tensors(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> str:
    kinds = dtypes if len(dtypes) == len(shapes) else [dtypes[0] if dtypes else ""] * len(shapes)
    texts = [f"{list(shape)} {kind}".rstrip() for shape, kind in zip(shapes[:3], kinds, strict=False)]
    return ", ".join(texts) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
