"""A comparison of two runs as a document, and its parts in words."""

import dataclasses
import math
import re
from collections.abc import Collection, Sequence

import polars as pl

from tracekit import conventions
from tracekit.model import escaping, units
from tracekit.regression.comparison import Comparison
from tracekit.regression.contributions import Contribution
from tracekit.regression.metrics import PER_SECOND, STEP_TIME, Scope, metric_of
from tracekit.regression.numbers import Agreement
from tracekit.regression.significance import MAX_MORE_SAMPLES
from tracekit.regression.thresholds import Change, Limit, Verdict
from tracekit.report import call_changes, query_rows, step_verdict
from tracekit.report.document import Cells, Document, Emphasis, Line, Section, faint, heading, items, line
from tracekit.report.render.json import to_json_value
from tracekit.report.step_verdict import EMPHASES

SCHEMA = "tracekit.comparison/1"
_MAX_NAME = 14
_MAX_SHOWN_CHANGE = 9.0
"""Changes by more than ten times are written in the metric's unit, and intervals that reach further are open."""
_MIN_SHOWN_CHANGE = -0.9
_MINUS = re.compile(r"(?<![\w-])-(?=\d)")


def document(compared: Comparison, *, with_metrics: bool = True) -> Document:
    """The verdict in one sentence, the contributions to the change of the step, and a row per metric.

    For programs all numbers in each metric's own unit.
    """
    changes = [dataclasses.asdict(change) | {"verdict": change.verdict.value} for change in compared.changes]
    values = {
        "schema": SCHEMA,
        "reference": compared.reference,
        "candidate": compared.candidate,
        **verdict_values(compared),
        "call_changes": call_changes.values(compared.call_changes),
        "changes": [to_json_value(change) for change in changes],
        "notes": list(compared.notes),
        "differences": list(compared.differences),
        "numbers": number_values(compared),
    }
    sections: list[Section] = [[*verdict_lines(compared), *items(compared.differences)]]
    if compared.contributions:
        sections.append([step_verdict.contribution_cells(compared)])
    of_calls = call_changes.cells(compared) if with_metrics else None
    if of_calls is not None:
        sections.append([heading("Calls", "  by what they changed the step"), of_calls])
    notes = [*remarks(compared)] if with_metrics else [*(n for n in compared.notes if n not in compared.differences)]
    if with_metrics:
        sections.append([heading("Metrics", "  medians over steps"), cells(compared)])
    else:
        verdicts = [change.verdict for change in compared.changes]
        counts = [f"{verdicts.count(v):,} {step_verdict.VERDICTS[v]}" for v in Verdict if v in verdicts]
        metric_counts = f"{units.count(len(verdicts), 'metric')} (-v shows them): {', '.join(counts)}"
        sections.append([faint(metric_counts)])
    return Document(tuple(sections), tuple(notes), values)


def verdict_lines(compared: Comparison) -> list[Line]:
    """The verdict on the step time in one sentence, what other programs can explain of it, and other changes."""
    headline = step_verdict.headline(compared)
    step = compared.step
    if step is None or not headline:
        first = [line((compared.candidate, Emphasis.STRONG), " compared with ", (compared.reference, Emphasis.STRONG))]
    else:
        first = [line((headline, EMPHASES[step_verdict.colour_verdict(compared, step.verdict)]))]
    advice = step_verdict.advice(compared)
    texts = (
        call_changes.sentence(compared),
        step_verdict.doubt(compared),
        f"to decide it, {advice}" if advice else "",
        other_changes(compared),
        "" if compared.numbers is None else number_sentence(compared.numbers),
    )
    return [*first, *(line(text, mark="·") for text in texts if text)]


def number_sentence(numbers: Agreement) -> str:
    """How far the numbers of both trainings agree, and where they first differ, in one sentence."""
    names = " and ".join(numbers.metrics)
    if numbers.is_other_training:
        return f"{names} differ from the first common step on: other weights, data or seeds"
    up_to = f"up to {numbers.rounding_ratio:.1g} apart" if numbers.rounding_ratio else "equal"
    steps = units.count(numbers.agreed_steps, "step")
    if numbers.first is None:
        return f"{names}: {up_to} in all {steps}"
    first = numbers.first
    where = "all ranks" if first.is_of_all_ranks and len(first.ranks) > 1 else units.numbers("rank", first.ranks)
    values = " → ".join("none" if value is None else f"{value:.6g}" for value in (first.reference, first.candidate))
    apart = f", {first.ratio:.1g} apart" if math.isfinite(first.ratio) else ""
    others = f" (and of {units.count(first.other_modules, 'other module')})" if first.other_modules else ""
    where += f"; rank {first.rank}: {values}{apart}"
    what = _number_name(first.metric) + others
    return f"{what} differs from step {first.step} on ({where}); in {steps} before, {names}: {up_to}"


