"""Work against what the device allows: rooflines, and slowdowns by concurrent work."""

import math
from collections.abc import Mapping, Sequence

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
_MARKER_SPREAD, _RANGE_MARGIN, _LEAST_MARGIN = 0.6, 0.08, 0.02

MOST_TIME = 0.99
"""The share of the time whose calls are drawn, the longest first: tiny calls are far below any roof."""
WITHOUT_PRODUCTS = 0.25
"""Operations per byte at which calls without products are drawn: one per element of 16 bits that is read or written."""
_MARKERS = {True: ("products", style.COLOURS["compute"], "circle"), False: ("without products", "#E69F00", "diamond")}
_SIZES = (7.0, 26.0)
_HEIGHT_PX = 560
_PLOT_PX = 440
"""Height of the plot itself: without the legend above it and the labels of the axis below it."""
_NAMES_PX, _NAME_FONT_PX = 72, 11
"""Width of the names of roofs, which stand to the right of the plot, and the size of their font."""


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
    ends = [1.0, *slowed.select(pl.col("slowdown", "low", "high")).unpivot()["value"].drop_nulls()]
    margin = max(_RANGE_MARGIN * (max(ends) - min(ends)), _LEAST_MARGIN)
    around_one = [min(ends) - margin, max(ends) + margin]  # not from zero: work that runs alone has the factor 1
    figure.update_xaxes(title="slowdown relative to running alone", ticksuffix="×", range=around_one)
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
            [order.index(phase) for phase in sums["phase"]],
            sums["overlapped_ns"] / 1e6,
            name=f"during {other}",
            colour=colour,
            customdata=[[_phase_hover(row)] for row in sums.iter_rows(named=True)],
            hover=f"<b>{kind} during {other}</b>, %{{customdata[0]}}",
        )
    return style.with_labelled_rows(
        figure, order, edge_px=150 + 14 * len(order), barmode="group", bargap=0.25, showlegend=True
    )


