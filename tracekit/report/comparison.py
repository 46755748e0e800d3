"""A comparison of two runs as a document, and its parts in words."""

import dataclasses
import re
from collections.abc import Collection, Sequence

import polars as pl

from tracekit.model import escaping
from tracekit.regression.comparison import Comparison
from tracekit.regression.metrics import all_metrics, metric_of
from tracekit.regression.significance import MAX_MORE_SAMPLES
from tracekit.regression.thresholds import Change, Limit, Verdict
from tracekit.report import query_rows
from tracekit.report.document import Cells, Document, Emphasis, items, line
from tracekit.report.render import markdown
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.comparison/1"
EMPHASES = {
    Verdict.BETTER: Emphasis.BETTER,
    Verdict.WORSE: Emphasis.WORSE,
    Verdict.SAME: Emphasis.FAINT,
    Verdict.INCONCLUSIVE: Emphasis.DOUBTFUL,
}
_MAX_NAME = 14
_MINUS = re.compile(r"(?<![\w-])-(?=\d)")


def document(compared: Comparison) -> Document:
    """A row per metric, then the remarks; for programs all numbers in each metric's own unit."""
    changes = [dataclasses.asdict(change) | {"verdict": change.verdict.value} for change in compared.changes]
    values = {
        "schema": SCHEMA,
        "reference": compared.reference,
        "candidate": compared.candidate,
        "changes": [to_json_value(change) for change in changes],
        "notes": list(compared.notes),
        "differences": list(compared.differences),
    }
    names = (compared.candidate, Emphasis.STRONG), " compared with ", (compared.reference, Emphasis.STRONG)
    first = [line(*names, ": medians over steps"), *items(compared.differences)]
    return Document((first, [cells(compared)]), tuple(remarks(compared)), values, is_ascii=False)


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
        verdict = change.verdict.value + (", fails" if fails else "")
        rows.append((metric.label, before, now, _change(change), _interval(change), verdict))
        emphases.append(Emphasis.WORSE if fails else EMPHASES[change.verdict])
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


def metrics_page() -> str:
    """Return the page docs/metrics.md: every registered metric, and how a change of it is judged."""
    header = ["metric", "label", "unit", "one sample per", "over ranks", "better", "fails a check", "meaning"]
    rows = [
        [
            f"`{metric.key}`",
            metric.label,
            metric.unit.name,
            metric.scope.value,
            metric.over_ranks.value if metric.has_rank_values else "",
            "lower" if metric.lower_is_better else "higher",
            "yes" if metric.fails_check else "",
            metric.meaning,
        ]
        for metric in all_metrics().values()
    ]
    return f"{_METRICS_PAGE}\n{markdown.table(header, rows)}\n"


_METRICS_PAGE = """\
# Metrics

What `tracekit compare`, `check --baseline`, budgets, history and the dashboard compare runs by. Settings and options
may leave out the unit of a name: `step_time`. Another distribution adds a metric by the entry point group
`tracekit.metrics`: an object `tracekit.regression.metrics.Metric` with a function that measures it. This page is made
from the registry `METRICS`.
"""


def _change(change: Change) -> str:
    if change.change is None:
        return "from 0" if change.difference else "none"
    return f"{_percent(change.change)}{_unit(change)}"


def _interval(change: Change) -> str:
    if change.low is None or change.high is None:
        return "—"
    return f"{_percent(change.low)} to {_percent(change.high)}{_unit(change)}"


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