_NUMBER_NAMES = {
    conventions.CHECKSUM_PREFIX: "what module {} computes",
    conventions.GRADIENT_CHECKSUM_PREFIX: "the gradient of module {} before it is reduced",
    conventions.REDUCED_GRADIENT_CHECKSUM_PREFIX: "the reduced gradient of module {}",
    conventions.WEIGHT_CHECKSUM_PREFIX: "the weight of module {} after the optimizer's step",
}


def _number_name(metric: str) -> str:
    """Name of a metric of training, such as "the reduced gradient of module layers.3.mlp"."""
    prefix = next((prefix for prefix in conventions.CHECKSUM_PREFIXES if metric.startswith(prefix)), None)
    return metric if prefix is None else _NUMBER_NAMES[prefix].format(escaping.inert(metric.removeprefix(prefix)))


def number_values(compared: Comparison) -> dict[str, object] | None:
    """The agreement of numbers for programs; ratios that are not finite are null. None where nothing was logged."""
    numbers = compared.numbers
    if numbers is None:
        return None
    values: dict[str, object] = to_json_value(dataclasses.asdict(numbers))
    return values | {"agree": numbers.first is None, "is_other_training": numbers.is_other_training}


def verdict_values(compared: Comparison) -> dict[str, object]:
    """The verdict for programs: sentence, verdict on the step time, contributions in ns, which add up to its change."""
    step = compared.step
    return {
        "headline": step_verdict.headline(compared) or None,
        "verdict": None if step is None else step.verdict.value,
        "doubt": step_verdict.doubt(compared) or None,
        "advice": step_verdict.advice(compared) or None,
        "change_ns": None if step is None else step_verdict.step_total(step),
        "contributions": [_contribution_values(part) for part in compared.contributions],
    }


def other_changes(compared: Comparison) -> str:
    """Metrics that are worse or better and no time of the step: "worse: peak allocated +12% (40 → 45 GiB)"."""
    sides = []
    for verdict in (Verdict.WORSE, Verdict.BETTER):
        changed = [
            f"{label(change.metric)} {_change(change)}"
            for change in compared.changes
            if change.verdict is verdict and not _is_of_step_time(change)
        ]
        sides += [f"{verdict.value}: {', '.join(changed)}"] if changed else []
    return "; ".join(sides)


def as_csv(compared: Comparison) -> str:
    """Return the changes as CSV with a header, one row per metric, numbers in each metric's own unit."""
    changes = [dataclasses.asdict(change) | {"verdict": change.verdict.value} for change in compared.changes]
    return query_rows.as_csv(pl.DataFrame(changes, infer_schema_length=None))


def cells(compared: Comparison, failing: Collection[str] = (), *, indent: int = 0) -> Cells:
    """One row per metric: before, now, change, interval and verdict; the metrics `failing` fail a check."""
    names = [escaping.inert(name, _MAX_NAME) for name in (compared.reference, compared.candidate)]
    rows, emphases = [], []
    for change in compared.changes:
        metric, fails = metric_of(change.metric), change.metric in failing
        before, now = metric.text(change.reference), metric.text(change.candidate)
        verdict = step_verdict.VERDICTS[change.verdict] + (", fails" if fails else "")
        rows.append((metric.label, before, now, _change(change), _interval(change), verdict))
        emphases.append(Emphasis.WORSE if fails else EMPHASES[step_verdict.colour_verdict(compared, change.verdict)])
    header = ("", *names, "change", f"{compared.confidence:.0%} interval", "verdict")
    return Cells(header, tuple(rows), (1, 2, 3, 4), tuple(emphases), cuts_first=False, indent=indent)


def limit_verdict(limit: Limit, change: Change) -> str:
    """Return whether a change exceeds a limit, in words."""
    summary = f"{limit.text}: {change_text(change)}"
    if limit.is_exceeded(change):
        return f"{summary}: limit exceeded"
    if limit.is_past(change):
        counts = f"{change.reference_samples} and {change.candidate_samples} samples are inconclusive"
        more = f"; about {_more(change)} more per side would be conclusive" if change.more_samples else ""
        return f"{summary}: limit exceeded, but it may be noise: {counts}{more}"
    return f"{summary}: within the limit"


