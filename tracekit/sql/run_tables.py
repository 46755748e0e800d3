"""The tables that a query can name: those of traces, and those that facts derive from a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import device_counters, kernel_sequences, unknown_work
from tracekit.analysis.host import launch_queues, module_tree
from tracekit.analysis.parallelism import axis_communication, expert_pairs, group_axes, pipeline_bubbles, ring_overlap
from tracekit.analysis.parallelism.pipeline_actions import ACTIONS, pipeline_actions
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model import plugins, schema
from tracekit.model.run import OFFSETS, RUN_DATA_QUALITY, Run, RunFact
from tracekit.model.schema import Column, Table
from tracekit.replay.allocator.facts import run_snapshots
from tracekit.replay.graph.critical_path import path as critical_path
from tracekit.sync import alignment

_RANK_COLUMNS = (
    Column("window", pl.Int64(), "", "Profiled window of the run, from 0."),
    Column("rank", pl.Int64(), "", "Global rank of the process."),
)


def _ns(name: str, meaning: str) -> Column:
    return Column(name, pl.Int64(), "ns", meaning)


BREAKDOWN = Table(
    "breakdown",
    "step, rank and device: where the time of the step's device window goes",
    (
        Column("step", pl.Int64(), "", "Training step; null where the trace marks none."),
        Column("device", pl.Int64(), "", "Device index; null on a CPU run."),
        _ns("start_ns", "Start of the device window."),
        _ns("duration_ns", "Its length: compute + exposed communication + exposed copy + idle, exactly."),
        _ns("compute_ns", "Time in which any lane computes."),
        _ns("communication_ns", "Time in which any lane communicates."),
        _ns("copy_ns", "Time in which any lane copies or sets memory."),
        _ns("overlapped_ns", "Communication while another lane computes."),
        _ns("exposed_communication_ns", "Communication that no compute hides."),
        _ns("exposed_copy_ns", "Copies that neither compute nor communication hides."),
        _ns("idle_ns", "The rest."),
    ),
)

_SNAPSHOT_NAMES = {name: f"snapshot_{name}" for name in schema.SNAPSHOT_TABLES}
TABLES: Mapping[str, Table] = {
    **{t.name: replace(t, columns=(*_RANK_COLUMNS, *t.columns)) for t in (*schema.TABLES.values(), BREAKDOWN)},
    **{t.name: t for t in (OFFSETS, collective_instances.INSTANCES, collective_instances.WAITS, RUN_DATA_QUALITY)},
    **{
        t.name: replace(t, columns=(*_RANK_COLUMNS, *t.columns))
        for t in (
            ACTIONS,
            module_tree.MODULES,
            launch_queues.QUEUES,
            kernel_sequences.SEQUENCES,
            unknown_work.UNKNOWN_WORK,
            device_counters.DEVICE_METRICS,
        )
    },
    **{t.name: t for t in (pipeline_bubbles.BUBBLES, group_axes.AXES, axis_communication.AXIS_COMMUNICATION)},
    **{t.name: t for t in (expert_pairs.PAIRS, ring_overlap.RINGS, critical_path.PATHS)},
    **{
        name: replace(t, name=name, columns=(*_RANK_COLUMNS, *t.columns))
        for name, t in zip(_SNAPSHOT_NAMES.values(), schema.SNAPSHOT_TABLES.values(), strict=True)
    },
}
"""Every table that a query can name, with its columns."""

DERIVED: dict[str, RunFact] = {
    "data_quality": lambda run: run.table(trace_quality.data_quality),
    BREAKDOWN.name: lambda run: run.table(breakdown.by_step),
    OFFSETS.name: lambda run: run.offsets,
    collective_instances.INSTANCES.name: lambda run: run.table(collective_instances.instances),
    collective_instances.WAITS.name: lambda run: run.table(collective_instances.waits),
    ACTIONS.name: lambda run: run.table(pipeline_actions),
    launch_queues.QUEUES.name: lambda run: run.table(launch_queues.launch_queues),
    kernel_sequences.SEQUENCES.name: lambda run: run.table(kernel_sequences.kernel_sequences),
    unknown_work.UNKNOWN_WORK.name: lambda run: run.table(unknown_work.unknown_work),
    device_counters.DEVICE_METRICS.name: lambda run: run.table(device_counters.device_counters),
    module_tree.MODULES.name: lambda run: run.table(module_tree.modules),
    pipeline_bubbles.BUBBLES.name: lambda run: run.table(pipeline_bubbles.pipeline_bubbles),
    group_axes.AXES.name: lambda run: run.table(group_axes.group_axes),
    critical_path.PATHS.name: lambda run: run.table(critical_path.critical_paths),
    expert_pairs.PAIRS.name: lambda run: run.table(expert_pairs.expert_pairs),
    ring_overlap.RINGS.name: lambda run: run.table(ring_overlap.ring_overlap),
    axis_communication.AXIS_COMMUNICATION.name: lambda run: run.table(axis_communication.axis_communication),
    RUN_DATA_QUALITY.name: lambda run: pl.concat([run.data_quality, alignment.data_quality(run)]),
    **{table_name: run_snapshots.table(name) for name, table_name in _SNAPSHOT_NAMES.items()},
}
"""Tables that are derived from a run rather than read, and their functions."""


@dataclass(frozen=True)
class DerivedTable:
    """A table of a plug-in, from the entry point group ``tracekit.tables``: its columns, and a function of a run."""

    table: Table
    measure: RunFact


def tables() -> Mapping[str, Table]:
    """Return TABLES and those of plug-ins, from the entry point group ``tracekit.tables``.

    Raises InputError if a plug-in's table has the name of another table.
    """
    return {**TABLES, **{name: derived.table for name, derived in plugin_tables().items()}}


def plugin_tables() -> dict[str, DerivedTable]:
    """Return the tables of plug-ins by name. Raises InputError like `tables`."""
    added: dict[str, DerivedTable] = {}
    for point in plugins.entry_points(group="tracekit.tables"):
        derived: DerivedTable = point.load()
        name = derived.table.name
        if name in TABLES or name in added:
            raise InputError(f"{point.value}: there is already a table {name}; remove one of the two packages")
        added[name] = derived
    return added


def derive(run: Run, name: str) -> pl.DataFrame:
    """Return one of the tables that are derived from a run: of DERIVED, or of a plug-in."""
    if name in DERIVED:
        return DERIVED[name](run)
    plugin = plugin_tables()[name]
    return plugin.table.conform(plugin.measure(run))
