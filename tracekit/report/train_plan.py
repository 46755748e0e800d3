"""A planned training as a document: days and money, the numbers, the terms of a step, and GPUs for equal throughput."""

import dataclasses

from tracekit.model import units
from tracekit.plan.train import EqualThroughput, Step, TrainingPlan, Work
from tracekit.report.document import Cells, Definitions, Document, Line, Section, heading, line

_TERM_HEADER = ("part of a step", "time", "share", "formula", "source")


def document(
    subject: str, work: Work, step: Step, plan: TrainingPlan, *, equal: EqualThroughput | None = None,
    layout: str = "",
) -> Document:  # fmt: skip
    """Document of a plan; `subject` is what is trained on what, `layout` how it is laid out ("": not stated)."""
    sections: tuple[Section, ...] = (
        [line(headline(subject, plan, equal))],
        [Definitions(_definitions(work, plan, layout))],
        [heading("A step"), _terms(step)],
    )
    values = {
        **dataclasses.asdict(plan),
        **dataclasses.asdict(work),
        "terms": [dataclasses.asdict(term) for term in step.terms],
        "equal_throughput": None if equal is None else dataclasses.asdict(equal),
    }
    return Document(sections, values=values)


def headline(subject: str, plan: TrainingPlan, equal: EqualThroughput | None = None) -> str:
    """How long and how much, in one or two sentences."""
    text = f"{subject}: {_days(plan.duration_seconds)} at {units.share(plan.mfu_ratio)} MFU ({plan.mfu_source})"
    text += f", {plan.gpu_hours:,.4g} GPU-hours"
    text += "" if plan.cost is None else f" at a cost of {plan.cost:,.0f}"
    text += "." if plan.energy_kwh is None else f", at most {_energy(plan.energy_kwh)}."
    if equal is not None:
        text += f" At {equal.speedup_ratio:.3g} times the throughput, {equal.gpus:,.0f} GPUs do the same: "
        text += f"{equal.saved_gpus:,.0f} fewer"
        text += "." if equal.saved_cost_per_month is None else f", {equal.saved_cost_per_month:,.0f} a month."
    return text


def _definitions(work: Work, plan: TrainingPlan, layout: str) -> tuple[tuple[Line, ...], ...]:
    rows = [
        ("step", f"{units.long_duration(plan.step_seconds)}, {work.step_tokens:,.0f} tokens, {plan.steps:,.0f} steps"),
        ("throughput", f"{plan.tokens_per_second:,.0f} tokens/s"),
        ("operations", f"{work.flops_per_token:.4g} per token, {plan.flops:.4g} in all"),
        ("GPUs", f"{work.gpus:,} of {work.peak_flops_per_s / 1e12:,.4g} TFLOP/s"),
        *([("layout", layout)] if layout else []),
        ("goodput", units.share(plan.goodput_ratio)),
        *([] if plan.cost_per_month is None else [("money a month", f"{plan.cost_per_month:,.0f}")]),
    ]
    return tuple((line(name), line(value)) for name, value in rows)


def _terms(step: Step) -> Cells:
    rows = tuple(
        (
            term.name,
            units.duration(term.seconds * 1e9),
            units.share(term.seconds / step.seconds),
            term.formula,
            term.source,
        )
        for term in step.terms
    )
    return Cells(_TERM_HEADER, tuple(rows), numbers=(1, 2), drop_order=(4, 3))


def _days(seconds: float) -> str:
    days = seconds / 86_400
    return f"{days / 365.25:,.3g} years" if days > 1000 else f"{days:,.3g} days"


def _energy(kwh: float) -> str:
    return f"{kwh / 1e6:,.3g} GWh" if kwh >= 1e6 else f"{kwh / 1e3:,.3g} MWh"
