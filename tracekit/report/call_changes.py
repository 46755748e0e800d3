"""What the calls of a step changed by, in words: the largest contributor in a clause, and all kinds as a table."""

import polars as pl

from tracekit.analysis.compute.excess_time import EXTRA, LARGER, LATE, LONGER, SLOWER
from tracekit.model import escaping, kernel_names
from tracekit.regression.call_changes import COLLECTIVES, REST, CallChanges
from tracekit.regression.comparison import Comparison
from tracekit.regression.thresholds import Verdict
from tracekit.report.document import Cells
from tracekit.report.render.json import to_json_value
from tracekit.report.step_verdict import signed_duration

_MAX_NAME = 48
_MAX_JSON_ROWS = 50
_NOUNS = {
    EXTRA: ("calls that {reference} does not have", "calls that only {reference} has"),
    LARGER: ("the same calls with larger shapes", "the same calls with smaller shapes"),
    SLOWER: ("the same calls, slower", "the same calls, faster"),
    LONGER: ("the same calls of unknown shapes, longer", "the same calls of unknown shapes, shorter"),
    LATE: ("the same calls, late", "the same calls, earlier"),
    COLLECTIVES: ("the same collectives and waits, longer", "the same collectives and waits, shorter"),
    REST: ("the rest", "the rest"),
}
"""Kinds that add time, and those that save it."""
_LABELS = {
    EXTRA: ("extra calls", "calls no longer made"),
    LARGER: ("larger shapes", "smaller shapes"),
    SLOWER: ("slower calls", "faster calls"),
    LONGER: ("longer calls", "shorter calls"),
    LATE: ("late calls", "earlier calls"),
    COLLECTIVES: ("collectives, waits", "collectives, waits"),
    REST: _NOUNS[REST],
}


def sentence(compared: Comparison) -> str:
    """The kind of calls that most of the change of the step is, with the largest contributor; '' where undecided.

    '' too where the verdict leaves out what other programs took, since the times of calls contain it.
    """
    step, changes = compared.step, compared.call_changes
    if (
        step is None
        or changes is None
        or compared.fastest_ns is not None
        or step.verdict not in (Verdict.WORSE, Verdict.BETTER)
    ):
        return ""
    sign = 1 if step.verdict is Verdict.WORSE else -1
    kind = max(changes.kinds, key=lambda name: sign * changes.kinds[name])
    name, change, count, place = _largest(changes, kind)
    if kind == REST or not name or sign * changes.kinds[kind] <= 0:
        return ""
    counted = f" ({count} a step)" if count else ""
    located = f", {place}" if place else ""
    return f"{_noun(compared, kind)} {signed_duration(changes.kinds[kind])}: {name} {change}{counted}{located}"


def cells(compared: Comparison) -> Cells | None:
    """A row per kind of call, the largest change first: they add up to the change of the step. None without traces."""
    changes = compared.call_changes
    if changes is None:
        return None
    rows = [
        (_LABELS[kind][0 if change_ns >= 0 else 1], signed_duration(change_ns), *_largest(changes, kind))
        for kind, change_ns in changes.kinds.items()
        if change_ns
    ]
    rows.append(("together", signed_duration(sum(changes.kinds.values())), "", "", "", ""))
    return Cells(("", "change", "largest", "of it", "calls", "where"), tuple(rows), (1, 3, 4), cuts_first=False)


def values(changes: CallChanges | None) -> dict[str, object] | None:
    """The change by kind in ns, which add up to that of the step, and the calls that changed most."""
    if changes is None:
        return None
    rows = [to_json_value(row) for row in changes.rows.head(_MAX_JSON_ROWS).iter_rows(named=True)]
    return {"ranks": list(changes.ranks), "kinds": dict(changes.kinds), "calls": rows}


def _noun(compared: Comparison, kind: str) -> str:
    assert compared.call_changes is not None
    noun = _NOUNS[kind][0 if compared.call_changes.kinds[kind] >= 0 else 1]
    return noun.format(reference=escaping.inert(compared.reference, _MAX_NAME))


def _largest(changes: CallChanges, kind: str) -> tuple[str, str, str, str]:
    """The contributor to most of a kind: its name, its change, its calls in a step, and module and line."""
    sign = 1 if changes.kinds[kind] >= 0 else -1
    rows = changes.rows.filter(pl.col("excess_ns") * sign > 0, kind=kind)
    if rows.is_empty():
        return "", "", "", ""
    only = (pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name) for name in ("module", "line"))
    sums = rows.group_by("operator", "kernel", "cause", "detail", maintain_order=True).agg(
        pl.col("excess_ns", "count").sum(), *only
    )
    row = sums.sort(pl.col("excess_ns") * sign, descending=True, maintain_order=True).row(0, named=True)
    count = f"{row['count']:,.3g}" if row["count"] else ""
    module = f"in {escaping.inert(row['module'], _MAX_NAME)}" if row["module"] else ""
    line = f"at {kernel_names.code_line(row['line'])}" if row["line"] else ""
    return _name(row), signed_duration(row["excess_ns"]), count, " ".join(filter(None, (module, line)))


def _name(row: dict[str, str | None]) -> str:
    """The operator and its kernel: "aten::mm (ampere_sgemm)"; of idle time its cause and what ends it."""
    kernel = kernel_names.short(row["kernel"] or "")
    operator = row["operator"] or kernel or "unknown work"
    name = escaping.inert(operator if kernel in ("", operator) else f"{operator} ({kernel})", _MAX_NAME)
    if row["cause"] is None:
        return name
    cause = ": ".join(part.replace("_", " ") for part in (row["cause"], row["detail"]) if part)
    return f"idle before {name} ({cause})"
