"""Ranks that call something else than the others at the same number of a group, and what they did otherwise."""

from dataclasses import dataclass

from tracekit.analysis.hangs.collectives import CallTable, Collective, by_signature, signature, sizes, unequal_exchange
from tracekit.analysis.hangs.groups import Group
from tracekit.model.hang_dump import Call

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


def _mismatch(table: CallTable, group: Group, seq: int) -> Mismatch:
    calls = table.calls(group, seq)
    classes = by_signature(calls)
    (_, ranks), (_, others) = classes[:2]
    deviating = {rank: call for rank, call in sorted(calls.items()) if rank not in ranks}
    expected = calls[ranks[0]]
    explanations = {rank: _explanation(table, group, seq, rank, ranks[0]) for rank in deviating}
    kind = _kind(expected, deviating[others[0]])
    theirs = _calls_from(table, group, seq, ranks[0])
    is_reordered = any(_swaps(_calls_from(table, group, seq, rank), theirs) for rank in deviating)
    is_tied = len(ranks) == len(others)
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
    """Return how a rank's calls from a number on differ from those of a reference rank, by aligning both."""
    own, theirs = _calls_from(table, group, seq, rank), _calls_from(table, group, seq, reference)
    own_calls, others = [signature(call) for call in own], [signature(call) for call in theirs]
    if own[0].op == theirs[0].op:
        return f"passes {sizes(own[0]) or 'nothing'}, others pass {sizes(theirs[0]) or 'nothing'}"
    if _swaps(own, theirs):
        return f"calls {own[0].op} before {theirs[0].op}, others call them in the opposite order"
    if _continues(own_calls, others[1:]) or (theirs[0].op not in {call.op for call in own} and len(others) < 2):
        return f"calls {own[0].op} where others call {theirs[0].op}: it may have skipped this {theirs[0].op}"
    if _continues(others, own_calls[1:]):
        return f"calls an additional {own[0].op}, which others do not"
    return f"calls {own[0].op} where others call {theirs[0].op}"


def _swaps(own: list[Call], theirs: list[Call]) -> bool:
    """Return whether a rank makes the first two calls of another one in the opposite order, and the rest alike."""
    one, other = [signature(call) for call in own], [signature(call) for call in theirs]
    is_opposite = len(one) > 1 and own[0].op != theirs[0].op and one[:2] == other[1::-1]
    return is_opposite and not _part(one[2:], other[2:])


def _part(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> bool:
    """Return whether two sequences differ before one of them ends."""
    return any(a != b for a, b in zip(one, other, strict=False))


def _continues(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> bool:
    """Return whether two sequences are the same as far as both go."""
    return bool(one) and bool(other) and not _part(one, other)


def _calls_from(table: CallTable, group: Group, seq: int, rank: int) -> list[Call]:
    found: list[Call] = []
    while (call := table.calls(group, seq).get(rank)) is not None and len(found) < _MAX_STEPS_BACK:
        found.append(call)
        seq += 1
    return found
