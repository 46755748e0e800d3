"""Work that shares a device: what runs concurrently, how much it is slowed, and delayed preparation of collectives."""

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.compute import contention
from tracekit.model import escaping, units
from tracekit.report.charts import style
from tracekit.report.charts.style import COLOURS

KIND_COLOURS = {
    contention.COMPUTE: COLOURS["compute"],
    contention.COMMUNICATION: COLOURS["communication"],
    contention.PREPARATION: "#F0E442",
    contention.COPY: COLOURS["memcpy"],
}
MAX_POINTS = 1000
MAX_SLOWED_RANKS = 64
_NO_PHASE = "no phase"
_MARKER_SPREAD = 0.6


def slowdowns(pairs: pl.DataFrame) -> go.Figure:
    """Return the slowdown of each kind of work next to another kind: one marker per rank, with its interval.

    `pairs` is `analysis.compute.collective_contention.all_pairs`; pairs that never ran alone have no marker. Of a pair
    with more than `MAX_SLOWED_RANKS` ranks, the smallest, the largest and some evenly between are drawn.
    """
    slowed = _spread_over_ranks(pairs.drop_nulls("slowdown"))
    names = slowed.select("kind", "concurrent_kind").unique(maintain_order=True).sort("kind", "concurrent_kind").rows()
    ranks = slowed.select("rank", "device").unique().sort("rank", "device").rows()
    figure = go.Figure()
    for kind in KIND_COLOURS:
        rows = [row for row in slowed.iter_rows(named=True) if row["kind"] == kind]
        if not rows:
            continue
        figure.add_scatter(
            x=[row["slowdown"] for row in rows],
            y=[
                names.index((kind, row["concurrent_kind"]))
                + _marker_offset(ranks.index((row["rank"], row["device"])), len(ranks))
                for row in rows
            ],
            mode="markers",
            name=kind,
            marker={"color": KIND_COLOURS[kind], "size": 9, "line": {"width": 1, "color": "rgba(128, 138, 150, 0.9)"}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [(row["high"] or row["slowdown"]) - row["slowdown"] for row in rows],
                "arrayminus": [row["slowdown"] - (row["low"] or row["slowdown"]) for row in rows],
                "thickness": 1.4,
                "width": 3,
            },
            customdata=[[_hover(row)] for row in rows],
            hovertemplate="%{customdata[0]}<extra></extra>",
        )
    figure.add_vline(x=1, line={"color": COLOURS["phase"], "dash": "dot"})
    figure.update_xaxes(title="slowdown relative to running alone", ticksuffix="×", rangemode="tozero")
    style.label_all_rows(figure, [f"{kind} during {other}" for kind, other in names])
    return style.with_style(figure, height_px=150 + 46 * len(names))


def _spread_over_ranks(slowed: pl.DataFrame) -> pl.DataFrame:
    """Return rows evenly spread over the order of slowdowns of each pair of kinds, the first and the last included."""
    pair = ["kind", "concurrent_kind"]
    count, place = pl.len().over(pair), pl.int_range(pl.len()).over(pair)
    stride = (count - 1) / (MAX_SLOWED_RANKS - 1)
    is_next = (place / stride).floor() > ((place - 1) / stride).floor()
    ordered = slowed.sort(*pair, "slowdown", "rank")
    return ordered.filter((count <= MAX_SLOWED_RANKS) | (place == 0) | is_next).sort("rank", "device", *pair)


def concurrent_time(by_phase: pl.DataFrame, kind: str = contention.COMPUTE) -> go.Figure:
    """Time that one kind of work ran concurrently with each other kind, in bars by phase, summed over ranks.

    `by_phase` is `analysis.compute.contention_totals.by_phase`.
    """
    kind_rows = by_phase.filter(pl.col("kind") == kind).with_columns(pl.col("phase").fill_null(_NO_PHASE))
    phases = kind_rows.group_by("phase").agg(pl.col("overlapped_ns").sum()).sort("overlapped_ns", descending=True)
    order = phases["phase"].to_list()
    figure = go.Figure()
    for other, colour in KIND_COLOURS.items():
        rows = kind_rows.filter(pl.col("concurrent_kind") == other)
        sums = rows.group_by("phase").agg(pl.col("calls", "overlapped_ns", "judged_ns", "lost_ns").sum())
        if sums.is_empty():
            continue
        style.add_bars(
            figure,
            map(order.index, sums["phase"]),
            sums["overlapped_ns"] / 1e6,
            name=f"during {other}",
            colour=colour,
            customdata=[[_phase_hover(row)] for row in sums.iter_rows(named=True)],
            hover=f"<b>{kind} during {other}</b>, %{{customdata[0]}}",
        )
    return style.with_labelled_rows(
        figure, order, row_px=44, edge_px=150, barmode="group", bargap=0.25, showlegend=True
    )


