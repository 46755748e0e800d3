"""Saves: their stages on each rank, blocked and written time, and the write rate of each rank."""

import plotly.graph_objects as go
import polars as pl

from tracekit import conventions
from tracekit.model import escaping, units
from tracekit.report.charts import style
from tracekit.report.charts.style import COLOURS

# Okabe and Ito's again; waiting as everywhere.
_STAGES = {
    conventions.PLAN: "#CC79A7",
    conventions.STAGE: "#009E73",
    conventions.SERIALIZE: "#0072B2",
    conventions.WRITE: "#D55E00",
    conventions.FSYNC: "#B9AFD4",
    conventions.FINISH: "#56B4E9",
    conventions.LAUNCH: "#7D8796",
    conventions.WAIT: COLOURS["waiting"],
}
_MOST_ROWS = 64
_MOST_SAVES = 200
_MOST_POINTS = 5000


def save_stages(lines: pl.DataFrame) -> go.Figure:
    """Return the stages of one save, a bar for each rank and worker, in the order in which they were first entered.

    `lines` are those of one save of `analysis.saves.stages`; of many ranks those that take longest are drawn. Stages
    alternate tensor by tensor; a bar shows the total time of each stage, so that its length is the total time of the
    worker.
    """
    spent = (
        lines.filter(pl.col("stage").is_in(list(_STAGES)))
        .group_by("rank", "blocking", "stage", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("dur_ns").sum(), pl.col("bytes").sum())
        .sort("rank", "blocking", "start_ns", descending=[False, True, False])
    )
    if spent.is_empty():
        return style.empty()
    rows = spent.group_by("rank", "blocking", maintain_order=True).agg(pl.col("dur_ns").sum())
    if rows.height > _MOST_ROWS:
        longest = rows.sort("dur_ns", "rank", descending=[True, False]).head(_MOST_ROWS)
        rows = rows.join(longest.select("rank", "blocking"), on=["rank", "blocking"], how="semi", maintain_order="left")
    rows = rows.select("rank", "blocking")
    both = rows["blocking"].n_unique() > 1
    began = lines.group_by("rank", "blocking").agg(began_ns=pl.col("start_ns").min())
    first_ns = int(str(lines["start_ns"].min()))
    stage_bars = (
        spent.join(rows.with_row_index("place"), on=["rank", "blocking"])
        .join(began, on=["rank", "blocking"])
        .with_columns(
            base_ns=pl.col("began_ns") - first_ns + pl.col("dur_ns").cum_sum().over("place") - pl.col("dur_ns")
        )
    )
    figure = go.Figure()
    for stage, colour in _STAGES.items():
        bars = stage_bars.filter(pl.col("stage") == stage)
        if bars.height:
            style.add_bars(
                figure,
                bars["place"],
                bars["dur_ns"] / 1e6,
                base=bars["base_ns"] / 1e6,
                name=stage,
                colour=colour,
                customdata=[
                    [units.duration(took), units.size(moved) if moved else ""]
                    for took, moved in bars.select("dur_ns", "bytes").rows()
                ],
                hover=f"<b>{stage}</b> %{{customdata[0]}} %{{customdata[1]}}",
            )
    workers = {True: " · training", False: " · background"} if both else {}
    labels = [f"rank {rank}{workers.get(blocking, '')}" for rank, blocking in rows.rows()]
    return style.with_labelled_rows(figure, labels, barmode="overlay")


def save_clocks(saves: pl.DataFrame) -> go.Figure:
    """Return two bars per save: the time that training was blocked and the time until all data was written.

    `saves` is `analysis.saves.by_save`; only the last saves are shown.
    """
    last_saves = saves.tail(_MOST_SAVES)
    figure = go.Figure()
    for column, label, colour in (
        ("blocked_ns", "training blocked", COLOURS["waiting"]),
        ("written_ns", "until all data was written", COLOURS["compute"]),
    ):
        figure.add_bar(
            x=list(range(last_saves.height)),
            y=(last_saves[column] / 1e6).to_list(),
            name=label,
            marker={"color": colour, "line": {"width": 0}},
            customdata=[
                [escaping.escape(name, 80), units.duration(ns)] for name, ns in last_saves.select("save", column).rows()
            ],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{label} %{{customdata[1]}}<extra></extra>",
        )
    names = [escaping.escape(name, 30) for name in last_saves["save"]]
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_xaxes(tickvals=list(range(last_saves.height)) if last_saves.height <= 30 else None, ticktext=names)
    figure.update_yaxes(rangemode="tozero")
    style.scale_times(figure, "y")
    return style.with_style(figure, height_px=320)


def save_bandwidth(clocks: pl.DataFrame) -> go.Figure:
    """Return the write rate of each rank, bytes per time in write and fsync, one point per rank and save.

    `clocks` is `analysis.saves.by_rank`; saves without fsync have no point. Of very many points, each rank has that of
    its slowest save.
    """
    rates = clocks.drop_nulls("storage_bytes_per_s")
    if rates.height > _MOST_POINTS:
        slowest = rates.sort("storage_bytes_per_s", "rank", maintain_order=True)
        rates = slowest.unique("rank", keep="first", maintain_order=True).sort("rank")
    figure = go.Figure()
    rows = rates.select("rank", "storage_bytes_per_s", "save").rows()
    per_unit, unit = (1e6, "MB/s") if rates.filter(pl.col("storage_bytes_per_s") >= 1e9).is_empty() else (1e9, "GB/s")
    figure.add_scatter(
        x=rates["rank"].to_list(),
        y=(rates["storage_bytes_per_s"] / per_unit).to_list(),
        mode="markers",
        marker={"color": COLOURS["compute"], "size": 9, "line": {"width": 1, "color": "rgba(255, 255, 255, 0.6)"}},
        customdata=[[escaping.escape(save, 80), units.rate(rate)] for _, rate, save in rows],
        hovertemplate="rank %{x}, %{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title="rank", dtick=1 if rates["rank"].n_unique() < 20 else None)
    figure.update_yaxes(title="durable write rate", ticksuffix=f" {unit}", rangemode="tozero")
    return style.with_style(figure, height_px=320)
