"""The headline of a page: one sentence that answers its question with a number, from what the page shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from tracekit.analysis.checkpoint import goodput as measured_goodput
from tracekit.analysis.checkpoint import saves
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import collective_contention, contention
from tracekit.analysis.memory import allocations
from tracekit.analysis.parallelism import axis_communication, pipeline_bubbles, rank_timelines
from tracekit.analysis.time import breakdown
from tracekit.model import escaping, kernel_names, units
from tracekit.model.run import Run
from tracekit.replay.allocator.memory_usage import MemoryUsage
from tracekit.replay.graph.what_if import WhatIf
from tracekit.report import goodput as goodput_report
from tracekit.report import html_fragments, phrases
from tracekit.report import memory as memory_report
from tracekit.rules.rule import Finding, Report, Severity, cost_order, family, is_data_quality

GOOD, INFO = "good", "info"
_MAX_NAME = 80
_MOSTLY = 0.5
_STRAGGLERS = ("RANK001", "RANK004")
"""The rules that name the ranks that are late in most steps."""


@dataclass(frozen=True)
class Headline:
    """One sentence with its number; `about` is a second one, such as the costliest finding of the page.

    `status` is its colour: the label of a severity, or `GOOD`.
    """

    text: str
    about: str = ""
    status: str = INFO
    is_verdict: bool = False
    """Whether it is the verdict on the run."""


def verdict(report: Report, _run: Run) -> Headline:
    """Return the costliest finding in one sentence, or that the run cannot be judged, or that no problem was found."""
    findings = [finding for finding in report.findings if not is_data_quality(finding.code)]
    cannot_judge = phrases.cannot_judge(report)
    status = html_fragments.verdict_status(findings, cannot_judge)
    text = phrases.headline(findings, cannot_judge)
    return Headline(text, phrases.severity_counts(findings), status, is_verdict=True)


def step(report: Report, run: Run) -> Headline | None:
    """Duration of a step and its parts, of all ranks."""
    shares = {label: value for label, (value, _) in html_fragments.headline_numbers(run).items()}
    if not shares:
        return None
    (label, duration), *parts = shares.items()
    is_part = [not name.startswith("of ") and value != units.share(0) for name, value in parts]
    text = ", ".join(f"{value} {name}" for (name, value), is_drawn in zip(parts, is_part, strict=True) if is_drawn)
    noun = "A step takes" if "step" in label else "The window takes"
    return _about(f"{noun} {duration} (median, slowest rank): {text} over all ranks", report.findings)


def ranks(report: Report, run: Run) -> Headline:
    """Rank that the others wait for longest, and the wait per step."""
    findings = _of(report, "RANK")
    late = [finding for finding in report.findings if family(finding.code) == "RANK"]
    stragglers = [finding for finding in late if finding.severity > Severity.INFO or finding.code in _STRAGGLERS]
    if stragglers:
        worst = max(stragglers, key=lambda finding: (finding.severity, cost_order(finding)))
        cause = next((finding for finding in report.findings if finding.id == worst.consequence_of), None)
        if cause is None:
            return Headline(worst.sentence, status=worst.severity.label)
        text = f"{worst.claim}: {_duration(worst.measured_ns)}, mostly a consequence of {cause.code}"
        return Headline(text, cause.sentence, cause.severity.label)
    if len(run.ranks) < 2:
        return Headline("Only one rank has a trace, so ranks cannot be compared", status=INFO)
    waits, step_ns = run.table(rank_timelines.awaited_times), breakdown.step_time_ns(run)
    if step_ns is not None:  # as on the page, which draws steps
        waits = waits.drop_nulls("step")
    if waits.is_empty():
        residual_ns = run.offsets["residual_ns"].max()
        if residual_ns is None:
            return _about("Cannot judge: the clocks of the ranks could not be aligned", findings)
        return _about(f"No rank waits for another for longer than the clock error, {_duration(residual_ns)}", findings)
    by_rank = waits.group_by("rank").agg(pl.col("awaited_ns", "all_waits_ns").sum())
    # As in the map of ranks and steps, whose first row is this rank.
    order = ["awaited_ns", "all_waits_ns", "rank"]
    rank, awaited_ns = by_rank.sort(order, descending=[True, True, False]).select("rank", "awaited_ns").row(0)
    each_ns = awaited_ns / max(breakdown.step_times(run).height, 1)
    share = f" ({units.share(each_ns / step_ns)} of it)" if step_ns else ""
    per = "per step" if step_ns else "in the window"
    return _about(
        f"Others wait longest for rank {rank}: one rank waits up to {_duration(each_ns)} {per}{share}", findings
    )


def communication(report: Report, run: Run) -> Headline | None:
    """Share of the step that is exposed communication, and the largest part of that."""
    findings = _of(report, "COMM", "RANK")
    sums = run.table(exposed_communication.by_rank).select(pl.col("duration_ns", "exposed_ns", "waited_ns").sum())
    duration_ns, exposed_ns, waited_ns = (value or 0 for value in sums.row(0))
    if not duration_ns:
        return None
    share, waiting = (units.share(ns / duration_ns) for ns in (exposed_ns + waited_ns, waited_ns))
    if not exposed_ns + waited_ns:
        text = f"No communication is exposed in the {_noun(run)}: all of it is overlapped with compute"
        return _about(text, findings)
    states = run.table(rank_timelines.states)
    mostly = _waiting(states) if waited_ns > exposed_ns else _transfer(states)
    more = f" ({waiting} waiting for late ranks)" if waited_ns else ""
    return _about(f"{share} of the {_noun(run)} is exposed communication{more}, mostly {mostly}", findings)


def parallelism(report: Report, run: Run) -> Headline | None:
    """Return the bubble of the pipeline, or the axis with most exposed communication."""
    findings = _of(report, "PIPE", "TP", "EP")
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles, pipeline_bubbles.FACTS).unique(["window", "rank", "step"])
    if bubbles.height:
        bubble, ideal = (units.share(_mean(bubbles[name])) for name in ("bubble_ratio", "ideal_bubble_ratio"))
        return _about(
            f"The pipeline's bubble is {bubble} of a step (mean of steps and ranks); its schedule alone would have "
            f"{ideal}",
            findings,
        )
    by_axis = run.table(axis_communication.by_axis, axis_communication.FACTS).drop_nulls("axis")
    sums = by_axis.group_by("axis").agg(
        (pl.col(name) / pl.col("steps")).mean() for name in ("communication_ns", "exposed_communication_ns")
    )
    if sums.is_empty():
        return None
    axis, all_ns, exposed_ns = sums.sort("exposed_communication_ns", "axis", descending=[True, False]).row(0)
    which = f"Most exposed communication is on axis {axis}" if sums.height > 1 else f"The only axis is {axis}"
    exposed = f"{_duration(exposed_ns)} of its {_duration(all_ns)} of communication per step"
    return _about(f"{which}: {exposed} are exposed (mean of ranks)", findings)


def slowed_kind(report: Report, run: Run) -> Headline | None:
    """Return the kind of work that concurrent work slows most."""
    findings = _of(report, "STREAM")
    if not run.table(contention.device_count)["devices"].sum():
        return None
    pairs = run.table(collective_contention.all_pairs)
    if pairs.is_empty():
        return Headline("No two kinds of work ran at the same time on any device, so nothing was slowed down")
    pooled = (
        pairs.filter(pl.col("low") > 1)
        .group_by("kind", "concurrent_kind")
        .agg(pl.col("lost_ns").sum(), pl.col("slowdown").median())
    )
    if pooled.is_empty():
        return _about("No kind of work is measurably slower while other work runs concurrently", findings)
    kind, other, lost_ns, slowdown = pooled.sort("lost_ns", descending=True).row(0)
    return _about(
        f"Concurrent {other} slows {kind} down by a factor of {slowdown:.2f}: "
        f"{_duration(lost_ns / len(run.ranks))} per rank over all steps",
        findings,
    )


def kernels(report: Report, table: pl.DataFrame) -> Headline | None:
    """Return the row of `kernels` or `ops`, by name, with most time."""
    findings = _of(report, "HOST", "COMP")
    if table.is_empty():
        return None
    is_work = "time_ratio" in table.columns
    time, ratio = ("total_ns", "time_ratio") if is_work else ("self_ns", "self_ratio")
    what = "traced" if is_work else "recorded host"
    row = table.sort(time, descending=True).row(0, named=True)
    name = escaping.inert(kernel_names.short(row["name"] or "?"), _MAX_NAME)
    return _about(
        f"{name} takes {units.share(row[ratio])} of the {what} time: "
        f"{units.count(row['count'], 'call')}, {_duration(row[time])} on all ranks",
        findings,
    )


def modules(
    report: Report, table: pl.DataFrame, measure: str, name: str, text: Callable[[float], str]
) -> Headline | None:
    """Return the module that takes most of a measure itself, without the modules inside it.

    `table` is that of `ops.by_module`, `measure` one of its columns, `name` what it is called, and `text`
    writes its values.
    """
    of_modules, total = table.drop_nulls("module"), float(table[measure].sum())
    if not total or not of_modules[measure].sum():
        return None
    row = of_modules.sort(measure, "module", descending=[True, False]).row(0, named=True)
    share = units.share(1 - float(of_modules[measure].sum()) / total)
    outside = f"; {share} is outside modules" if share != units.share(0) else ""
    return _about(
        f"{name[:1].upper()}{name[1:]}: module {escaping.inert(row['module'], _MAX_NAME)} has the largest self time, "
        f"{text(row[measure])} ({units.share(row[measure] / total)}) on all ranks{outside}",
        _of(report, "HOST", "COMP"),
    )


def call_stacks(report: Report, tree: pl.DataFrame, side: str) -> Headline | None:
    """Return the frame with most time of its own, in all call stacks together, and the frame above most of that.

    `tree` is that of `call_trees.call_tree` of the device or the host (`side`).
    """
    total_ns = int(tree["self_ns"].sum())
    if not total_ns:
        return None
    frames = tree.join(
        tree.select("node", caller="name"), left_on="parent", right_on="node", how="left", maintain_order="left"
    ).rename({"self_ns": "dur_ns"})
    name, own_ns = _largest(frames, "name")
    caller, called_ns = _largest(frames.filter(name=name), "caller")
    frame, called_by = (escaping.inert(kernel_names.short(long or ""), _MAX_NAME) for long in (name, caller))
    below = f", mostly below {called_by}" if caller and called_ns > _MOSTLY * own_ns else ""
    return _about(
        f"{frame} takes {units.share(own_ns / total_ns)} of the {side} time: {_duration(own_ns)} on all ranks{below}",
        _of(report, "HOST", "COMP"),
    )


def roofline(report: Report, rows: pl.DataFrame) -> Headline | None:
    """Return the call that takes most time above the roofline; None where every call reaches it.

    `rows` is the table of `rooflines.by_call`.
    """
    above = rows.filter(pl.col("above_ns") > 0).sort("above_ns", descending=True)
    if above.is_empty():
        return None
    row = above.row(0, named=True)
    name = escaping.inert(kernel_names.short(row["name"] or "?"), _MAX_NAME)
    longer = f"{_duration(row['above_ns'])} of {_duration(row['work_ns'])}"
    shapes = f"Input shapes: {escaping.inert(row['shapes'], 2 * _MAX_NAME)}" if row["shapes"] else ""
    headline = _about(
        f"Furthest from the roofline: {name} takes {longer} longer than the device needs, "
        f"{units.share(row['roofline_ratio'])} of the roofline",
        _of(report, "HOST", "COMP"),
    )
    return replace(headline, about=". ".join(filter(None, (shapes, headline.about))))


def memory(report: Report, run: Run) -> Headline | None:
    """Return the rank with the highest peak of allocated memory, and how much more is reserved."""
    peaks = run.table(allocations.peaks).drop_nulls("peak_allocated_bytes")
    on_device = peaks.drop_nulls("device")
    if peaks.is_empty():
        return None
    row = (
        (on_device if on_device.height else peaks)
        .sort("peak_allocated_bytes", "rank", descending=[True, False])
        .row(0, named=True)
    )
    reserved, capacity = row["peak_reserved_bytes"], row["memory_bytes"]
    more = f", {units.size(reserved)} reserved" if reserved else ""
    more += f", of {units.size(capacity)} on the device" if capacity else ""
    rank = f"Rank {row['rank']}" + (" allocates most" if len(run.ranks) > 1 else " allocates")
    where = "" if row["device"] is not None else " on the host"
    return _about(f"{rank}: {units.size(row['peak_allocated_bytes'])} at its peak{where}{more}", _of(report, "MEM"))


def snapshot(report: MemoryUsage, rank: int) -> Headline | None:
    """Return why a rank ran out of memory, and what would help, or else the peak of its memory snapshot."""
    if report.out_of_memory is not None:
        first, *rest = memory_report.oom_sentences(report.out_of_memory, rank)
        return Headline(first, " ".join(rest), Severity.ERROR.label)
    if report.peak_allocated_bytes is None:
        return None
    reserved = report.peak_reserved_bytes
    more = f", {units.size(reserved)} reserved" if reserved else ""
    text = f"Rank {rank} allocates {units.size(report.peak_allocated_bytes)} at its peak{more}; it did not run out"
    return Headline(f"{text} of memory", " ".join(report.notes))


def checkpoints(report: Report, run: Run) -> Headline | None:
    """Time for which saves block training."""
    by_save, median = run.table(saves.by_save), saves.median_cost(run)
    if by_save.is_empty():
        return None
    ratio = median["overhead_ratio"]
    text = f"{units.count(by_save.height, 'save')}: each blocks training for {_duration(median['blocked_ns'])} (median)"
    if ratio is not None:
        text += f", {units.share(ratio)} of training time"
    return _about(text, _of(report, "CKPT"))


def goodput(_report: Report, run: Run) -> Headline:
    """Share of the job's time that trained, its largest loss, and how often to save. Raises InputError."""
    job, _ = measured_goodput.read_job([Path(run.path)])
    return Headline(goodput_report.headline(job), goodput_report.advice(job.save_interval))


