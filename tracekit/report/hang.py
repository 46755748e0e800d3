"""The diagnosis of a hang as a document."""

from collections.abc import Iterator

from tracekit.analysis.hangs import causes
from tracekit.analysis.hangs.collectives import Mismatch, sizes
from tracekit.analysis.hangs.diagnosis import Diagnosis, RankState
from tracekit.model.hang_dump import Call
from tracekit.model.units import duration, numbers, ranges
from tracekit.report.document import Cells, Document, Emphasis, Line, Section, faint, heading, items, line

_MOST_RANKS = 16
_MOST_MISMATCHES = 3
_MOST_CULPRITS = 8
_COLUMNS = ("rank", "last call", "last complete", "waits in", "on the host")


def document(hang: Diagnosis) -> Document:
    """The verdict, what to do, the evidence and a row for each rank; for programs see docs/hang.md."""
    wait = hang.wait
    values = {
        "hang": hang.is_hang,
        "verdict": hang.verdict,
        "cause": hang.kind.value,
        "advice": hang.advice,
        "group": None if wait is None else wait.group.name,
        "group_description": None if wait is None else wait.group.description,
        "group_ranks": [] if wait is None else list(wait.group.ranks),
        "seq": None if wait is None else wait.seq,
        "op": None if wait is None else wait.op,
        "waiting_ranks": [] if wait is None else sorted(wait.waiting_ranks),
        "missing_ranks": [] if wait is None else sorted(wait.missing_ranks),
        "completed_ranks": sorted(hang.completed_ranks),
        "waited_ns": hang.waited_ns,
        "mismatches": [_mismatch(mismatch) for mismatch in hang.mismatches],
        "culprits": [
            {"rank": c.rank, "reason": c.kind.value, "detail": c.reason, "evidence": list(c.evidence)}
            for c in hang.culprits
        ],
        "cycle": list(hang.cycle),
        "ranks": [_rank(rank) for rank in hang.ranks],
        "notes": list(hang.notes),
    }
    return Document(tuple(_sections(hang)), notes=hang.notes, values=values)


def _sections(hang: Diagnosis) -> Iterator[Section]:
    yield [heading(hang.verdict)]
    if hang.advice:
        yield [line("What to do: ", hang.advice)]
    if hang.wait is not None:
        wait = hang.wait
        assert wait is not None
        waited = f" for {duration(hang.waited_ns)}" if hang.waited_ns else ""
        parts = [f"{wait.op}, seq {wait.seq} of {wait.group} with ranks {ranges(wait.group.ranks)}"]
        if wait.group.is_inferred:
            parts[0] += " (inferred from its calls: the dumps do not state them)"
        parts.append(f"waiting{waited}: {ranges(wait.waiting_ranks)}")
        parts.append(f"missing: {ranges(wait.missing_ranks)}")
        if hang.completed_ranks:
            parts.append(f"complete on: {ranges(hang.completed_ranks)}")
        yield [faint("; ".join(parts))]
    if hang.cycle:
        yield [heading("Cycle"), *items(hang.cycle, "→")]
    for mismatch in hang.mismatches[:_MOST_MISMATCHES]:
        yield [heading(f"Calls at seq {mismatch.seq} of {mismatch.group}"), *items(_calls(mismatch))]
    culprits = hang.culprits[:_MOST_CULPRITS]
    for culprit in culprits:
        rest = _more(len(hang.culprits) - _MOST_CULPRITS, "more") if culprit is culprits[-1] else []
        yield [line((f"Rank {culprit.rank}", Emphasis.STRONG), f" {culprit.reason}"), *items(culprit.evidence), *rest]
    if hang.ranks:
        rows = [(str(r.rank), r.last_call, r.last_completed, r.waits_in, r.on_host) for r in hang.ranks[:_MOST_RANKS]]
        yield [Cells(_COLUMNS, tuple(rows)), *_more(len(hang.ranks) - _MOST_RANKS, "more ranks")]


def _more(count: int, what: str) -> list[Line]:
    return [faint(f"and {count} {what}; --format json has all")] if count > 0 else []


def _calls(mismatch: Mismatch) -> list[str]:
    ranks_of_call = {_call(mismatch.expected): list(mismatch.expected_ranks)}
    for rank, call in mismatch.deviating.items():
        if rank not in mismatch.expected_ranks:
            ranks_of_call.setdefault(_call(call), []).append(rank)
    return [f"{numbers('rank', ranks)}: {call}" for call, ranks in list(ranks_of_call.items())[:_MOST_RANKS]]


def _call(call: Call) -> str:
    frame = causes.user_frame(call.frames)
    where = f", called in {frame}" if frame else ""
    return f"{call.op} {sizes(call)} ({call.state}){where}"


def _rank(state: RankState) -> dict[str, object]:
    return {
        "rank": state.rank,
        "last_call": state.last_call,
        "last_completed": state.last_completed,
        "waits_in": state.waits_in,
        "on_host": state.on_host,
    }


def _mismatch(mismatch: Mismatch) -> dict[str, object]:
    return {
        "group": mismatch.group.name,
        "seq": mismatch.seq,
        "differs": mismatch.kind,
        "expected": {
            "ranks": list(mismatch.expected_ranks),
            "op": mismatch.expected.op,
            "sizes": sizes(mismatch.expected),
        },
        "deviating": [
            {"rank": rank, "op": call.op, "sizes": sizes(call), "explanation": mismatch.explanations.get(rank, "")}
            for rank, call in mismatch.deviating.items()
        ],
        "has_majority": not mismatch.is_tied,
    }
