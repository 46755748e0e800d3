"""Sentences that all report formats share: the verdict, the cost of a finding, where it applies."""

import functools
from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.model import escaping, kernel_names, units
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.regression.baseline import KnownFinding
from tracekit.rules import cost_attribution, unreported_causes
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import (
    Finding,
    Report,
    Severity,
    doubtful_data_issue,
    first_to_read,
    has_found_iterations,
)
from tracekit.sync import alignment

_MAX_WORD = 60
_STEP_MARK = "ProfilerStep#"
LATE_RANK_COLUMNS = ("late_rank", "peer_rank")
"""The columns of evidence that name the rank that another one waits for."""
_TIMES = ("start_ns", "end_ns", "at_ns", "ready_ns", "launched_ns", "host_start_ns", "host_end_ns")
"""The columns of evidence that are times of a trace; all others in ns are durations."""


def headline(findings: Sequence[Finding], cannot_judge: str | None = None) -> str:
    """Return the sentence to read first: why the run cannot be judged, else the costliest finding of the severest."""
    if cannot_judge is not None:
        return f"Cannot judge this run: {cannot_judge}"
    first = first_to_read(findings)
    return "No problems found" if first is None else first.sentence


def no_problems(report: Report) -> str:
    """Return the verdict on a run without findings on time; if only some rules were selected, with their codes.

    Where the run can be replayed, that also says that no cause alone is worth a finding, however idle the device is.
    """
    if not report.rules or len(report.rules) == len(all_rules()):
        # An ignored finding is a cause, too.
        is_replayed = not report.ignored and cost_attribution.can_be_replayed(report.run)
        part = f": no single cause takes {unreported_causes.MIN_SAVED_RATIO:.0%} of the time or more"
        return headline(()) + (part if is_replayed else "")
    return f"{headline(())} by {units.count(len(report.rules), 'selected rule')}: {', '.join(report.rules)}"


def cannot_judge(report: Report) -> str | None:
    """Return why it is unknown whether a run loses time; None if it is judged.

    Either no rule on time could judge it, or none found a problem in data most of which is doubtful.
    """
    if report.cannot_judge is not None:
        return report.cannot_judge
    issue = doubtful_data_issue(report.findings)
    return None if issue is None else issue.message


def severity_counts(findings: Sequence[Finding]) -> str:
    """Number of findings of each severity: "1 error, 2 warnings, 3 info"."""
    parts = []
    for severity in sorted(Severity)[::-1]:
        number = sum(finding.severity is severity for finding in findings)
        text = f"{number} {severity.label}" if severity is Severity.INFO else units.count(number, severity.label)
        parts += [text] if number else []
    return ", ".join(parts) or "No rule fired"


def subtitle(run: Run) -> str:
    """Return a short description of a run from its manifest: strategy, ranks, model, size of its traces."""
    manifest = Manifest.of(run.manifest)
    parts = [escaping.inert(manifest.strategy or "", _MAX_WORD), units.count(len(run.ranks), "rank")]
    parts += [f"model {escaping.inert(manifest.model.name, _MAX_WORD)}"] if manifest.model.name else []
    opened = [window for window in manifest.windows if window.outlier is not None]
    size_bytes = sum({source.path: source.size_bytes for source in run.sources}.values())  # of files, not of traces
    parts += [units.size(size_bytes) if size_bytes else "", "simulated" if manifest.simulated else ""]
    parts += [f"window {window.window} {window.outlier.in_words}" for window in opened[-1:] if window.outlier]
    parts += [f"{units.count(len(opened) - 1, 'window')} before it"] if len(opened) > 1 else []
    return " · ".join(part for part in parts if part)


def rule_name(code: str) -> str:
    """Return the name of a rule by its code: "exposed-communication", or the code if no rule has it."""
    return _rule_names().get(code, code)


def cost(finding: Finding) -> str:
    """Return the cost of a finding in a few words: "saves 16.1 ms of 41.4 ms a step (38.9%)"; '' if it has no cost."""
    parts = [finding.cost_in_words] if finding.impact else []
    parts += [units.size(finding.cost_bytes)] if finding.cost_bytes else []
    return " · ".join(parts)


def step_note(run: Run) -> str | None:
    """Note for a page that draws steps that they are iterations found by repetition; None where they are not."""
    if not has_found_iterations(run):
        return None
    return "No steps are marked in the traces: steps are iterations that were found by repetition."


def share_or_size(finding: Finding | KnownFinding) -> str:
    """Cost of a finding as a share of the step, or in bytes where it costs no time."""
    if finding.cost_bytes and not finding.impact:
        return units.size(finding.cost_bytes)
    return _up_to(finding) + units.share(finding.impact)


