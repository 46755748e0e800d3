"""The diagnosis of a hang -> text or JSON."""

import json

from rich.console import RenderableType

from tracekit.analysis.hangs.collectives import Mismatch, sizes
from tracekit.analysis.hangs.diagnosis import Diagnosis, RankState
from tracekit.model.hang_dump import Call
from tracekit.model.units import duration, ranges
from tracekit.report import text_layout

_MOST_RANKS = 16
_MOST_CULPRITS = 8
_COLUMNS = ("rank", "last call", "last complete", "waits in", "on the host")


def as_json(hang: Diagnosis) -> str:
    """Return the diagnosis as one JSON object: see docs/hang.md."""
    wait = hang.wait
    document = {
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
    return json.dumps(document, indent=2) + "\n"


def as_text(hang: Diagnosis, *, width: int, color: bool = False) -> str:
    """Return the diagnosis as text: the verdict, what to do, the evidence and a row for each rank."""
    parts: list[RenderableType] = [text_layout.title(hang.verdict)]
    if hang.advice:
        parts += ["", text_layout.line("What to do: ", hang.advice)]
    if hang.wait is not None:
        parts += ["", text_layout.dim(_facts(hang))]
    if hang.cycle:
        parts += ["", text_layout.title("Cycle"), *(text_layout.hanging("→", text_layout.line(x)) for x in hang.cycle)]
    for mismatch in hang.mismatches[:3]:
        parts += ["", text_layout.title(f"Calls at seq {mismatch.seq} of {mismatch.group}"), *_calls(mismatch)]
    for culprit in hang.culprits[:_MOST_CULPRITS]:
        parts += ["", text_layout.line((f"Rank {culprit.rank}", text_layout.BOLD), f" {culprit.reason}")]
        parts += text_layout.bullets(culprit.evidence)
    if len(hang.culprits) > _MOST_CULPRITS:
        parts.append(text_layout.dim(f"and {len(hang.culprits) - _MOST_CULPRITS} more; --format json has all"))
    parts += _table(hang.ranks) + (["", *text_layout.bullets(hang.notes)] if hang.notes else [])
    return text_layout.print_to_string(parts, width=width, color=color)


def _facts(hang: Diagnosis) -> str:
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
    return "; ".join(parts)


def _calls(mismatch: Mismatch) -> list[RenderableType]:
    rows = [(f"ranks {ranges(mismatch.expected_ranks)}", mismatch.expected)]
    rows += [(f"rank {rank}", call) for rank, call in mismatch.deviating.items() if rank not in mismatch.expected_ranks]
    return [text_layout.hanging("·", text_layout.line(f"{who}: {_call(call)}")) for who, call in rows[:_MOST_RANKS]]


def _call(call: Call) -> str:
    where = next((f", called in {frame}" for frame in call.frames if "/site-packages/" not in frame.file), "")
    return f"{call.op} {sizes(call)} ({call.state}){where}"


def _table(ranks: tuple[RankState, ...]) -> list[RenderableType]:
    rows = [[str(r.rank), r.last_call, r.last_completed, r.waits_in, r.on_host] for r in ranks[:_MOST_RANKS]]
    more = [text_layout.dim(f"and {len(ranks) - _MOST_RANKS} more ranks; --format json has all")]
    rank_table = text_layout.table(_COLUMNS, rows) if rows else text_layout.dim("")
    return ["", rank_table, *(more if len(ranks) > _MOST_RANKS else [])]


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
