"""The tables that pages draw, and how each is measured: every fact that the dashboard shows is named here."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.checkpoint import save_stages, saves, stalls
from tracekit.analysis.communication import collective_instances, exposed_communication, group_bandwidth
from tracekit.analysis.compute import collective_contention, compute_gap_causes, contention, device_counters
from tracekit.analysis.compute import kernels as kernel_totals
from tracekit.analysis.host import call_trees, ops
from tracekit.analysis.parallelism import (
    axis_communication,
    expert_load,
    group_axes,
    pipeline_bubbles,
    pipeline_stages,
    rank_places,
    rank_timelines,
)
from tracekit.analysis.quality import contents, trace_quality
from tracekit.analysis.time import breakdown
from tracekit.model.fact import Fact
from tracekit.model.intervals import Window
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import alignment, collective_matching


@dataclass(frozen=True)
class Table:
    """A table of a run, and how it is measured."""

    measure: Callable[[Run], pl.DataFrame]


def _per_trace(fact: TraceFact) -> Table:
    return Table(lambda run: run.table(fact))


def _across(fact: Fact[Run], *facts: TraceFact) -> Table:
    """Return a table across ranks. It needs their clocks and `facts`, measured for related tables in the same pass."""
    return Table(lambda run: run.table(fact, (collective_matching.calls, *facts) if facts else ()))


BREAKDOWN_BY_STEP, BREAKDOWN_BY_RANK = _per_trace(breakdown.by_step), _per_trace(breakdown.by_rank)
STEPS_BY_RANK = Table(breakdown.steps_by_rank)

CLOCKS = _across(breakdown.by_clock)
CLOCK_OFFSETS = Table(lambda run: run.offsets)
RUN_CLOCK = _across(breakdown.run_clock, breakdown.extent)
SPREAD_BY_STEP = _across(rank_timelines.spread)
RANK_STATES = _across(rank_timelines.states)
WAIT_TIMES = _across(rank_timelines.wait_times)

COLLECTIVES = _across(
    group_bandwidth.by_kind,
    compute_gap_causes.communication_gap_time,
    compute_gap_causes.compute_gap_causes,
    *group_bandwidth.FACTS,
)
COLLECTIVES_BY_RANK = _across(collective_instances.by_collective)
COLLECTIVE_SPEEDS = _across(group_bandwidth.speeds)
EXPOSED_BY_RANK = _across(exposed_communication.by_rank)
GAPS_BY_RANK, GAPS_BY_CAUSE = _across(compute_gap_causes.stalls_by_rank), _across(compute_gap_causes.stalls_by_cause)
COMMUNICATION_GAPS, COMPUTE_GAPS = compute_gap_causes.COMMUNICATION, compute_gap_causes.COMPUTE

GROUP_AXES = _across(group_axes.group_axes, *group_axes.FACTS)
MESH_GROUPS = _across(rank_places.mesh_table)
COMMUNICATION_BY_AXIS = _across(axis_communication.by_axis, *axis_communication.FACTS)
EXPERT_LOAD = _across(expert_load.expert_load, *expert_load.FACTS)
EXPERT_PAIRS = _across(expert_load.expert_pairs, *expert_load.FACTS)
EXPERT_PAIR_TRANSFERS = _across(expert_load.by_pair, *expert_load.FACTS)
PIPELINE_BUBBLES = _across(pipeline_bubbles.pipeline_bubbles, *pipeline_bubbles.FACTS)
PIPELINE_ACTIONS = _across(pipeline_stages.staged_actions, *pipeline_stages.FACTS)
PIPELINE_GAPS = _across(pipeline_bubbles.idle_gaps, *pipeline_bubbles.FACTS)

DEVICE_COUNTERS = _per_trace(device_counters.device_counters)
DEVICES = _per_trace(contention.device_count)
ROOFS = _per_trace(ops.roofs)
CONTENTION_PAIRS = _across(
    collective_contention.all_pairs, contention.device_count,
    contention.by_step, contention.by_kernel, contention.preparation, collective_contention.calls,
)  # fmt: skip
CONTENTION_BY_PHASE = _across(collective_contention.contention_by_phase)
MOST_DELAYED_CALLS = _across(collective_contention.costliest_calls)
PREPARATION = _per_trace(contention.preparation)
WORK_KINDS, RECORD_CONTENTION = contention.KINDS, contention.RECORD

MISSING_DATA = _across(contents.missing, trace_quality.data_quality, *contents.FACTS)
CONTENTS, QUALITY_ISSUES = _per_trace(contents.contents), _per_trace(trace_quality.data_quality)

SAVES, SAVES_BY_RANK, SAVE_STAGES = _across(saves.by_save), _across(saves.by_rank), _across(saves.stages)
SAVE_CRITICAL_PATH = _across(stalls.parts)

KERNEL_KEYS, OPERATOR_KEYS, HOST_KINDS = kernel_totals.KEYS, ops.KEYS, ops.KINDS
call_tree, CALL_TREE_KINDS = call_trees.call_tree, call_trees.KINDS
by_module, MODULE_MEASURES = ops.by_module, tuple(ops.MEASURES)
module_shares, OUTSIDE_MODULES = ops.tree, ops.OUTSIDE
mesh_coordinates, mesh_groups = rank_places.coordinates, rank_places.groups_of
operators = ops.ops
rooflines_by_call = ops.rooflines
KERNELS_BY_NAME, kernels = _across(kernel_totals.by_name), kernel_totals.with_launch_delays
planning_inputs = saves.planning_inputs
rank_totals = rank_timelines.totals
representative_step = save_stages.representative_step


def step_span(run: Run, window: int, step: int | None) -> Window:
    """Span of a step, from the first rank's start to the last one's end, in ns on the run's clock (None: all steps)."""
    rows = run.table(breakdown.by_rank) if step is None else run.table(breakdown.by_step).filter(step=step)
    rows = rows.filter(window=window).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    aligned = alignment.on_run_clock(rows, run.offsets, ("start_ns", "end_ns"))
    return int(aligned["start_ns"].min()), int(aligned["end_ns"].max())  # type: ignore[arg-type]  # whole ns
