"""The longest kernels or ops as bars."""

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts import style

MAX_ROWS = 15


def top_bars(
    table: pl.DataFrame, by: Sequence[str], *, measure: str = "total_ns", max_rows: int = MAX_ROWS
) -> go.Figure:
    """Return the `max_rows` rows of a table of kernels or ops with the largest `measure`, as bars.

    A row is named by its columns `by` and has the colour of its kind. Long names are shortened in the
    middle; the hover shows more of them.
    """
    most_of = table.filter(pl.col(measure) > 0).sort(measure, descending=True).head(max_rows)
    labels = pl.Series("_label", map(_row_name, most_of.select(by).rows()), pl.String)
    shown = most_of.with_columns(labels).with_row_index("y")
    figure = go.Figure()
    for (kind,), rows in shown.group_by("kind", maintain_order=True):
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
    figure.update_xaxes(ticksuffix=" ms", rangemode="tozero")
    style.label_all_rows(figure, shown["_label"].to_list(), max_characters=56)
    return style.with_style(figure, height_px=130 + 24 * shown.height)


def _row_name(values: Sequence[object]) -> str:
    return " · ".join("unknown" if value is None else str(value) or "root" for value in values)
