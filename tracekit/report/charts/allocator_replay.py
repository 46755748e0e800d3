"""A replay of the allocator: what was recorded beside what its model predicts."""

from collections.abc import Mapping

import plotly.graph_objects as go

from tracekit.model import units
from tracekit.report.charts.memory import byte_scale
from tracekit.report.charts.style import COLOURS, label_rows, with_style


def reserved_memory(peaks: Mapping[str, tuple[int, bool]], *, peak_allocated_bytes: int | None = None) -> go.Figure:
    """Return bars of the most memory that was reserved, by label: the bytes, and whether it is a prediction.

    A line marks `held_bytes`, what the program held at most: less cannot be reserved.
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
            annotation={"text": f"held at most {units.size(peak_allocated_bytes)}", "yanchor": "bottom", "y": 1},
        )
    figure.update_layout(bargap=0.35)
    figure.update_xaxes(title="reserved at most", ticksuffix=f" {unit}", rangemode="tozero")
    label_rows(figure, names, max_characters=60)
    return with_style(figure, height_px=150 + 44 * len(names))
