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
    return is_opposite and not _diverge(keys[2:], their_keys[2:])


def _diverge(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> bool:
    """Return whether two sequences differ before one of them ends."""
    return any(a != b for a, b in zip(first, second, strict=False))


def _continues(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> bool:
    """Return whether two sequences are the same as far as both go."""
    return bool(first) and bool(second) and not _diverge(first, second)


def _calls_from(table: CallTable, group: Group, seq: int, rank: int) -> list[Call]:
    calls: list[Call] = []
    while (call := table.calls(group, seq).get(rank)) is not None and len(calls) < _MAX_STEPS_BACK:
        calls.append(call)
        seq += 1
    return calls
