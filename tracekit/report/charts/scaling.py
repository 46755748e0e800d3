"""Runs of one job of different size: GPU time per token by part, and throughput against perfect scaling."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tracekit.analysis.parallelism import time_by_part
from tracekit.model import escaping, units
from tracekit.regression.scaling import ScalingComparison, Work
from tracekit.report import scaling as report
from tracekit.report.charts import style

PART_COLOURS = {
    time_by_part.COMPUTE: style.COLOURS["compute"],
    time_by_part.COMMUNICATION: style.COLOURS["communication"],
    time_by_part.WAIT: style.COLOURS["waiting"],
    time_by_part.BUBBLE: style.COLOURS["evidence"],
    time_by_part.LAUNCH: style.CAUSES["host"][1],
    time_by_part.COMPILE: style.CAUSES["contention"][1],
    time_by_part.GARBAGE_COLLECTION: style.CAUSES["device_stall"][1],
    time_by_part.DATA: style.CAUSES["preparation"][1],
    time_by_part.SAVE: style.COLOURS["phase"],
    time_by_part.COPY: style.COLOURS["memcpy"],
    time_by_part.IDLE: style.COLOURS["idle"],
}
_MAX_NAME = 24
_MIN_RATIO = 0.001
"""Parts that take less of every step cannot be seen."""
_IDEAL = "rgba(128, 138, 150, 0.9)"


def scaling(compared: ScalingComparison) -> go.Figure:
    """Return GPU time per token as stacked bars, one per run, beside throughput over the number of GPUs."""
    figure = make_subplots(rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.12)
    noun = report.device_noun(compared)
    labels = [
        f"{escaping.escape(escaping.inert(run.name, _MAX_NAME))}<br>{units.count(run.gpus, noun)}"
        for run in compared.runs
    ]
    unit, factor = ("token", 1.0) if compared.work is Work.TOKENS else ("GFLOP", 1e9)
    for part, colour in PART_COLOURS.items():
        costs = [factor * run.gpus * run.parts_ns[part] / run.step_work for run in compared.runs]
        if any(run.parts_ns[part] >= _MIN_RATIO * run.step_ns for run in compared.runs):
            label = report.PART_LABELS[part]
            figure.add_bar(
                x=labels,
                y=[cost / 1e3 for cost in costs],
                name=label,
                marker={"color": colour, "line": {"width": 0}},
                customdata=[
                    [units.duration(cost), units.share(run.parts_ns[part] / run.step_ns)]
                    for cost, run in zip(costs, compared.runs, strict=True)
                ],
                hovertemplate=f"{label}: %{{customdata[0]}} per {unit}, %{{customdata[1]}} of the step<extra></extra>",
                row=1,
                col=1,
            )
    _add_throughput(figure, compared)
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(title=f"{noun} time per {unit}", ticksuffix=" µs", rangemode="tozero", row=1, col=1)
    return style.with_style(figure, height_px=380)


def _add_throughput(figure: go.Figure, compared: ScalingComparison) -> None:
    """Draw throughput over GPUs, and that of perfect scaling."""
    what, factor = ("tokens/s", 1.0) if compared.work is Work.TOKENS else ("TFLOP/s", 1e-12)
    efficiencies = [1.0, *(step.efficiency for step in compared.steps)]
    rows = sorted(zip(compared.runs, efficiencies, strict=True), key=lambda row: row[0].gpus)
    gpus = [run.gpus for run, _ in rows]
    reference = compared.reference
    per_gpu = factor * reference.work_per_second / reference.gpus
    ends = [min(gpus), max(gpus)]
    figure.add_scatter(
        x=ends,
        y=[per_gpu * count for count in ends],
        name="perfect scaling",
        mode="lines",
        line={"color": _IDEAL, "dash": "dot"},
        hoverinfo="skip",
        row=1,
        col=2,
    )
    figure.add_scatter(
        x=gpus,
        y=[factor * run.work_per_second for run, _ in rows],
        name="throughput",
        mode="lines+markers+text",
        text=[units.share(efficiency) for _, efficiency in rows],
        textposition="bottom right",  # below both lines, which rise
        line={"color": style.COLOURS["compute"]},
        customdata=[[escaping.escape(run.name)] for run, _ in rows],
        hovertemplate=f"%{{customdata[0]}}: %{{y:,.4s}} {what}, efficiency %{{text}}<extra></extra>",
        row=1,
        col=2,
    )
    span = max(gpus) - min(gpus) or 1
    shown = [min(gpus) - 0.08 * span, max(gpus) + 0.25 * span]  # with room for the last label
    noun = report.device_noun(compared)
    figure.update_xaxes(title=f"{noun}s", tickvals=sorted(set(gpus)), range=shown, row=1, col=2)
    figure.update_yaxes(title=what, rangemode="tozero", tickformat="~s", row=1, col=2)
