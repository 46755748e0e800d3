"""Layouts over GPUs as a table and as JSON."""

import dataclasses
import json
from collections.abc import Sequence

from tracekit.model import units
from tracekit.plan.layouts import Job, LayoutPlan
from tracekit.report import text_layout

_COLUMNS = (
    *("pp", "v", "dp", "tp", "cp", "ep", "ZeRO", "micro-batch", "recompute", "memory", "bubble", "step", "MFU"),
    "limited by",
)
_OFTEN_ONE = ("cp", "ep")
_TEXTS = ("recompute", "limited by")


def as_json(value: tuple[Job, Sequence[LayoutPlan]]) -> str:
    """Return ``{"model", "gpus", "device", "sequence", "batch", "layouts"}``, the layouts with all their numbers."""
    job, plans = value
    document = {
        "model": job.model.name,
        "parameters": job.model.parameters,
        "gpus": job.gpus,
        "gpus_per_node": job.gpus_per_node,
        "device": job.hardware.name,
        "sequence": job.sequence,
        "batch": job.batch,
        "layouts": [dataclasses.asdict(plan) for plan in plans],
    }
    return json.dumps(document, indent=2) + "\n"


def as_text(value: tuple[Job, Sequence[LayoutPlan]], *, width: int, color: bool) -> str:
    """Return a line on the job and a table of the layouts, the fastest first."""
    job, plans = value
    model = job.model
    title = (
        f"{model.name}: {model.parameters / 1e9:,.1f} B parameters on {job.gpus:,} {job.hardware.name} GPUs, "
        f"{job.batch:,} sequences of {job.sequence:,} tokens a step"
    )
    rows = [_row(plan) for plan in plans]
    columns = [
        number for number, name in enumerate(_COLUMNS) if name not in _OFTEN_ONE or any(r[number] != "1" for r in rows)
    ]
    header = [_COLUMNS[number] for number in columns]
    table = text_layout.table(
        header,
        [[row[number] for number in columns] for row in rows],
        right=[name not in _TEXTS for name in header],
    )
    return text_layout.print_to_string([text_layout.line(title), text_layout.line(""), table], width=width, color=color)


def _row(plan: LayoutPlan) -> list[str]:
    sizes = (plan.pp, plan.virtual_stages, plan.dp, plan.tp, plan.cp, plan.ep, plan.zero)
    return [
        *map(str, sizes),
        f"{plan.micro_batch} × {plan.micro_batches}",
        plan.recompute,
        units.size(plan.memory_bytes),
        units.share(plan.bubble_ratio),
        units.duration(plan.step_seconds * 1e9),
        units.share(plan.mfu_ratio),
        plan.limited_by,
    ]
