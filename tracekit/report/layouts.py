"""Layouts over GPUs as a document."""

import dataclasses
from collections.abc import Sequence

from tracekit.model import units
from tracekit.plan.layouts import Job, LayoutPlan
from tracekit.report.document import Cells, Document, line

_COLUMNS = (
    *("pp", "v", "dp", "tp", "cp", "ep", "ZeRO", "micro-batch", "recompute", "memory", "bubble", "step", "MFU"),
    "limited by",
)
_OFTEN_ONE = ("cp", "ep")
_TEXTS = ("recompute", "limited by")


def document(job: Job, plans: Sequence[LayoutPlan]) -> Document:
    """A line on the job and a table of the layouts, the fastest first; for programs with all their numbers."""
    model = job.model
    title = (
        f"{model.name}: {model.parameters / 1e9:,.1f} B parameters on {job.gpus:,} {job.hardware.name} GPUs, "
        f"{job.batch:,} sequences of {job.sequence:,} tokens a step"
    )
    values = {
        "model": model.name,
        "parameters": model.parameters,
        "gpus": job.gpus,
        "gpus_per_node": job.gpus_per_node,
        "device": job.hardware.name,
        "sequence": job.sequence,
        "batch": job.batch,
        "layouts": [dataclasses.asdict(plan) for plan in plans],
    }
    return Document(([line(title)], [_table(plans)]), values=values)


def _table(plans: Sequence[LayoutPlan]) -> Cells:
    rows = [_row(plan) for plan in plans]
    columns = [
        number for number, name in enumerate(_COLUMNS) if name not in _OFTEN_ONE or any(r[number] != "1" for r in rows)
    ]
    header = tuple(_COLUMNS[number] for number in columns)
    numbers = tuple(number for number, name in enumerate(header) if name not in _TEXTS)
    return Cells(header, tuple(tuple(row[number] for number in columns) for row in rows), numbers)


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
