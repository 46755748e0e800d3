"""Which role of a job waits for which: a role is idle while the processes of another one work.

Roles are runs of their own (`Run.roles`), on the clocks of their hosts. Nothing aligns these: roles share no
collective. Roles on one host have one clock. Of other hosts, clocks are assumed to differ by up to CLOCK_ERROR_NS.
"""

from itertools import permutations

import numpy as np
import polars as pl

from tracekit.analysis.host import call_trees
from tracekit.analysis.time import trace_columns
from tracekit.ingest import roles
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment, collective_matching

CLOCK_ERROR_NS = 10_000_000
"""Assumed, not measured: a time service usually keeps the hosts of one data center closer to each other than this."""
PAUSE_NS = 1_000_000
"""Shorter gaps between operators are Python of the role itself."""
RECORDED, COLLECTIVE, PAUSE = "recorded", "collective", "pause"
_MESSAGES = ("send", "recv", "send_recv")
_COMMUNICATION = r"^c10d::|^(gloo|nccl|mpi):|^record_param_comms$"
_PAUSES = {"kind": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64, "annotation": pl.String}
_MOST = 0.5

ROLE_WAITS = schema.table(
    "role_waits",
    "pair of roles of a job (trainer, rollout), of which the first may wait for the second",
    schema.column("role", "Role that waits.", pl.String()),
    schema.column("working_role", "Role that works meanwhile.", pl.String()),
    schema.column("common_ns", "Time in which both roles were recorded."),
    schema.column(
        "work_ns", "Time of it in which the waiting role works: a rank computes or copies, or all communicate."
    ),
    schema.column("other_work_ns", "Time of it in which the other role works."),
    schema.column("wait_ns", "Time of it in which no rank of the role computes, one pauses, and the other role works."),
    schema.column("both_idle_ns", "Time of it in which neither works."),
    schema.column("wait_ratio", "Share of the common time that the role waits.", pl.Float64()),
    schema.column("annotation", "Annotation of the program around most of the wait; null without one.", pl.String()),
    schema.column("limit_ns", "Shorter waits are not counted: the clocks of two hosts may differ; 0 on one host."),
)


@trace_fact
def pauses(trace: Trace) -> pl.DataFrame:
    """Pauses of a process: times of at least PAUSE_NS without work on a device or in an operator.

    Columns kind, start_ns, dur_ns, annotation: a row of kind "recorded", the time from the first slice to the last one;
    a row of kind "pause" for each pause, with the annotation in which the host pauses; one of kind "collective" for
    each time of that length in which it only communicates. Sends and receives are no work: they wait for a process.
    Without operators and compute, as in logs of collectives, there are no rows: when it works is not known.
    """
    compute, collectives = _work(trace)
    if not len(compute):
        return schema.empty(_PAUSES)
    times = roles.recorded_times(trace)
    window = min(times), max(times)
    idle = _long(intervals.gaps(intervals.union(compute, collectives), window))
    communicating = _long(intervals.subtract(collectives, compute))
    spans = np.concatenate(([window], communicating, idle))
    dur_ns = spans[:, 1] - spans[:, 0]
    annotation = call_trees.pauses_in_annotations(trace, idle[:, 0], dur_ns[len(dur_ns) - len(idle) :])
    return pl.DataFrame(
        {
            "kind": [RECORDED, *[COLLECTIVE] * len(communicating), *[PAUSE] * len(idle)],
            "start_ns": spans[:, 0],
            "dur_ns": dur_ns,
            "annotation": [None] * (1 + len(communicating)) + annotation.str.strip_chars('"').to_list(),
        },
        schema=_PAUSES,
    )


FACTS: tuple[TraceFact, ...] = (pauses, collective_matching.calls)
"""The facts that the run tables of this module read."""


@run_fact(table=ROLE_WAITS)
def role_waits(run: Run) -> pl.DataFrame:
    """How long each role of the run's job waits for each other one. Columns as ROLE_WAITS; no row without roles."""
    rows = []
    for role, other_role in permutations(run.roles, 2):
        waiting_run, other_run = run.roles[role], run.roles[other_role]
        recorded, idle = _times(waiting_run)
        other_recorded, other_idle = _times(other_run)
        common = intervals.intersect(recorded, other_recorded)
        if not len(common):
            continue
        waits = role_wait_spans(waiting_run, other_run)
        both_idle = intervals.intersect(intervals.intersect(idle, other_idle), common)
        common_ns, wait_ns = intervals.length(common), intervals.length(waits)
        rows.append({
            "role": role,
            "working_role": other_role,
            "common_ns": common_ns,
            "work_ns": intervals.length(intervals.subtract(common, idle)),
            "other_work_ns": intervals.length(intervals.subtract(common, other_idle)),
            "wait_ns": wait_ns,
            "both_idle_ns": intervals.length(both_idle),
            "wait_ratio": wait_ns / common_ns,
            "annotation": _annotation(waiting_run, waits),
            "limit_ns": limit_ns(waiting_run, other_run),
        })  # fmt: skip
    return ROLE_WAITS.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else ROLE_WAITS.empty()


