"""The change of a step by operators, kernels or modules -> text, CSV, JSON or Markdown."""

import json

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping, units
from tracekit.regression.step_change import SAME, StepChange
from tracekit.regression.thresholds import Change, Verdict
from tracekit.report import comparison, query_rows
from tracekit.report.render import layout, markdown
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.step_change/1"
DEFAULT_TOP = 20
_HEADER = ("part", "change", "of change", "before", "after", "calls", "status", "verdict")
TEXTS = (0, 1, 7, 8)
"""Columns of text; the others are numbers."""
_DROPPED = (7, 4, 1)
"""Columns that are left out on a narrow terminal, in this order."""
_MIN_NAME = 28
_PARTS = {"exposed_communication": "communication", "exposed_copy": "copy"}
_MAX_NAME = 60


def as_json(changed: StepChange) -> str:
    """Return the change as one JSON object, its rows in ns: see docs/compare.md."""
    step, compared = changed.step, changed.compared
    document = {
        "schema": SCHEMA,
        "reference": compared.reference,
        "candidate": compared.candidate,
        "by": list(changed.by),
        "reference_step_ns": step.reference,
        "candidate_step_ns": step.candidate,
        "change_ns": step.difference,
        "verdict": step.verdict.value,
        "rows": [to_json_value(row) for row in changed.rows.iter_rows(named=True)],
        "notes": list(compared.notes),
        "differences": list(compared.differences),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(changed: StepChange) -> str:
    """Return the rows as CSV with a header, times in ns."""
    return query_rows.as_csv(changed.rows)


def as_text(changed: StepChange, *, top: int = DEFAULT_TOP, width: int, color: bool = False) -> str:
    """Return the change in a sentence, the `top` rows with the largest changes as a table, and remarks."""
    header, cells = table_cells(changed, top)
    columns = _fitting_columns(header, cells, width)
    verdicts = [Verdict(verdict) for verdict in changed.rows.head(top)["verdict"]]
    styles = [comparison.STYLES[verdict] for verdict in verdicts]
    parts: list[RenderableType] = [layout.line(headline(changed)), layout.dim(count_statuses(changed))]
    parts += [*layout.bullets(changed.compared.differences), ""]
    rows = [[row[column] for column in columns] for row in (header, *cells)]
    right = [column not in TEXTS for column in columns]
    parts += [layout.table(rows[0], rows[1:], right=right, gap=layout.gap(width), last_styles=styles)]
    parts += [layout.dim(line) for line in _rest(changed, top)]
    notes = remarks(changed)
    parts += ["", *layout.bullets(notes)] if notes else []
    return layout.print_to_string(parts, width=width, color=color)


def as_markdown(changed: StepChange, *, top: int = DEFAULT_TOP) -> str:
    """Return the sentence, and the `top` rows with the largest changes as a Markdown table."""
    header, cells = table_cells(changed, top)
    table = [[markdown.escape(cell) for cell in row] for row in (header, *cells)]
    lines = [markdown.escape(headline(changed)), ""]
    lines += [markdown.table(table[0], table[1:], right=(2, 3, 4, 5, 6)), ""]
    notes = (*changed.compared.differences, *_rest(changed, top), *remarks(changed))
    return "\n".join([*lines, *(f"- {markdown.escape(note)}" for note in notes)]).rstrip() + "\n"


def headline(changed: StepChange) -> str:
    """Return one sentence: how long the median step takes, and by how much that differs."""
    step, compared = changed.step, changed.compared
    a, b = (escaping.inert(name, _MAX_NAME) for name in (compared.reference, compared.candidate))
    takes = f"the median step of {b} takes {units.duration(step.candidate)}"
    if round(step.difference) == 0:
        return f"{takes}, as long as that of {a}"
    more = "more" if step.difference > 0 else "less"
    return (
        f"{takes}, {units.duration(abs(step.difference))} {more} than that of {a} "
        f"({comparison.change_text(step)}: {step.verdict.value})"
    )


def count_statuses(changed: StepChange) -> str:
    """Number of rows with each status: "94 operators and kinds of idle time: 2 new, 1 gone, 90 same"."""
    counts = [f"{count:,} {status}" for status, count in changed.status_counts.items() if count]
    return f"{changed.rows.height:,} rows by {', '.join(changed.by)}: {', '.join(counts)}"


def table_cells(changed: StepChange, top: int) -> tuple[list[str], list[list[str]]]:
    """Return the header and the first `top` rows as texts."""
    more = [name for name in changed.by[1:] if name in changed.rows.columns]
    rows = []
    for row in changed.rows.head(top).iter_rows(named=True):
        name = " · ".join(str(row[column]) for column in ("name", *more) if row[column] is not None)
        before, after = (units.duration(row[f"{side}_ns"]) for side in ("before", "after"))
        share = "—" if row["contribution_ratio"] is None else f"{100 * row['contribution_ratio']:.1f}%"
        part, status = _PARTS.get(row["part"], row["part"]), row["status"]
        change = _signed_duration(row["change_ns"])
        rows.append([name, part, change, share, before, after, _calls(row), status, row["verdict"]])
    return [" · ".join(changed.by), *_HEADER], rows


def remarks(changed: StepChange) -> list[str]:
    """Limits of the comparison, other than the differences of the runs."""
    few = changed.rows["low_ns"].null_count() == changed.rows.height and changed.rows.height > 0
    few_steps = ["with fewer than three steps on a side, the changes have no intervals"] if few else []
    other_notes = [note for note in changed.compared.notes if note not in changed.compared.differences]
    return [*few_steps, *_more_samples(changed.step), *other_notes]


def _more_samples(step: Change) -> list[str]:
    return [f"about {step.more_samples:,} more steps per side would decide the step time"] if step.more_samples else []


def _fitting_columns(header: list[str], cells: list[list[str]], width: int) -> list[int]:
    """Return the columns that fit beside names of some length."""
    widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
    columns = list(range(len(header)))
    for column in _DROPPED:
        needed = min(widths[0], _MIN_NAME) + sum(widths[number] + layout.gap(width) for number in columns[1:])
        if needed > width:
            columns.remove(column)
    return columns


def _rest(changed: StepChange, top: int) -> list[str]:
    rest = changed.rows.slice(top)
    if not rest.height:
        return []
    total = _signed_duration(float(rest["change_ns"].sum()))
    unchanged = rest.filter(pl.col("status") == SAME).height
    return [f"and {rest.height:,} more ({unchanged:,} of them the same), {total} together: --top {changed.rows.height}"]


def _signed_duration(change_ns: float) -> str:
    rounded = round(change_ns)
    return f"{'+' if rounded >= 0 else '-'}{units.duration(abs(rounded))}"


def _calls(row: dict[str, float]) -> str:
    before, after = round(row["before_count"], 1), round(row["after_count"], 1)
    if not before and not after:
        return "—"
    return f"{before:,g}" if before == after else f"{before:,g} → {after:,g}"
