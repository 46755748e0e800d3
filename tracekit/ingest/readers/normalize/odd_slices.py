"""Slices of a trace whose times and durations are judged, and the count of what is left out as odd."""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.event_categories import HOST_KINDS
from tracekit.model.nesting import Flags, Ints

MOST_RATIO = 0.5
"""From this share on nothing says which of the times are right."""
LEAST_CROSSINGS = 3
"""Pairs of slices of a thread of which the later one ends last, by which durations of a kind are wrong: operators have
none in recordings."""
LEAST_DISORDER_NS = 50_000
"""Times of devices are converted to the host's clock: 17 µs of error occur in traces of V100s."""
LONGEST_NS = 86_400 * 10**9
"""No slice takes a day and a thousand times the rest of its recording."""
LONGEST_SPANS = 1000
KIND = {kind: index for index, kind in enumerate(HOST_KINDS)}


@dataclass(frozen=True)
class Overlong:
    """An event whose duration cannot be right."""

    name: str
    dur_ns: int


@dataclass
class OddValues:
    """What was left out of a trace."""

    bad_times: int = 0
    """Events whose time or duration is no number, or negative."""
    distant: int = 0
    """Events far before or after all others."""
    shifted: int = 0
    """Events of kinds that lie wholly before or after all other events."""
    out_of_order: int = 0
    """Device activities at a time that contradicts the order in which their stream was given work."""
    overlong: list[Overlong] = field(default_factory=list)
    duplicates: int = 0
    """Events that the file has before."""
    untimed_work: int = 0
    """Activities of the device, if none has a usable time."""
    instant_work: int = 0
    """Activities of the device with a duration of 0, if they are so many that no duration was recorded."""
    unplaced: int = 0
    """Events of the allocator that state no device."""
    host_scale: float = 1.0
    """Factor by which durations of the host were converted: 1,000 of ms, 0.001 of ns."""
    device_scale: float = 1.0
    """The same of the device."""
    call_ns: int | None = None
    """Median time of operators if it is shorter than any call takes; else None."""


@dataclass(frozen=True)
class Slices:
    """Slices of the host and of the device with usable times, on the run's clock; row is their place in the file."""

    host: pl.DataFrame
    device: pl.DataFrame

    def without(self, host_flags: Flags, device_flags: Flags) -> "Slices":
        """Slices without those that are flagged."""
        frames = (
            frame.filter(pl.Series(~flags)) if flags.any() else frame
            for frame, flags in ((self.host, host_flags), (self.device, device_flags))
        )
        return Slices(*frames)

    @property
    def start_ns(self) -> Ints:
        """Starts of all, those of the host first."""
        return np.concatenate([frame["start_ns"].to_numpy() for frame in (self.host, self.device)])

    @property
    def dur_ns(self) -> Ints:
        """Durations of all, those of the host first."""
        return np.concatenate([frame["dur_ns"].to_numpy() for frame in (self.host, self.device)])


def streams(device: pl.DataFrame) -> Ints:
    """Number of the stream of each activity; where none is named, its thread is one."""
    columns = ("device", "stream", "lane")
    keys = device.select(pl.struct(columns).rank("dense").cast(pl.Int64) if device.height else pl.lit(0)).to_series()
    return keys.to_numpy()
