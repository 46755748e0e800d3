"""The rule on roles: processes of one program that wait for those of another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.parallelism import role_waits
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.model import escaping, intervals, units
from tracekit.model.intervals import Spans
from tracekit.model.run import Run, other_roles
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import Finding, Rule, Severity, distinct, family, largest_first
from tracekit.sync import alignment

_EVIDENCE_ROWS = 40
_EXPLAINED_FAMILIES = ("HOST", "RANK")
_DOUBT, _SURER = 0.4, 0.15
"""Confidence by time alone: idle time of one program and work of another may coincide. And how much surer a sign makes:
an annotation around the wait, and that the other role works more often than usual in it."""
_MORE_OFTEN = 0.1


@dataclass(frozen=True)
class WaitingRole(Rule):
    """A role of a job, such as a trainer, that is idle while the processes of another role work.

    What it does: reports a role that is idle for more than `min_wait_ratio` of the time in which both roles
    were recorded, while another role works. Of several, it names the role for which this one waits longest.

    Why it costs: the devices of a role that waits for batches, weights or requests of another one do nothing. The
    cost is what a step would be shorter by if the other role were always ready: an upper bound, as both then compete
    for the host and the network, and the other role may itself wait for this one.

    How it is measured: files that were recorded at the same time in other processes, with ranks of their own, are runs
    of other roles. A role works while a rank computes or copies, on a device or in an operator, or all ranks are in
    collectives. It is idle while no rank computes and one pauses for 1 ms or more: collectives of the others then wait
    for that rank. Sends and receives are no work. It waits while it is idle and the other role works. The share of the
    common time counts for the mean step. Roles of one host have one clock; between hosts, which share no collective to
    align clocks by, waits of less than 10 ms are not counted.

    How to fix: more or faster processes of the other role; or let it work ahead: generate the next batch while the
    trainer uses this one (one step off-policy), a queue of more than one batch, weights sent in the background.

    Blind spots: Python without operators, such as an environment or a tokenizer, looks idle. Two programs that have
    nothing to do with each other are taken for roles if they are recorded at the same time into one folder: without
    an annotation around the wait, and unless the other role works more often in it than otherwise, it is information.
    """

    code: ClassVar[str] = "ROLE001"
    facts: ClassVar[tuple[TraceFact, ...]] = (breakdown.by_step, trace_quality.data_quality)
    finding_facts: ClassVar[tuple[TraceFact, ...]] = role_waits.FACTS
    min_wait_ratio: float = 0.05

    def blind_spot(self, run: Run) -> str | None:
        """Return which roles cannot be judged because the work of their devices was not recorded."""
        unjudged = _without_device_work(run)
        return f"device activity of {', '.join(unjudged)} was not recorded (see DATA001)." if unjudged else None

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the run's role waits for another one long enough."""
        is_judged = ~pl.any_horizontal(pl.col("role", "working_role").is_in(_without_device_work(run)))
        waits = run.table(role_waits.role_waits).filter(is_judged, role=run.role)
        longest = largest_first(waits, "wait_ns", "working_role").head(1)
        if longest.is_empty() or longest["wait_ratio"][0] < self.min_wait_ratio:
            return
        row = longest.row(0, named=True)
        other_run = run.roles[row["working_role"]]
        evidence = role_waits.waiting_pauses(run, other_run)
        step_ns = breakdown.mean_step_ns(run)
        inside = "" if row["annotation"] is None else f', most of it in "{escaping.inert(row["annotation"], 80)}"'
        wait, common = units.duration(row["wait_ns"]), units.duration(row["common_ns"])
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{run.role} is idle while {row['working_role']} works for {wait} of the {common} "
            f"in which both were recorded ({units.share(row['wait_ratio'])}){inside}. {_utilization(run.role, row)} "
            f"{_clock(run, other_run)}{'' if _signs(row) else _COINCIDENCE}",
            f"More or faster processes of {row['working_role']}; or let it work ahead, so that {run.role} finds its "
            "input ready: a queue of more than one batch, one step off-policy, weights sent in the background.",
            impact=row["wait_ratio"],
            cost_ns=round(row["wait_ratio"] * step_ns) if step_ns else row["wait_ns"],
            confidence=_DOUBT + _SURER * len(_signs(row)),
            ranks=distinct(evidence, "rank"),
            evidence=evidence.head(_EVIDENCE_ROWS),
            is_of_window=not step_ns,
            claim=f"{run.role} waits for {row['working_role']}",
        )


def _without_device_work(run: Run) -> list[str]:
    """Roles of the run's job some trace of which has no work of a device that the training used."""
    return [
        name
        for name, role_run in run.roles.items()
        if role_run.table(trace_quality.data_quality)["kind"].is_in(["no_device_activity", "device_times"]).any()
    ]


def with_consequences(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; those on the host and on late ranks are consequences of ROLE001 if they are of its waits.

    That is so if no severer than it, and if most of the time of their evidence is a wait for another role. What is a
    consequence of such a finding, in the same time, is one of ROLE001.
    """
    findings = tuple(findings)
    waiting = next((finding for finding in findings if finding.code == WaitingRole.code), None)
    if waiting is None or waiting.severity is Severity.INFO:
        yield from findings
        return
    waits = intervals.union(*(role_waits.role_wait_spans(run, other_run) for other_run in other_roles(run)))
    in_waits = {
        finding.id
        for finding in findings
        if family(finding.code) in _EXPLAINED_FAMILIES
        and finding.severity <= waiting.severity
        and _is_mostly(run, finding, waits)
    }
    for finding in findings:
        is_explained = finding.id in in_waits and (not finding.consequence_of or finding.consequence_of in in_waits)
        yield replace(finding, consequence_of=waiting.id) if is_explained else finding


def _is_mostly(run: Run, finding: Finding, waits: Spans) -> bool:
    """Whether most of the time of a finding's evidence is in these spans of the run's clock."""
    if not {"window", "rank", "start_ns", "dur_ns"} <= set(finding.evidence.columns):
        return False
    rows = finding.evidence.select("window", "rank", "start_ns", "dur_ns").drop_nulls()
    spans = intervals.from_table(alignment.on_run_clock(rows, run.offsets, ("start_ns",)))
    return 2 * int(intervals.coverage(spans, waits).sum()) > int(rows["dur_ns"].sum())


def _utilization(role: str, row: dict[str, int]) -> str:
    work, other_work, both_idle = (
        units.share(row[name] / row["common_ns"]) for name in ("work_ns", "other_work_ns", "both_idle_ns")
    )
    return f"{role} works {work} of that time, {row['working_role']} {other_work}; neither works {both_idle}."


_COINCIDENCE = " Nothing but the time shows that they cooperate: the wait may be a coincidence."


def _signs(row: dict[str, Any]) -> tuple[str, ...]:
    """Signs that idle time of a role is a wait for the other one, and no coincidence."""
    idle_ns = row["common_ns"] - row["work_ns"]
    difference = row["wait_ns"] / idle_ns - row["other_work_ns"] / row["common_ns"]
    signs = {"annotation": row["annotation"] is not None, "alternation": difference >= _MORE_OFTEN}
    return tuple(name for name, is_there in signs.items() if is_there)


def _clock(run: Run, other_run: Run) -> str:
    limit_ns = role_waits.limit_ns(run, other_run)
    if limit_ns:
        return f"They are on two hosts: waits of less than {units.duration(limit_ns)} are not counted."
    if role_waits.is_host_stated(run, other_run):
        return "They are on one host, and have one clock."
    return "Not both state their host: one clock is assumed."
