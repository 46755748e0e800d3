"""Comparison -> text, JSON or Markdown."""

import dataclasses
import json
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from tracekit.model import escaping
from tracekit.regression.comparison import Comparison
from tracekit.regression.metrics import metric_of
from tracekit.regression.significance import MAX_MORE_SAMPLES, Change, Verdict
from tracekit.regression.thresholds import Limit
from tracekit.report import markdown_escaping, text_layout
from tracekit.report.json import to_json_value

SCHEMA = "tracekit.comparison/1"
STYLES = {Verdict.BETTER: "bold green", Verdict.WORSE: "bold red", Verdict.SAME: "dim", Verdict.CANNOT_TELL: "yellow"}
_MAX_NAME = 14
_NARROW = 100


def as_json(found: Comparison) -> str:
    """Return the comparison as strict JSON, its numbers in the metrics' own units."""
    changes = [dataclasses.asdict(change) | {"verdict": change.verdict.value} for change in found.changes]
    document = {
        "schema": SCHEMA,
        "reference": found.reference,
        "candidate": found.candidate,
        "changes": [to_json_value(change) for change in changes],
        "notes": list(found.notes),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_text(compared: Comparison, *, width: int, color: bool = False) -> str:
    """Return the comparison as a table, one row per metric, then the remarks on it."""
    styles = [STYLES[change.verdict] for change in compared.changes]
    names = (compared.candidate, text_layout.BOLD), " compared with ", (compared.reference, text_layout.BOLD)
    parts: list[RenderableType] = [
        text_layout.line(*names, ": medians over steps"),
        "",
        as_rich_table(*table_cells(compared), styles, width),
    ]
    notes = remarks(compared)
    parts += ["", *(text_layout.hanging("·", text_layout.line(note)) for note in notes)] if notes else []
    return text_layout.print_to_string(parts, width=width, color=color)


def as_rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], width: int) -> Table:
    """Return the cells of a comparison as a table for a terminal; `styles` are those of the verdicts."""
    gap = 1 if width < _NARROW else 2
    table = text_layout.table(header, rows, right=[False, True, True, True, True, False], gap=gap, last_styles=styles)
    table.columns[0].no_wrap = True
    return table


def as_markdown(found: Comparison) -> str:
    """Return the comparison as a Markdown table, as pull requests show it."""
    header, rows = table_cells(found)
    told = [[markdown_escaping.escaped(cell.strip()) for cell in row] for row in (header, *rows)]
    lines = [markdown_escaping.table(told[0], told[1:], right=(1, 2, 3, 4)), ""]
    return "\n".join([*lines, *(f"- {markdown_escaping.escaped(remark)}" for remark in remarks(found))]).rstrip() + "\n"


def limit_verdict(bar: Limit, change: Change) -> str:
    """Return in words what a change is to a bar."""
    told = f"{bar.text}: {change_text(change)}"
    if bar.is_exceeded(change):
        return f"{told}: past the bar"
    if bar.is_past(change):
        counts = f"{change.reference_samples} and {change.candidate_samples} samples cannot tell"
        more = f"; about {_more(change)} more a side would" if change.more_samples else ""
        return f"{told}: past the bar, but it may be noise: {counts}{more}"
    return f"{told}: within the bar"


def change_text(change: Change) -> str:
    """Return a change with its interval: "+8.1% (+4.0 to +11.9%)"."""
    return f"{_change(change)} ({_interval(change)})" if change.low is not None else _change(change)


def label(metric: str) -> str:
    """Return what people call a metric: "overlap_ratio" is "communication overlap"."""
    return metric_of(metric).label


def table_cells(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a comparison's table, one row per metric."""
    names = [escaping.inert(name, _MAX_NAME) for name in (found.reference, found.candidate)]
    rows = [
        [
            label(change.metric),
            metric_of(change.metric).text(change.reference),
            metric_of(change.metric).text(change.candidate),
            _change(change),
            _interval(change),
            change.verdict.value,
        ]
        for change in found.changes
    ]
    return ["", *names, "change", f"{found.confidence:.0%} interval", "verdict"], rows


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


def remarks(found: Comparison) -> Sequence[str]:
    """Return what limits the comparison: metrics that cannot tell, then what differs between the runs."""
    unsure = [change for change in found.changes if change.verdict is Verdict.CANNOT_TELL]
    samples = ", ".join(f"{label(change.metric)} {_more(change)}" for change in unsure if change.more_samples)
    recordings = ", ".join(
        f"{label(change.metric)} {change.more_recordings}" for change in unsure if change.more_recordings
    )
    return [
        *([f"about how many more samples a side would tell: {samples}"] if samples else []),
        *([f"about how many more recordings a side would tell: {recordings}"] if recordings else []),
        *found.notes,
    ]


def _more(change: Change) -> str:
    return f"{change.more_samples:,}" + ("+" if change.more_samples >= MAX_MORE_SAMPLES else "")
