"""Drawn traces with a host: when each activity was launched, and what the host did meanwhile."""

from collections.abc import Iterable, Mapping

import polars as pl

from tests.support import drawn_traces
from tracekit.model import schema
from tracekit.model.trace import Trace

HOST_LANE = 99
UNIT_NS = 50_000
"""One character: longer than what is taken for a wait that has just ended."""


def trace(
    picture: str,
    launched: Mapping[str, int] | None = None,
    doing: tuple[tuple[str, str, int, int], ...] = (),
    *,
    ops: Mapping[str, str] | None = None,
    phases: Mapping[str, str] | None = None,
    prepares: str = "p",
    sent_bytes: int = 1024,
    **more: object,
) -> Trace:
    """Return a drawn trace whose activities were launched at `launched` (by name: in characters; else as they start).

    `doing` are slices of the host: name, kind, start and end. `ops` says which collective is what; activities named
    `prepares` are compute wherever they are drawn.
    """
    columns = {letter: {"kind": "compute"} for letter in prepares}
    for letter, phase in (phases or {}).items():
        columns.setdefault(letter, {})["phase"] = phase
    columns |= {letter: columns.get(letter, {}) | own for letter, own in dict(more.pop("columns", {})).items()}  # type: ignore[call-overload]
    plain = drawn_traces.trace(picture, scale_ns=UNIT_NS, columns=columns, **more)  # type: ignore[arg-type]
    calls = [
        {"id": row["id"], "name": "cudaLaunchKernel", "kind": "runtime", "start_ns": at, "dur_ns": 0}
        for row in plain.activities.iter_rows(named=True)
        for at in [launched[row["name"]] * UNIT_NS if row["name"] in (launched or {}) else row["start_ns"]]
    ]
    first = len(calls)
    slices = [
        {"id": first + i, "name": name, "kind": kind, "start_ns": start * UNIT_NS, "dur_ns": (end - start) * UNIT_NS}
        for i, (name, kind, start, end) in enumerate(doing)
    ]
    host = schema.OPS.conform(pl.DataFrame(calls + slices).with_columns(lane=pl.lit(HOST_LANE)))
    communicates = plain.activities.filter(pl.col("kind") == "communication")
    known = [
        {"activity_id": row["id"], "op": (ops or {}).get(row["name"], "all_gather"), "sent_bytes": sent_bytes}
        for row in communicates.iter_rows(named=True)
    ]
    collectives = pl.DataFrame(known) if known else pl.DataFrame(schema={"activity_id": pl.Int64})
    tables = {"ops": host, "collectives": collectives}
    return drawn_traces.trace(picture, scale_ns=UNIT_NS, columns=columns, **tables, **more)  # type: ignore[arg-type]


def time_sliced(places: Iterable[int], *, launched_late: Iterable[int] = ()) -> Trace:
    """Return a trace of 40 short kernels abcdabcd…, with 1 ms in which nothing runs before those in `places`.

    One is launched in each of the first 40 units of time, but those in `launched_late`: they start at once.
    """
    cells, first = "", []
    for number in range(40):
        cells += ("." * 20 if number in places else "") + "abcd"[number % 4]
        first.append(len(cells) - 1)
    drawn = trace(f"step {'0' * len(cells)}\ncompute {cells}")
    called = [(first[number] if number in launched_late else number) * UNIT_NS for number in range(40)]
    return drawn.replace(ops=drawn.ops.with_columns(pl.Series("start_ns", called, pl.Int64)))


def gap_rows(causes: pl.DataFrame, *more: str) -> list[tuple[object, ...]]:
    """Return cause, detail, start and length in characters (and further columns) of each piece."""
    return [
        (row["cause"], row["detail"], row["start_ns"] // UNIT_NS, row["dur_ns"] // UNIT_NS, *(row[m] for m in more))
        for row in causes.sort("start_ns").iter_rows(named=True)
    ]