def savings(report: Report, answers: WhatIf) -> Headline | None:
    """Cause that, removed alone, would make the mean step shortest, with the finding that reports it.

    `answers` are those without each cause, the largest saving first.
    """
    if not answers.answers:
        return None
    best = answers.answers[0]
    saved = f"{_duration(best.saved_ns)} shorter: {units.share(best.saved_ratio)} of {_duration(best.step_ns)}"
    reported = [f for f in report.findings if f.what_if and f.what_if.cause in best.causes]
    text = f"Without {best.name}, the mean step would be {saved}"
    return Headline(text, f"Less certain: {best.caveat}") if best.caveat else _about(text, reported)


def tables(_report: Report, run: Run) -> Headline:
    """Size of the tables that can be queried."""
    size_bytes = sum({source.path: source.size_bytes for source in run.sources}.values())
    ranks_text = units.count(len(run.ranks), "rank")
    return Headline(f"Query all tables of {ranks_text} with one SELECT: {units.size(size_bytes)} of traces")


def _about(text: str, findings: Sequence[Finding]) -> Headline:
    """Return a headline with the costliest of the findings as its second sentence, and their worst severity."""
    if not findings:
        return Headline(text)
    main = max(findings, key=lambda finding: (finding.severity > Severity.INFO, cost_order(finding)))
    worst = max(finding.severity for finding in findings)
    return Headline(text, main.sentence, worst.label)


