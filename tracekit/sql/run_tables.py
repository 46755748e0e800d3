"""The published facts of a run, by name: what a query, `tracekit explain --kind table` and ``run.table`` can name."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import device_counters, efficiency, kernel_sequences
from tracekit.analysis.host import launch_delay, ops
from tracekit.analysis.parallelism import (
    axis_communication,
    expert_load,
    group_axes,
    pipeline_actions,
    pipeline_bubbles,
    role_waits,
)
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model import plugins, schema
from tracekit.model.fact import Fact, TraceTable
from tracekit.replay.allocator import run_snapshots
from tracekit.replay.graph import sensitivity
from tracekit.replay.graph.critical_path import path as critical_path
from tracekit.sync import alignment

PublishedFact: TypeAlias = Fact[Any]
"""A fact of a trace or of a run that has a documented table."""

FACTS: tuple[PublishedFact, ...] = (
    *(TraceTable(name) for name in schema.TABLES if name != schema.DATA_QUALITY.name),
    trace_quality.data_quality,
    breakdown.by_step,
    alignment.run_offsets,
    collective_instances.instances,
    collective_instances.waits,
    alignment.run_data_quality,
    pipeline_actions.pipeline_actions,
    ops.modules,
    launch_delay.launch_queues,
    kernel_sequences.kernel_sequences,
    efficiency.unknown_work,
    device_counters.device_counters,
    pipeline_bubbles.pipeline_bubbles,
    group_axes.group_axes,
    axis_communication.axis_communication,
    expert_load.expert_pairs,
    axis_communication.ring_overlap,
    critical_path.critical_paths,
    role_waits.role_waits,
    sensitivity.sensitivity,
    *run_snapshots.TABLES,
)
"""Every published fact of tracekit, in the order of docs/schema.md."""


def facts() -> Mapping[str, PublishedFact]:
    """Published facts by name: FACTS, and those of plug-ins, from the entry point group ``tracekit.tables``.

    Raises InputError if what a plug-in adds is no published fact, or has the name of another one.
    """
    by_name = {fact.name: fact for fact in FACTS}
    for point in plugins.entry_points(group="tracekit.tables"):
        fact = point.load()
        if not isinstance(fact, Fact) or fact.table is None:
            raise InputError(f"{point.value}: not a fact with a table; decorate it with run_fact(table=…)")
        if fact.name in by_name:
            raise InputError(f"{point.value}: there is already a table {fact.name}; remove one of the two packages")
        by_name[fact.name] = fact
    return by_name
