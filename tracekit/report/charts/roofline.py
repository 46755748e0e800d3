"""Roofline: the rate of each kind of call by its operations per byte, below what the device allows."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts import style

MOST_TIME = 0.99
"""The share of the time whose calls are drawn, the longest first: tiny calls are far below any roof."""
WITHOUT_PRODUCTS = 0.25
"""Operations per byte at which calls without products are drawn: one per element of 16 bits that is read or written."""
_MARKERS = {True: ("products", style.COLOURS["compute"], "circle"), False: ("without products", "#E69F00", "diamond")}
_SIZES = (7.0, 26.0)
_HEIGHT_PX = 560


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
    figure = go.Figure()
    for (peak,), types in roofs.sort("flops_per_s").group_by("flops_per_s", maintain_order=True):
        _add_roof(figure, "/".join(types["dtype"].sort()), float(str(peak)), bandwidth, ends)
    _name_memory(figure, bandwidth, ends)
    longest_ns = float(points["work_ns"].max() or 1)  # type: ignore[arg-type]
    for has_products, calls in points.group_by(pl.col("flops_per_byte").is_not_null(), maintain_order=True):
        _add_calls(figure, calls, longest_ns, has_products=bool(has_products[0]))
    figure.update_xaxes(title="operations per byte", type="log", range=[math.log10(end) for end in ends], dtick=1)
    rates = [*points["y"].to_list(), float(roofs["flops_per_s"].max())]  # type: ignore[arg-type]
    figure.update_yaxes(title="FLOP/s", **style.log_axis(rates, _rate))
    return style.with_style(figure, height_px=_HEIGHT_PX)


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
    figure.add_annotation(
        x=math.log10(ends[1]),
        y=math.log10(peak),
        text=label,
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font={"size": 11},
    )


def _name_memory(figure: go.Figure, bandwidth: float, ends: tuple[float, float]) -> None:
    place = 1.0 if ends[0] < 1 < ends[1] else ends[0] * 2
    figure.add_annotation(
        x=math.log10(place), y=math.log10(place * bandwidth), text=f"memory {units.rate(bandwidth)}",
        showarrow=False, xanchor="left", yanchor="top", xshift=8, yshift=-2, font={"size": 11},
    )  # fmt: skip


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