def waiting_pauses(run: Run, other_run: Run) -> pl.DataFrame:
    """Pauses of a role's ranks, most of which are waits for another role.

    Columns window, rank, start_ns (on the trace's clock), dur_ns, annotation; the longest first.
    """
    on_clock = _on_run_clock(run).with_row_index("row").filter(kind=PAUSE)
    waited_ns = intervals.coverage(intervals.from_table(on_clock), role_wait_spans(run, other_run))
    is_wait = waited_ns >= _MOST * on_clock["dur_ns"].to_numpy()
    rows = run.table(pauses)[on_clock["row"].to_numpy()[is_wait]]
    return rows.drop("kind").sort("dur_ns", "window", "rank", descending=[True, False, False])


def role_wait_spans(run: Run, other_run: Run) -> Spans:
    """Times in which a role is idle and another one works, on the clock of their host; sorted and disjoint."""
    (recorded, idle), (other_recorded, other_idle) = _times(run), _times(other_run)
    other_work = intervals.subtract(other_recorded, other_idle)
    waits = intervals.intersect(intervals.intersect(idle, recorded), other_work)
    return waits[waits[:, 1] - waits[:, 0] >= limit_ns(run, other_run)]


def limit_ns(run: Run, other_run: Run) -> int:
    """Shortest wait between two roles that their clocks can show, in ns; 0 unless they state different hosts."""
    hosts = {run.manifest.get("host"), other_run.manifest.get("host")}
    return CLOCK_ERROR_NS if len(hosts) == 2 and None not in hosts else 0


def is_host_stated(run: Run, other_run: Run) -> bool:
    """Whether the manifests of both roles state their hosts."""
    return all(isinstance(role_run.manifest.get("host"), str) for role_run in (run, other_run))


def _work(trace: Trace) -> tuple[Spans, Spans]:
    """Times in which a process computes or copies, on a device or in an operator; and those of its collectives."""
    messages = trace.collectives.filter(pl.col("op").is_in(_MESSAGES))["activity_id"].to_numpy()
    is_communication = trace_columns.is_activity_kind(trace, "communication")
    is_collective = is_communication & ~np.isin(trace.activities["id"].to_numpy(), messages)
    is_operator = trace_columns.is_kind(trace, "cpu_op") & ~trace_columns.is_named(trace, _COMMUNICATION)
    activities, operators = intervals.from_table(trace.activities), trace_columns.spans(trace)[is_operator]
    return intervals.union(activities[~is_communication], operators), intervals.union(activities[is_collective])


def _long(spans: Spans) -> Spans:
    return spans[spans[:, 1] - spans[:, 0] >= PAUSE_NS]


def _on_run_clock(run: Run) -> pl.DataFrame:
    return alignment.on_run_clock(run.table(pauses), run.offsets, ("start_ns",))


@memoize
def _times(run: Run) -> tuple[Spans, Spans]:
    """Times in which some rank of a role was recorded, and of these the times in which the role is idle.

    It is idle while no rank computes and one pauses: the collectives of the others then wait for that rank.
    """
    recorded, computed, paused = [intervals.EMPTY], [intervals.EMPTY], [intervals.EMPTY]
    for _, rank in _on_run_clock(run).group_by("window", "rank", maintain_order=True):
        spans = {kind: intervals.from_table(rank.filter(kind=kind)) for kind in (RECORDED, COLLECTIVE, PAUSE)}
        recorded.append(spans[RECORDED])
        paused.append(spans[PAUSE])
        computed.append(intervals.subtract(spans[RECORDED], intervals.union(spans[COLLECTIVE], spans[PAUSE])))
    idle = intervals.subtract(intervals.union(*paused), intervals.union(*computed))
    return intervals.union(*recorded), idle


def _annotation(run: Run, waits: Spans) -> str | None:
    """Annotation around most of the waits of a role; None without one."""
    annotated = _on_run_clock(run).filter(pl.col("annotation").is_not_null())
    lengths_ns = {
        name: intervals.length(intervals.intersect(intervals.union(intervals.from_table(rows)), waits))
        for (name,), rows in annotated.group_by("annotation", maintain_order=True)
    }
    longest = max(lengths_ns, key=lambda name: lengths_ns[name], default=None)
    if longest is None or lengths_ns[longest] < _MOST * max(intervals.length(waits), 1):
        return None
    return str(longest)