def change_text(change: Change) -> str:
    """Return a change with its interval: "+8.1% (+4.0 to +11.9%)"."""
    return f"{_change(change)} ({_interval(change)})" if change.low is not None else _change(change)


def with_minus_signs(text: str) -> str:
    """Return a text with minus signs instead of the hyphens of a terminal, for pages.

    >>> with_minus_signs("gpt-2: -24% (-67 to +74%)")
    'gpt-2: −24% (−67 to +74%)'
    """
    return _MINUS.sub("−", text)


def label(metric: str) -> str:
    """Return the display name of a metric: "overlap_ratio" is "communication overlap"."""
    return metric_of(metric).label


def _contribution_values(part: Contribution) -> dict[str, object]:
    values = {name: value for name, value in vars(part).items() if name != "parts"}
    return values | {
        "verdict": part.verdict.value,
        "label": part.label,
        "change_ns": part.change_ns,
        "is_certain": part.is_certain,
        "parts": [_contribution_values(piece) for piece in part.parts],
    }


def _is_of_step_time(change: Change) -> bool:
    """Return whether a metric is the step time, a part or a share of it, or its rate: the contributions show these."""
    metric = metric_of(change.metric)
    is_rate = metric.unit is PER_SECOND
    is_part = metric.part_of == STEP_TIME or metric.is_share
    return metric.key == STEP_TIME or (metric.scope is Scope.STEP and (is_part or is_rate))


def _change(change: Change) -> str:
    if _is_absolute(change):
        sign = "+" if change.difference >= 0 else "-"
        return f"{sign}{metric_of(change.metric).text(abs(change.difference))}" if change.difference else "none"
    return f"{_percent(change.change or 0.0)}{_unit(change)}"


def _interval(change: Change) -> str:
    """Return the interval of a change; only the bound that says something, where the other one is far away.

    It excludes the measured change where it is of the fastest calls, as other programs have disturbed the others.
    """
    if change.low is None or change.high is None:
        return "—"
    is_measured = change.change is None or change.low <= change.change <= change.high
    return _bounds(change, change.low, change.high) + ("" if is_measured else " without other programs")


def _bounds(change: Change, low: float, high: float) -> str:
    is_open = high > _MAX_SHOWN_CHANGE and not metric_of(change.metric).is_share
    if not is_open and not _is_absolute(change):
        return f"{_percent(low)} to {_percent(high)}{_unit(change)}"
    if low <= _MIN_SHOWN_CHANGE:
        return "—"
    if _is_absolute(change) and low > 0:
        return f"at least +{metric_of(change.metric).text(low * change.reference)}"
    return f"at least {_percent(low)}%"


def _is_absolute(change: Change) -> bool:
    """Return whether a change is written in the metric's unit: relative to a reference near zero it says nothing."""
    if metric_of(change.metric).is_share:
        return False
    return change.change is None or change.change > _MAX_SHOWN_CHANGE


def _percent(ratio: float) -> str:
    # Adding 0 makes a change that rounds to nothing "+0.0", from whichever side it comes.
    return f"{round(100 * ratio, 1) + 0.0:+.1f}" if abs(ratio) < 0.1 else f"{100 * ratio:+.0f}"


def _unit(change: Change) -> str:
    return " pt" if metric_of(change.metric).is_share else "%"


def remarks(compared: Comparison) -> Sequence[str]:
    """Limits of the comparison: inconclusive metrics, then notes other than `Comparison.differences`."""
    inconclusive = [change for change in compared.changes if change.verdict is Verdict.INCONCLUSIVE]
    needed = {
        "samples": [f"{label(c.metric)} {_more(c)}" for c in inconclusive if c.more_samples],
        "recordings": [f"{label(c.metric)} {c.more_recordings}" for c in inconclusive if c.more_recordings],
    }
    return [
        *(
            f"additional {what} per side for a conclusive result, about: {', '.join(n)}"
            for what, n in needed.items()
            if n
        ),
        *(note for note in compared.notes if note not in compared.differences),
    ]


def _more(change: Change) -> str:
    return f"{change.more_samples:,}" + ("+" if change.more_samples >= MAX_MORE_SAMPLES else "")
