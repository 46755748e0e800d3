"""Trace: one rank in one profiled window. MemorySnapshot: the allocator of one process, at one time. Both as tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import polars as pl

from tracekit.model import schema

TraceFact: TypeAlias = Callable[["Trace"], pl.DataFrame]
"""A measurement of one trace: a pure function to a table. `Run.table` maps it over all traces of a run."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank in one profiled window, on the clock of its own file (Unix time in ns if the file states it).

    Each table is a Polars frame with the columns of the same name's table in `tracekit.model.schema`.
    """

    rank: int
    window: int
    path: str
    lanes: pl.DataFrame = field(default_factory=schema.LANES.empty)
    steps: pl.DataFrame = field(default_factory=schema.STEPS.empty)
    ops: pl.DataFrame = field(default_factory=schema.OPS.empty)
    activities: pl.DataFrame = field(default_factory=schema.ACTIVITIES.empty)
    collectives: pl.DataFrame = field(default_factory=schema.COLLECTIVES.empty)
    groups: pl.DataFrame = field(default_factory=schema.GROUPS.empty)
    allocations: pl.DataFrame = field(default_factory=schema.ALLOCATIONS.empty)
    syncs: pl.DataFrame = field(default_factory=schema.SYNCS.empty)
    checkpoints: pl.DataFrame = field(default_factory=schema.CHECKPOINTS.empty)
    io_calls: pl.DataFrame = field(default_factory=schema.IO_CALLS.empty)
    counters: pl.DataFrame = field(default_factory=schema.COUNTERS.empty)
    metrics: pl.DataFrame = field(default_factory=schema.METRICS.empty)
    data_quality: pl.DataFrame = field(default_factory=schema.DATA_QUALITY.empty)
    header: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the file other than its events: deviceProperties, distributedInfo, versions."""

    @property
    def on_device(self) -> bool:
        """Whether the trace has device activity; if not, a lane is a host thread."""
        return self.lanes.get_column("device").null_count() < self.lanes.height

    @property
    def in_steps(self) -> pl.Expr:
        """Which rows of a table with column step belong to a step: any row if no steps are marked.

        The steps table then has one row per device for the whole window, step null.
        """
        marked = self.steps["step"].null_count() < self.steps.height
        return pl.col("step").is_not_null() if marked else pl.lit(value=True)

    def replace(self, **fields: Any) -> "Trace":
        """Return the trace with other values in some fields or tables."""
        trace = object.__new__(type(self))
        vars(trace).update(vars(self) | fields)
        return trace

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all tables by name."""
        return {name: getattr(self, name) for name in schema.TABLES}


class LazyTrace(Trace):
    """A trace some of whose tables are built on first access."""

    @classmethod
    def of(cls, trace: Trace, makers: Mapping[str, Callable[[], pl.DataFrame]], deferred_bytes: int) -> "LazyTrace":
        """Return `trace` with tables that `makers` build on first access; until then they use `deferred_bytes`."""
        lazy = object.__new__(cls)
        built = {name: value for name, value in vars(trace).items() if name not in makers}
        vars(lazy).update(built, _makers=dict(makers), _deferred_bytes=deferred_bytes)
        return lazy

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name not in schema.TABLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        makers = vars(self).get("_makers", {})  # absent after dataclasses.replace, which builds all tables
        maker = makers.get(name)
        if maker is not None:  # else another thread has just built it
            vars(self).setdefault(name, maker())
            makers.pop(name, None)
        table: pl.DataFrame = vars(self)[name]
        return table

    def replace(self, **fields: Any) -> Trace:
        """Return the trace with other values in some fields or tables; tables not yet built stay so."""
        makers = dict(vars(self).get("_makers", {}))  # a copy: each trace builds its own tables
        trace = super().replace(**fields)
        vars(trace)["_makers"] = makers
        return trace

    @property
    def deferred_bytes(self) -> int:
        """Return the memory used by what the tables not yet built are built from."""
        return int(vars(self)["_deferred_bytes"]) if vars(self).get("_makers") else 0


@dataclass(frozen=True, eq=False)
class MemorySnapshot:
    """The allocator's segments and blocks at one time, and the history before it, if recorded.

    Each table is a Polars frame with the columns of the same name's entry in `tracekit.model.schema.SNAPSHOT_TABLES`.
    """

    path: str
    segments: pl.DataFrame = field(default_factory=schema.SEGMENTS.empty)
    blocks: pl.DataFrame = field(default_factory=schema.BLOCKS.empty)
    events: pl.DataFrame = field(default_factory=schema.EVENTS.empty)
    stacks: pl.DataFrame = field(default_factory=schema.STACKS.empty)
    frames: pl.DataFrame = field(default_factory=schema.FRAMES.empty)
    annotations: pl.DataFrame = field(default_factory=schema.ANNOTATIONS.empty)
    settings: Mapping[str, object] = field(default_factory=dict)
    """The allocator's settings by the snapshot; empty in old snapshots."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the devices that have segments or a history, in order."""
        return tuple(sorted({*self.segments["device"].to_list(), *self.events["device"].unique().to_list()}))

    @property
    def main_device(self) -> int:
        """Return the device with the longest history, else that with most segments; 0 if there is none."""
        lengths = dict(self.events.group_by("device").len().iter_rows())
        segments = dict(self.segments.group_by("device").len().iter_rows())
        return max(self.devices, key=lambda device: (lengths.get(device, 0), segments.get(device, 0)), default=0)

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all tables by name."""
        return {name: getattr(self, name) for name in schema.SNAPSHOT_TABLES}
