"""What replay says of a step: its critical path, and the saving without each cause of lost time."""

from collections.abc import Mapping

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes.cause import Kind
from tracekit.report.charts import style

_COLOURS = {
    Kind.COMMUNICATION: style.COLOURS["communication"],
    Kind.STRAGGLERS: style.COLOURS["waiting"],
    Kind.CONTENTION: style.CAUSES["contention"][1],
    Kind.HOST: style.CAUSES["host"][1],
    Kind.COMPUTE: style.COLOURS["compute"],
}
_TEXT_PX = 116
_WIDTH = 0.7  # else Plotly takes the distance to the next bar of the same colour
_SEVERAL = ("several causes", style.COLOURS["evidence"])

HOST_COLOUR = "#56B4E9"
PATH_COLOURS = {
    "compute": style.COLOURS["compute"],
    "communication": style.COLOURS["communication"],
    "memcpy": style.COLOURS["memcpy"],
    "memset": style.COLOURS["memset"],
    "host": HOST_COLOUR,
    "idle": style.COLOURS["idle"],
    "unrecorded": style.COLOURS["phase"],
}
"""The kinds of parts of a path, each with its colour."""
_MAX_BARS = 1500


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
        "remaining": (left_ns, style.COLOURS["idle"]),
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


def path_parts(parts: pl.DataFrame, start_ns: int, *, max_parts: int = _MAX_BARS) -> pl.DataFrame:
    """Return parts of a path to draw: at most `max_parts`, the shortest joined to those before them on their rank.

    `parts` has columns rank, kind, name, start_ns, dur_ns and others, and tiles the path. Parts that are too short to
    see are dropped if there are still too many. Times count from `start_ns`.
    """
    key = pl.struct("rank", "kind")
    joined = parts if parts.height <= max_parts else _join_parts(parts, key.ne_missing(key.shift(1)).cum_sum())
    longest = joined.sort("dur_ns", descending=True).head(max_parts).sort("start_ns")
    return longest.with_columns(from_ns=pl.col("start_ns") - start_ns)


def _join_parts(parts: pl.DataFrame, number: pl.Expr) -> pl.DataFrame:
    """Return neighbours of one number as one part, named by the longest of them."""
    longest = pl.col("name").sort_by("dur_ns", descending=True).first()
    other_columns = [name for name in parts.columns if name not in ("name", "dur_ns")]
    grouped = parts.group_by(number.alias("_number"), maintain_order=True)
    return grouped.agg(pl.col(other_columns).first(), longest, pl.col("dur_ns").sum()).select(parts.columns)


def critical_path(parts: pl.DataFrame, start_ns: int) -> go.Figure:
    """Return the path as bars in the row of the rank that owns each part; lines connect consecutive parts.

    `parts` has columns rank, kind, name, start_ns (on the run's clock), dur_ns, and trace_start_ns (the same time on
    the clock of the rank's trace). The customdata of a bar starts with rank, trace_start_ns and dur_ns.
    """
    if parts.is_empty():
        return style.empty()
    bars = path_parts(parts, start_ns)
    ranks = bars["rank"].unique().sort().to_list()
    placed_bars = bars.with_columns(y=pl.col("rank").replace_strict(ranks, range(len(ranks)), return_dtype=pl.Int64))
    figure = go.Figure()
    ends = placed_bars.select("y", x=pl.col("from_ns") / 1e6)
    figure.add_scatter(
        x=ends["x"].to_list(), y=ends["y"].to_list(), mode="lines", hoverinfo="skip", showlegend=False,
        line={"shape": "hv", "width": 1, "color": style.COLOURS["phase"]},
    )  # fmt: skip
    for kind, colour in PATH_COLOURS.items():
        kind_bars = placed_bars.filter(kind=kind)
        if kind_bars.height:
            _add(figure, kind_bars, kind, colour)
    figure.update_layout(barmode="overlay", dragmode="zoom", clickmode="event+select")
    style.scale_times(figure)
    style.label_all_rows(figure, [f"rank {rank}" for rank in ranks])
    return style.with_style(figure, height_px=140 + 34 * len(ranks))


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


def _add(figure: go.Figure, bars: pl.DataFrame, kind: str, colour: str) -> None:
    labels = [escaping.escape(name, 80) for name in bars["name"]]
    times = bars.select("rank", "trace_start_ns", "dur_ns").rows()
    style.add_bars(
        figure,
        bars["y"],
        (bars["dur_ns"] / 1e6).to_list(),
        colour=colour,
        hover=f"rank %{{customdata[0]}} · {kind}<br>%{{customdata[3]}}<br>%{{customdata[4]}}",
        name=style.KIND_LABELS.get(kind, kind),
        base=(bars["from_ns"] / 1e6).to_list(),
        width=0.72,
        customdata=[[*time, label, units.duration(time[2])] for time, label in zip(times, labels, strict=True)],
    )
