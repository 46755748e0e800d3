"""The change of a step by operators, kernels or modules as a document."""

import polars as pl

from tracekit.model import units
from tracekit.regression.step_change import SAME, StepChange
from tracekit.regression.thresholds import Verdict
from tracekit.report import step_verdict
from tracekit.report.document import Cells, Document, faint, items, line
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.step_change/1"
DEFAULT_TOP = 20
_HEADER = ("part", "change", "of change", "before", "after", "calls", "status", "verdict")
_NUMBERS = (2, 3, 4, 5, 6)
_DROP_ORDER = (7, 4, 1)
_MIN_NAME = 28
_PARTS = {"exposed_communication": "communication", "exposed_copy": "copy"}
_MAX_NAME = 60


def document(changed: StepChange, top: int = DEFAULT_TOP) -> Document:
    """The change in a sentence, the `top` rows with the largest changes, and remarks; for programs all rows, in ns."""
    step, compared = changed.step, changed.compared
    values = {
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
    first = [
        line(step_verdict.headline(changed.compared)),
        faint(count_statuses(changed)),
        *items(compared.differences),
    ]
    rest = [faint(text) for text in _rest(changed, top)]
    return Document((first, [cells(changed, top), *rest]), tuple(remarks(changed)), values)


def count_statuses(changed: StepChange) -> str:
    """Number of rows with each status: "94 operators and kinds of idle time: 2 new, 1 gone, 90 same"."""
    counts = [f"{count:,} {status}" for status, count in changed.status_counts.items() if count]
    return f"{changed.rows.height:,} rows by {', '.join(changed.by)}: {', '.join(counts)}"


def cells(changed: StepChange, top: int) -> Cells:
    """The first `top` rows as texts."""
    more = [name for name in changed.by[1:] if name in changed.rows.columns]
    rows = []
    for row in changed.rows.head(top).iter_rows(named=True):
        name = " · ".join(str(row[column]) for column in ("name", *more) if row[column] is not None)
        before, after = (units.duration(row[f"{side}_ns"]) for side in ("before", "after"))
        share = "—" if row["contribution_ratio"] is None else f"{100 * row['contribution_ratio']:.1f}%"
        part, status = _PARTS.get(row["part"], row["part"]), row["status"]
        change = step_verdict.signed_duration(row["change_ns"])
        rows.append(
            (name, part, change, share, before, after, _calls(row), status, step_verdict.VERDICTS[row["verdict"]])
        )
    verdicts = [Verdict(text) for text in changed.rows["verdict"].head(top)]
    emphases = tuple(step_verdict.EMPHASES[step_verdict.colour_verdict(changed.compared, v)] for v in verdicts)
    header = (" · ".join(changed.by), *_HEADER)
    return Cells(header, tuple(rows), _NUMBERS, emphases, _DROP_ORDER, least_text=_MIN_NAME)


def remarks(changed: StepChange) -> list[str]:
    """Limits of the comparison, other than the differences of the runs."""
    few = changed.rows["low_ns"].null_count() == changed.rows.height and changed.rows.height > 0
    few_steps = ["with fewer than three steps on a side, the changes have no intervals"] if few else []
    other_notes = [note for note in changed.compared.notes if note not in changed.compared.differences]
    more = changed.step.more_samples
    needed = [f"about {more:,} more steps per side would decide the step time"] if more else []
    return [*few_steps, *needed, *other_notes]


def _rest(changed: StepChange, top: int) -> list[str]:
    rest = changed.rows.slice(top)
    if not rest.height:
        return []
    total = step_verdict.signed_duration(float(rest["change_ns"].sum()))
    unchanged = rest.filter(pl.col("status") == SAME).height
    return [f"and {rest.height:,} more ({unchanged:,} of them the same), {total} together: --top {changed.rows.height}"]


def _calls(row: dict[str, float]) -> str:
    before, after = round(row["before_count"], 1), round(row["after_count"], 1)
    if not before and not after:
        return "—"
    return f"{before:,g}" if before == after else f"{before:,g} → {after:,g}"