def scope(finding: Finding) -> str:
    """Scope of a finding and its confidence: "ranks 0–7 · steps 3, 5 · confidence 90%"."""
    parts = [units.numbers("rank", finding.ranks)] if finding.ranks else []
    noun = "iteration" if finding.is_of_iterations else "step"
    parts += [units.numbers(noun, finding.steps)] if finding.steps else []
    return " · ".join([*parts, f"confidence {finding.confidence:.0%}"])


def details(finding: Finding) -> str:
    """The evidence in words; "" where the sentence of the finding says it already."""
    return "" if finding.message.rstrip(".") in finding.sentence else finding.message


def consequences(finding: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are consequences of a finding: with it they are one trouble."""
    return [other for other in findings if other.consequence_of == finding.id]


def place(finding: Finding) -> str:
    """Where a finding is, by its first row of evidence: "rank 0, step 11: all-gather of layers.3 in forward".

    Of a late rank, the row is a wait of another: "rank 6, step 11: late for the all-gather, where rank 2 waits".
    """
    rows = finding.evidence.head(1).to_dicts()
    row = {name: value for name, value in (rows[0] if rows else {}).items() if value not in (None, "")}
    late = next((row[name] for name in LATE_RANK_COLUMNS if name in row and "rank" in row), None)
    ranks = (row["rank"],) if "rank" in row else finding.ranks
    if late is not None:
        ranks = finding.ranks if late in finding.ranks and row["rank"] not in finding.ranks else (late,)
    steps = (row["step"],) if "step" in row else finding.steps
    noun = "iteration" if finding.is_of_iterations else "step"
    at = [units.numbers("rank", ranks)] if ranks else []
    if at and isinstance(row.get("stage"), int):  # of a pipeline; those of a save have names
        at[0] += f" (stage {row['stage']})"
    at += [units.numbers(f"save at {noun}" if finding.is_of_training else noun, steps)] if steps else []
    called = str(row["op"]).replace("_", "-") if "op" in row else kernel_names.short(str(row.get("name", "")))
    if late is not None:
        called = f"late for the {called or 'collective'}"
    elif {"cause", "detail"} <= row.keys() and called:  # a stall, and the innermost slice in which the host is
        called = "" if called.startswith(_STEP_MARK) else f"in {called}"
    elif "detail" in row and called:  # what the device runs after the idle time that its host is late for
        called = f"before {called}"
    what = [escaping.inert(called, _MAX_WORD)] if called else []
    if "unit" in row:
        unit = escaping.inert(str(row["unit"]), _MAX_WORD)
        unit = f"module {unit}" if unit.isdigit() else unit  # of a Sequential
        what.append(f"of {unit}" if what else unit)
    what += [f"in {row['phase']}"] if "phase" in row else []
    what += [f"at {escaping.inert(str(row['stack']), _MAX_WORD)}"] if "stack" in row else []
    waits = "" if late is None else f", where rank {row['rank']} waits"
    return ": ".join(filter(None, (", ".join(at), " ".join(what)))) + waits


def has_moment(finding: Finding) -> bool:
    """Whether the evidence names ranks and times that the timeline can show."""
    needed = ["rank", "start_ns", "dur_ns"]
    return set(needed) <= set(finding.evidence.columns) and bool(finding.evidence.drop_nulls(needed).height)


def from_run_start(table: pl.DataFrame, clock: pl.DataFrame) -> pl.DataFrame:
    """Return evidence with its times (_TIMES) on the run's clock, counted from where the window begins.

    `clock` is that of `extents.run_clock`. A time is null where the rank is unknown.
    """
    times = tuple(name for name in _TIMES if name in table.columns)
    if not times or "rank" not in table.columns:
        return table
    window = pl.col("window") if "window" in table.columns else pl.lit(0, pl.Int64)
    place = table.select(window.alias("window"), "rank", *times)
    aligned = alignment.on_run_clock(place, clock, times)
    zeros = place.join(clock, on=["window", "rank"], how="left", maintain_order="left")["zero_ns"]
    return table.with_columns(aligned[name] - zeros for name in times)


@functools.cache
def _rule_names() -> Mapping[str, str]:
    # Listing the rules searches all installed distributions.
    return {rule.code: rule.name() for rule in reversed(all_rules())}


def _up_to(finding: Finding | KnownFinding) -> str:
    return "up to " if isinstance(finding, Finding) and not finding.is_priced else ""