def delayed_preparation(preparation: pl.DataFrame) -> go.Figure:
    """Duration of each preparation of a collective over what it takes alone, on logarithmic axes.

    `preparation` is `contention.preparation` of a run. Points on the diagonal took as long as alone; points
    far above it were slowed. At most MAX_POINTS are drawn, those with the largest loss.
    """
    comparable = preparation.drop_nulls("alone_ns").filter(pl.col("alone_ns") > 0, pl.col("dur_ns") > 0)
    costliest = comparable.sort(pl.col("dur_ns") - pl.col("alone_ns"), descending=True).head(MAX_POINTS)
    figure = go.Figure()
    during_compute = pl.col("overlapped_ns") * 2 > pl.col("dur_ns")
    groups = {
        "during compute": (costliest.filter(during_compute), KIND_COLOURS[contention.COMPUTE]),
        "alone": (costliest.filter(~during_compute), COLOURS["idle"]),
    }
    for label, (rows, colour) in groups.items():
        if rows.is_empty():
            continue
        figure.add_scatter(
            x=rows["alone_ns"].to_list(),
            y=rows["dur_ns"].to_list(),
            mode="markers",
            name=label,
            marker={"color": colour, "size": 7, "opacity": 0.65},
            customdata=[[_preparation_hover(row)] for row in rows.iter_rows(named=True)],
            hovertemplate="%{customdata[0]}<extra></extra>",
        )
    values = [*costliest["alone_ns"], *costliest["dur_ns"]]
    if values:
        ends = [min(values), max(values)]
        line = {"color": COLOURS["phase"], "width": 1.2, "dash": "dot"}
        figure.add_scatter(x=ends, y=ends, mode="lines", line=line, name="same as alone", hoverinfo="skip")
    figure.update_xaxes(title="duration alone", **style.log_axis(costliest["alone_ns"], units.duration))
    figure.update_yaxes(title="measured duration", **style.log_axis(costliest["dur_ns"], units.duration))
    return style.with_style(figure, height_px=380)


def _marker_offset(number: int, count: int) -> float:
    return 0.0 if count < 2 else _MARKER_SPREAD * (number / (count - 1) - 0.5)


def _hover(row: dict[str, object]) -> str:
    interval = "" if row["low"] is None else f", 95% interval {row['low']:.2f} to {row['high']:.2f}"
    return (
        f"<b>rank {row['rank']}: {row['kind']} during {row['concurrent_kind']}</b><br>"
        f"{row['slowdown']:.2f} times the duration alone"
        f"{interval}<br>together for {units.duration(int(str(row['overlapped_ns'])))}, "
        f"{units.duration(int(str(row['lost_ns'])))} longer for it"
    )


def _phase_hover(row: dict[str, int]) -> str:
    lost = f"{units.duration(row['lost_ns'])} longer for it" if row["judged_ns"] else "never ran alone"
    return f"{units.duration(row['overlapped_ns'])} of {row['calls']:,} calls<br>{lost}"


def _preparation_hover(row: dict[str, object]) -> str:
    dur_ns, alone_ns = int(str(row["dur_ns"])), int(str(row["alone_ns"]))
    unit = f" · unit {escaping.escape(str(row['unit'] or 'root'), 80)}" if row["unit"] is not None else ""
    return (
        f"<b>{escaping.escape(str(row['name']), 120)}</b><br>{units.duration(dur_ns)}, "
        f"alone {units.duration(alone_ns)}<br>rank {row['rank']} · step {row['step']}{unit}"
    )