def delayed_preparation(preparation: pl.DataFrame) -> go.Figure:
    """Duration of each preparation of a collective over what it takes alone, on logarithmic axes.

    `preparation` is `preparation` of a run. Points on the diagonal took as long as alone; points
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


def roofline(rows: pl.DataFrame, roofs: pl.DataFrame) -> go.Figure:
    """Return the rate of each row by its operations per byte, on logarithmic axes, with the roofs of the device.

    `rows` and `roofs` are `rooflines.by_call` and `rooflines.roofs`, of one kind of device. The area of a marker is the
    time of its calls. Calls without products are drawn at WITHOUT_PRODUCTS, as far below the bandwidth of the memory
    as their own is. The rows with most time are drawn, up to MOST_TIME of it.
    """
    bandwidth = float(roofs["memory_bytes_per_s"][0])
    before_ns = pl.col("work_ns").cum_sum() - pl.col("work_ns")
    longest = rows.sort("work_ns", descending=True).filter(before_ns <= MOST_TIME * pl.col("work_ns").sum())
    points = longest.with_columns(_places())
    ends = _ends(points["x"].to_list(), roofs["flops_per_s"].to_list(), bandwidth)
    rates = style.log_axis([*points["y"].to_list(), *roofs["flops_per_s"]], _rate)
    names = roofs.group_by("flops_per_s").agg(pl.col("dtype").sort().str.join("/")).sort("flops_per_s")
    figure = go.Figure()
    for peak, name in names.iter_rows():
        _add_roof(figure, name, peak, bandwidth, ends)
    _name_roofs(figure, dict(names.iter_rows()), rates["range"])
    place = 1.0 if ends[0] < 1 < ends[1] else ends[0] * 2
    figure.add_annotation(
        x=math.log10(place), y=math.log10(place * bandwidth), text=f"memory {units.rate(bandwidth)}",
        showarrow=False, xanchor="left", yanchor="top", xshift=8, yshift=-2, font={"size": 11},
    )  # fmt: skip
    longest_ns = float(points["work_ns"].max() or 1)  # type: ignore[arg-type]
    for has_products, calls in points.group_by(pl.col("flops_per_byte").is_not_null(), maintain_order=True):
        _add_calls(figure, calls, longest_ns, has_products=bool(has_products[0]))
    figure.update_xaxes(title="operations per byte", type="log", range=[math.log10(end) for end in ends], dtick=1)
    figure.update_yaxes(title="FLOP/s", **rates)
    return style.with_style(figure, height_px=_HEIGHT_PX).update_layout(margin={"r": _NAMES_PX})


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


def _rate(flops_per_s: float) -> str:
    return f"{units.operations(flops_per_s)}/s"


def _places() -> list[pl.Expr]:
    x = pl.col("flops_per_byte").fill_null(WITHOUT_PRODUCTS)
    return [x.alias("x"), (x * pl.col("tbytes_per_s") * 1e12).alias("y")]


def _ends(intensities: Sequence[float], peaks: Sequence[float], bandwidth: float) -> tuple[float, float]:
    """Return the range of the horizontal axis: all calls, and the ridge of the highest roof."""
    points = [*intensities, max(peaks) / bandwidth]
    return 10 ** math.floor(math.log10(min(points)) - 0.1), 10 ** math.ceil(math.log10(max(points)) + 0.1)


def _add_roof(figure: go.Figure, label: str, peak: float, bandwidth: float, ends: tuple[float, float]) -> None:
    corners = [ends[0], peak / bandwidth, ends[1]]
    figure.add_scatter(
        x=corners,
        y=[min(peak, intensity * bandwidth) for intensity in corners],
        mode="lines",
        line={"color": "rgba(128, 138, 150, 0.8)", "width": 1.5},
        showlegend=False,
        hovertemplate=f"{label}: {_rate(peak)}; memory {units.rate(bandwidth)}<extra></extra>",
    )


def _name_roofs(figure: go.Figure, names: Mapping[float, str], powers: Sequence[float]) -> None:
    """Write names of roofs, the lowest first, to the right of their ends: those of close roofs above one another."""
    power_px = _PLOT_PX / (powers[1] - powers[0])
    free_px = -math.inf
    for peak, name in names.items():
        roof_px = power_px * math.log10(peak)
        name_px = max(roof_px, free_px)
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=5, y=math.log10(peak), yshift=name_px - roof_px, text=name,
            showarrow=False, font={"size": _NAME_FONT_PX},
        )  # fmt: skip
        free_px = name_px + _NAME_FONT_PX + 3


def _add_calls(figure: go.Figure, calls: pl.DataFrame, longest_ns: float, *, has_products: bool) -> None:
    name, colour, symbol = _MARKERS[has_products]
    min_px, max_px = _SIZES
    figure.add_scatter(
        x=calls["x"].to_list(),
        y=calls["y"].to_list(),
        mode="markers",
        name=name,
        marker={
            "color": colour,
            "symbol": symbol,
            "size": [max(min_px, max_px * math.sqrt(ns / longest_ns)) for ns in calls["work_ns"]],
            "opacity": 0.85,
            "line": {"width": 0.5, "color": "rgba(128, 138, 150, 0.9)"},
        },
        customdata=[
            [
                escaping.escape(row["name"], 80),
                escaping.escape(row["shapes"] or "", 120),
                "" if row["tflops_per_s"] is None else f"{_rate(row['tflops_per_s'] * 1e12)}, ",
                units.rate(row["tbytes_per_s"] * 1e12),
                units.share(row["roofline_ratio"]),
                units.duration(row["work_ns"]),
                f"{row['count']:,}",
                units.duration(row["above_ns"]),
            ]
            for row in calls.to_dicts()
        ],
        hovertemplate="<b>%{customdata[0]}</b> %{customdata[1]}<br>%{customdata[2]}%{customdata[3]}: %{customdata[4]} "
        "of the roofline<br>%{customdata[5]} in %{customdata[6]} calls, %{customdata[7]} above the roofline"
        "<extra></extra>",
    )
