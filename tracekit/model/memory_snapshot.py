"""MemorySnapshot: a file of `torch.cuda.memory._dump_snapshot` of one process, as tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from tracekit.model import schema


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
