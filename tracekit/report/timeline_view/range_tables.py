"""What a range of the timeline contains, as tables of text for the browser."""

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.report import timeline
from tracekit.report.timeline_view import message

MAX_RANGE_RANKS, MAX_RANGE_NAMES = 64, 50
_RATES = ("bus bandwidth", "copy bandwidth", "FLOP/s")
_NOTE = (
    "Slices are cut at the ends of the range. Busy time counts each moment of a rank once. Bandwidths and rates are "
    "over the time in which the rank communicates (waiting included), copies or computes."
)


def tables(
    scene: timeline.Scene,
    totals: timeline.RangeTotals,
    rates: pl.DataFrame | None,
    *,
    is_reading: bool,
    rank_name: Callable[[int], str],
    owner: Callable[[int], str] = lambda _: "",
) -> dict[str, Any]:
    """Contents of a range as tables of text; `rates` are those of `timeline.range_rates`, None without.

    `rank_name` returns what a rank is called, `owner` the run that a name_id belongs to, if there are several.
    """
    start_ns, end_ns = (edge - scene.span[0] for edge in totals.window)
    tables = [_range_by_rank(totals, rates, rank_name), _range_by_kind(totals), _range_by_name(scene, totals, owner)]
    return {
        "start": start_ns,
        "end": end_ns,
        "is_reading": is_reading,
        "tables": [table for table in tables if table["rows"]],
        "notes": [_NOTE, *(["Reading bandwidth and FLOPs from the traces …"] if is_reading else [])],
    }


def unknown(scene: timeline.Scene, window: Window) -> dict[str, Any]:
    """Return the message of a range that is still being added up."""
    start_ns, end_ns = (edge - scene.span[0] for edge in window)
    return {"start": start_ns, "end": end_ns, "is_reading": True, "tables": [], "notes": ["Adding up …"]}


def _range_by_rank(
    totals: timeline.RangeTotals, rates: pl.DataFrame | None, rank_name: Callable[[int], str]
) -> dict[str, Any]:
    length_ns = totals.window[1] - totals.window[0]
    parts = {"compute_ns": "compute", "exposed_communication_ns": "exposed communication"}
    parts |= {"exposed_copy_ns": "exposed copy", "idle_ns": "idle"}
    by_rank = {row["rank"]: row for row in rates.iter_rows(named=True)} if rates is not None else {}
    rows = []
    for row in totals.by_rank.head(MAX_RANGE_RANKS).iter_rows(named=True):
        cells = [f"{units.duration(row[name])} · {units.share(row[name] / length_ns)}" for name in parts]
        rows.append([f"{rank_name(row['rank'])} · {escaping.inert(row['group'], message.MAX_NAME)}", *cells])
        if rates is not None:
            rows[-1] += _rate_cells(row, by_rank.get(row["rank"], {}))
    header = ["rank", *parts.values(), *(_RATES if rates is not None else ())]
    left_out = totals.by_rank.height - len(rows)
    title = "Time by rank" + (f" (the first {len(rows)}, {left_out} more)" if left_out else "")
    return {"title": title, "header": header, "rows": rows}


def _rate_cells(row: Mapping[str, Any], rates: Mapping[str, Any]) -> list[str]:
    """Return bus bandwidth and bandwidth of copies while these run, and FLOP/s while the rank computes."""
    pairs = (("bus_bytes", "communication_ns"), ("copied_bytes", "copy_ns"), ("flops", "compute_ns"))
    writes: tuple[Callable[[float], str], ...] = (units.rate, units.rate, _operations_per_s)
    return [
        write(rates[amount] / row[busy] * 1e9) if rates.get(amount) is not None and row[busy] else "—"
        for (amount, busy), write in zip(pairs, writes, strict=True)
    ]


def _operations_per_s(value: float) -> str:
    return f"{units.operations(value)}/s"


def _range_by_kind(totals: timeline.RangeTotals) -> dict[str, Any]:
    rows = [
        [
            message.kind(row["kind"])["label"],
            f"{row['count']:,}",
            units.duration(row["busy_ns"]),
            units.duration(row["total_ns"]),
        ]
        for row in totals.by_kind.iter_rows(named=True)
    ]
    return {"title": "Time by kind, all ranks", "header": ["kind", "slices", "busy", "sum of slices"], "rows": rows}


def _range_by_name(scene: timeline.Scene, totals: timeline.RangeTotals, owner: Callable[[int], str]) -> dict[str, Any]:
    top = totals.by_name.head(MAX_RANGE_NAMES)
    all_ns = max(int(totals.by_name["total_ns"].sum()), 1)
    rows = []
    for name, row in zip(timeline.names(scene, top["name_id"]), top.iter_rows(), strict=True):
        kind, name_id, count, total_ns, ranks = row
        times = (units.duration(total_ns), units.share(total_ns / all_ns))
        rows.append(
            [owner(name_id) + message.name_text(name), message.kind(kind)["label"], f"{count:,}", *times, str(ranks)]
        )
    left_out = totals.by_name.height - len(rows)
    title = "Time by kernel or operator" + (f" (the first {len(rows)}, {left_out} more)" if left_out else "")
    return {"title": title, "header": ["name", "kind", "slices", "sum", "share", "ranks"], "rows": rows}