def _of(report: Report, *families: str) -> list[Finding]:
    """Findings of some families of rules; in place of a consequence its cause, which has the saving."""
    by_id = {finding.id: finding for finding in report.findings}
    of_families = (finding for finding in report.findings if family(finding.code) in families)
    return [by_id.get(finding.consequence_of, finding) for finding in of_families]


def _waiting(states: pl.DataFrame) -> str:
    waits = states.filter(pl.col("state") == rank_timelines.WAITING)
    peers = (
        waits.group_by("peer_rank").agg(pl.col("dur_ns").sum()).sort("dur_ns", "peer_rank", descending=[True, False])
    )
    if peers.is_empty():
        return "waiting for late ranks"
    peer, peer_ns = peers.drop_nulls("peer_rank").row(0) if peers["peer_rank"].count() else (None, 0)
    if peer is None or peer_ns <= _MOSTLY * int(waits["dur_ns"].sum()):
        return f"waiting for late ranks{_where(waits)}"
    return f"waiting for rank {peer}{_where(waits.filter(peer_rank=peer))}"


def _transfer(states: pl.DataFrame) -> str:
    moved = states.filter(pl.col("state") == rank_timelines.TRANSFER)
    return f"transfer{_where(moved)}"


def _where(rows: pl.DataFrame) -> str:
    """Return in which collective most of the time of some states is, and in which unit, if one has most of that."""
    rows = rows.drop_nulls("op")
    if rows.is_empty():
        return ""
    op, op_ns = _largest(rows, "op")
    unit, unit_ns = _largest(rows.filter(op=op), "unit")
    of_unit = f" of {escaping.inert(unit, _MAX_NAME)}" if unit and unit_ns > _MOSTLY * op_ns else ""
    return f" in the {str(op).replace('_', '-')}{of_unit}"


def _largest(rows: pl.DataFrame, name: str) -> tuple[str | None, int]:
    """Return the value of a column with most time in dur_ns, and that time in ns."""
    sums = rows.group_by(name).agg(pl.col("dur_ns").sum()).sort("dur_ns", name)
    value, ns = sums.select(name, "dur_ns").row(-1)
    return value, ns


def _noun(run: Run) -> str:
    if breakdown.step_time_ns(run) is None:
        return "window"
    return "iteration" if phrases.step_note(run) else "step"


def _mean(values: pl.Series) -> float:
    return float(str(values.mean() or 0.0))


def _duration(ns: object) -> str:
    return units.duration(float(str(ns or 0)))
