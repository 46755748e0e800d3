"""A replay of the allocator: recorded and predicted memory."""

from collections.abc import Mapping

import plotly.graph_objects as go

from tracekit.model import units
from tracekit.report.charts.memory import byte_scale
from tracekit.report.charts.style import COLOURS, label_rows, with_style


def reserved_memory(peaks: Mapping[str, tuple[int, bool]], *, peak_allocated_bytes: int | None = None) -> go.Figure:
    """Return bars of the peak reserved memory by label: the bytes, and whether it is a prediction.

    A line marks `peak_allocated_bytes`: at least this much must be reserved.
    """
    figure = go.Figure()
    names = list(peaks)
    divisor, unit = byte_scale(max((size for size, _ in peaks.values()), default=0))
    figure.add_bar(
        orientation="h",
        y=list(range(len(names))),
        x=[size / divisor for size, _ in peaks.values()],
        marker={
            "color": COLOURS["compute"],
            "line": {"width": 0},
            "pattern": {"shape": ["/" if predicted else "" for _, predicted in peaks.values()], "fgopacity": 0.5},
        },
        text=[units.size(size) for size, _ in peaks.values()],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    if peak_allocated_bytes:
        figure.add_vline(
            x=peak_allocated_bytes / divisor,
            line={"color": COLOURS["phase"], "dash": "dot"},
            annotation={"text": f"peak allocated {units.size(peak_allocated_bytes)}", "yanchor": "bottom", "y": 1},
        )
    figure.update_layout(bargap=0.35)
    figure.update_xaxes(title="peak reserved", ticksuffix=f" {unit}", rangemode="tozero")
    label_rows(figure, names, max_characters=60)
    return with_style(figure, height_px=150 + 44 * len(names))
