"""Time breakdowns and the longest kernels or ops as bars, and step times as lines."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from tracekit.model import escaping, kernel_names, units
from tracekit.report.charts import style

MAX_ROWS = 15
_LABEL_CHARACTERS = 40


def breakdown(summary: pl.DataFrame, ranks: Mapping[int, str] | None = None) -> go.Figure:
    """Return stacked bars of the time breakdown, one bar per row of a breakdown (per rank, or per step).

    `summary` has the columns of `analysis.breakdown` and rank; window, step and device label the bars where they
    differ. `ranks`, by default all, are those drawn, each with a text for its label.
    """
    if ranks is not None:
        summary = summary.filter(pl.col("rank").is_in(list(ranks)))
    labels = zip(_row_labels(summary), summary["rank"], strict=True)
    return _stack_parts(summary, [" · ".join(filter(None, (label, (ranks or {}).get(rank)))) for label, rank in labels])


def comparison(summaries: Mapping[str, pl.DataFrame]) -> go.Figure:
    """Return one stacked bar per run: the mean step, its parts averaged over all ranks and steps.

    `summaries` maps the name of a run to its breakdown by step.
    """
    means = [
        table.select(pl.col("duration_ns", *style.PARTS).mean().round().cast(pl.Int64)) for table in summaries.values()
    ]
    return _stack_parts(pl.concat(means), list(summaries))


def step_times(summary: pl.DataFrame, ranks: Mapping[int, str] | None = None) -> go.Figure:
    """Return step time over steps, one line per rank, from a breakdown by step; `ranks` as in `breakdown`."""
    figure = go.Figure()
    steps = summary.filter(pl.col("step").is_not_null()).sort("rank", "step")
    if ranks is not None:
        steps = steps.filter(pl.col("rank").is_in(list(ranks)))
    count = steps["rank"].n_unique()
    # A rank is no kind of work and has none of their colours. The ends of the scale vanish on a dark or a light page.
    colours = sample_colorscale("Viridis", [0.3 + 0.5 * i / max(count - 1, 1) for i in range(count)])
    for colour, ((rank,), rows) in zip(colours, steps.group_by("rank", maintain_order=True), strict=True):
        figure.add_scatter(
            line={"color": colour},
            x=rows["step"].to_list(),
            y=(rows["duration_ns"] / 1e6).to_list(),
            name=style.rank_names([int(str(rank))], ranks)[0],
            mode="lines+markers",
            customdata=[[units.duration(ns)] for ns in rows["duration_ns"]],
            hovertemplate=f"rank {rank}, step %{{x}}<br>%{{customdata[0]}}<extra></extra>",
        )
    figure.update_xaxes(title="step", dtick=1 if steps["step"].n_unique() < 20 else None)
    figure.update_yaxes(title="step time", rangemode="tozero")
    style.scale_times(figure, "y")
    return style.with_style(figure, height_px=320)


def top_bars(
    table: pl.DataFrame, by: Sequence[str], *, measure: str = "total_ns", max_rows: int = MAX_ROWS
) -> go.Figure:
    """Return the `max_rows` rows of a table of kernels or ops with the largest `measure`, as bars.

    A row is named by its columns `by` and has the colour of its kind. Long names are shortened so that they stay
    distinct; the hover shows more of them.
    """
    most_of = table.filter(pl.col(measure) > 0).sort(measure, descending=True).head(max_rows)
    names = [
        " · ".join("unknown" if value is None else str(value) or "root" for value in row)
        for row in most_of.select(by).iter_rows()
    ]
    short = kernel_names.short_names(most_of["name"].drop_nulls().to_list()) if "name" in by else {}
    labels = [
        " · ".join(short.get(value, str(value) or "root") if value is not None else "unknown" for value in row)
        for row in most_of.select(by).iter_rows()
    ]
    bars = most_of.with_columns(pl.Series("_label", names, pl.String)).with_row_index("y")
    figure = go.Figure()
    for (kind,), rows in bars.group_by("kind", maintain_order=True):
        style.add_bars(
            figure,
            rows["y"],
            rows[measure] / 1e6,
            name=style.KIND_LABELS.get(str(kind), str(kind)),
            width=0.75,  # else Plotly takes the distance to the next of the same kind
            colour=style.COLOURS.get(str(kind), style.COLOURS["phase"]),
            customdata=[
                [escaping.escape(name, 160), units.duration(ns), f"{count:,}"]
                for name, ns, count in rows.select("_label", measure, "count").iter_rows()
            ],
            hover="<b>%{customdata[0]}</b><br>%{customdata[1]} in %{customdata[2]} calls",
        )
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(rangemode="tozero")
    style.scale_times(figure)
    style.label_all_rows(figure, labels, max_characters=_LABEL_CHARACTERS)
    return style.with_style(figure, height_px=130 + 24 * bars.height)


def _stack_parts(parts: pl.DataFrame, labels: Sequence[str]) -> go.Figure:
    figure = go.Figure()
    for column, (label, kind) in style.PARTS.items():
        style.add_bars(
            figure,
            range(len(labels)),
            parts[column] / 1e6,
            name=label,
            colour=style.COLOURS[kind],
            customdata=[
                [escaping.escape(text), units.duration(ns), units.share(ns / total_ns if total_ns else 0.0)]
                for text, ns, total_ns in zip(labels, parts[column], parts["duration_ns"], strict=True)
            ],
            hover="<b>%{customdata[0]}</b><br>" + label + " %{customdata[1]} (%{customdata[2]})",
        )
    return style.with_labelled_rows(figure, labels)


def _row_labels(summary: pl.DataFrame) -> list[str]:
    names = ["rank"]
    names += ["window"] if "window" in summary.columns and summary["window"].n_unique() > 1 else []
    names += ["device"] if _drives_several_devices(summary) else []
    names += ["step"] if summary["step"].is_not_null().any() else []
    if len(names) > 1 and summary["rank"].n_unique() == 1:
        names.remove("rank")
    return [
        " · ".join(f"{n} {value}" for n, value in zip(names, row, strict=True)) for row in summary.select(names).rows()
    ]


def _drives_several_devices(summary: pl.DataFrame) -> bool:
    return "device" in summary.columns and bool(
        (summary.group_by("rank").agg(pl.col("device").n_unique())["device"] > 1).any()
    )
