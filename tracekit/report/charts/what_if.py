"""Potential savings from a replay: bars by cause, and by rank."""

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts.style import CAUSES, COLOURS, label_rows, with_style

_KINDS = {
    "COMM": ("communication", COLOURS["communication"]),
    "RANK": ("stragglers", COLOURS["waiting"]),
    "STREAM": ("contention", CAUSES["contention"][1]),
    "HOST": ("host", CAUSES["host"][1]),
    "CKPT": ("host", CAUSES["host"][1]),
    "MEM001": ("host", CAUSES["host"][1]),
    "MEM": ("compute", COLOURS["compute"]),
}
"""What a cause is about and its colour, by how the code of the rule that speaks of it begins."""
_WIDTH = 0.7
"""Of a bar: Plotly would take the distance to the next of the same colour."""
_SEVERAL = ("several causes", COLOURS["evidence"])


def potential_savings(ranked: pl.DataFrame) -> go.Figure:
    """Return the potential saving per step of each cause by itself, as bars in the order of the table.

    `ranked` is `reports.whatif.as_table`. The colour says what a cause is about, a paler bar has less confidence.
    """
    rows = list(ranked.iter_rows(named=True))
    figure = go.Figure()
    for label, colour in dict.fromkeys(map(_kind, ranked["code"])):
        own_rows = [(at, row) for at, row in enumerate(rows) if _kind(row["code"])[0] == label]
        figure.add_bar(
            orientation="h",
            y=[at for at, _ in own_rows],
            x=[row["saved_ns"] / 1e6 for _, row in own_rows],
            name=label,
            width=_WIDTH,
            marker={
                "color": colour,
                "line": {"width": 0},
                "opacity": [0.3 + 0.7 * row["confidence"] for _, row in own_rows],
            },
            text=[f"{units.duration(row['saved_ns'])} · {units.share(row['saved_ratio'])}" for _, row in own_rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[_hover(row)] for _, row in own_rows],
            hovertemplate="%{customdata[0]}<extra></extra>",
        )
    max_ms = max((row["saved_ns"] for row in rows), default=0) / 1e6
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(title="potential saving per step", ticksuffix=" ms", range=[0, 1.18 * max_ms or 1])
    figure.update_yaxes(
        range=[len(rows) - 0.4, -0.6],
        tickvals=list(range(len(rows))),
        ticktext=[escaping.escape(row["cause"], 40) for row in rows],
        showgrid=False,
        fixedrange=True,
    )
    return with_style(figure, height_px=140 + 28 * len(rows))


def savings_by_rank(by_rank: pl.DataFrame, code: str) -> go.Figure:
    """Return what a replayed step takes on each rank: the remaining time without a cause and the saving, stacked.

    `by_rank` is that of one saving in `whatif.saving.by_rank`, `code` that of the rule that speaks of its cause; ''
    for several causes.
    """
    ranks, places = by_rank["rank"].to_list(), list(range(by_rank.height))
    left_ns = by_rank.select(pl.min_horizontal("without_ns", "replayed_ns"))["without_ns"]
    parts = {
        "remaining": (left_ns, COLOURS["idle"]),
        "saved": (by_rank["saved_ns"].clip(0), _kind(code)[1]),
    }
    figure = go.Figure()
    for label, (times_ns, colour) in parts.items():
        figure.add_bar(
            orientation="h",
            y=places,
            x=(times_ns / 1e6).to_list(),
            name=label,
            marker={"color": colour, "line": {"width": 0}},
            customdata=[[_rank_hover(row)] for row in by_rank.iter_rows(named=True)],
            hovertemplate="%{customdata[0]}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_xaxes(title="replayed step", ticksuffix=" ms", rangemode="tozero")
    label_rows(figure, [f"rank {rank}" for rank in ranks])
    return with_style(figure, height_px=min(150 + 30 * len(ranks), 1400))


def _kind(code: str) -> tuple[str, str]:
    return next((kind for start, kind in _KINDS.items() if code.startswith(start)), _SEVERAL)


def _hover(row: dict[str, object]) -> str:
    caveat = f"<br>less sure: {escaping.escape(str(row['caveat']), 160)}" if row["caveat"] else ""
    return (
        f"<b>without {escaping.escape(str(row['cause']))}</b>: step time "
        f"{units.duration(int(str(row['without_ns'])))}<br>saving {units.duration(int(str(row['saved_ns'])))} "
        f"({units.share(float(str(row['saved_ratio'])))}), confidence {float(str(row['confidence'])):.0%}{caveat}"
    )


def _rank_hover(row: dict[str, int]) -> str:
    return (
        f"<b>rank {row['rank']}</b>: {units.duration(row['replayed_ns'])}, without it "
        f"{units.duration(row['without_ns'])}<br>saving {units.duration(row['saved_ns'])}"
    )
