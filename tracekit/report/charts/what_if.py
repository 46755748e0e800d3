"""Potential savings from a replay: bars by cause, and by rank."""

from collections.abc import Mapping

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes.cause import Kind
from tracekit.report.charts import style
from tracekit.report.charts.style import CAUSES, COLOURS

_COLOURS = {
    Kind.COMMUNICATION: COLOURS["communication"],
    Kind.STRAGGLERS: COLOURS["waiting"],
    Kind.CONTENTION: CAUSES["contention"][1],
    Kind.HOST: CAUSES["host"][1],
    Kind.COMPUTE: COLOURS["compute"],
}
_TEXT_PX = 116
_WIDTH = 0.7  # else Plotly takes the distance to the next bar of the same colour
_SEVERAL = ("several causes", COLOURS["evidence"])


def potential_savings(ranked: pl.DataFrame) -> go.Figure:
    """Return the potential saving per step of each cause by itself, as bars in the order of the table.

    `ranked` is `report.what_if.as_table`. The colour says what a cause is about, a paler bar has less confidence.
    """
    rows = list(ranked.iter_rows(named=True))
    figure = go.Figure()
    for label, colour in dict.fromkeys(map(_kind, ranked["cause"])):
        own_rows = [(position, row) for position, row in enumerate(rows) if _kind(row["cause"])[0] == label]
        style.add_bars(
            figure,
            [position for position, _ in own_rows],
            [row["saved_ns"] / 1e6 for _, row in own_rows],
            name=label,
            width=_WIDTH,
            colour=colour,
            marker_opacity=[0.3 + 0.7 * row["confidence"] for _, row in own_rows],
            text=[f"{units.duration(row['saved_ns'])} · {units.share(row['saved_ratio'])}" for _, row in own_rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[_hover(row)] for _, row in own_rows],
            hover="%{customdata[0]}",
        )
    max_ms = max((row["saved_ns"] for row in rows), default=0) / 1e6
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(title="potential saving per step", range=[0, 1.02 * max_ms or 1])
    style.scale_times(figure)
    style.label_all_rows(figure, ranked["cause"].to_list())
    figure = style.with_style(figure, height_px=140 + 28 * len(rows))
    return figure.update_layout(margin_r=_TEXT_PX)  # the text behind the longest bar, however narrow the figure is


def savings_by_rank(by_rank: pl.DataFrame, cause: str, labels: Mapping[int, str] | None = None) -> go.Figure:
    """Replayed step time of each rank: the remaining time without a cause and the saving, stacked.

    `by_rank` is that of one saving in `savings.by_rank`, `cause` the name of its cause, or of several. `labels` are the
    ranks to draw, each with a text for its label; by default all.
    """
    if labels is not None:
        by_rank = by_rank.filter(pl.col("rank").is_in(list(labels)))
    left_ns = by_rank.select(pl.min_horizontal("without_ns", "replayed_ns"))["without_ns"]
    parts = {
        "remaining": (left_ns, COLOURS["idle"]),
        "saved": (by_rank["saved_ns"].clip(0), _kind(cause)[1]),
    }
    figure = go.Figure()
    for label, (times_ns, colour) in parts.items():
        style.add_bars(
            figure,
            range(by_rank.height),
            times_ns / 1e6,
            name=label,
            colour=colour,
            customdata=[[_rank_hover(row)] for row in by_rank.iter_rows(named=True)],
            hover="%{customdata[0]}",
        )
    figure.update_xaxes(title="replayed step")
    return style.with_labelled_rows(figure, style.rank_names(by_rank["rank"], labels), edge_px=150)


def _kind(name: str) -> tuple[str, str]:
    kind = next((cause.kind for cause in causes.all_causes() if cause.name == name), None)
    return _SEVERAL if kind is None else (kind.value, _COLOURS[kind])


def _hover(row: dict[str, object]) -> str:
    caveat = f"<br>less certain: {escaping.escape(str(row['caveat']), 160)}" if row["caveat"] else ""
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
