"""Steps of programs without PyTorch: ranges of one name that follow one another through most of the recording."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import pass_evidence
from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import environment, kernel_names
from tracekit.model.nesting import Ints

_MIN_COUNT = 3
"""Of two ranges nothing shows that they repeat: they may be the halves of a program."""
_MIN_WORK_RATIO = 0.9
"""Share of the work launched from the first range's start to the last one's end that the ranges launched: with less,
they are one part of an iteration, such as its solver, and the rest of it would belong to no step."""
_MIN_COVERED_RATIO = 0.5
"""Share of all device time that the ranges launched: before and after them there may be setup and output."""


def with_range_steps(
    host: Host, activities: pl.DataFrame, names: pl.Series, header: Mapping[str, Any]
) -> tuple[Host, pl.DataFrame]:
    """Host slices and activities of a program without PyTorch, in the steps that its ranges mark.

    Ranges are steps if they have one name, numbers aside, are the outermost ones of the thread that launches most work,
    do not overlap, launch nearly all work between the first and the last of them, and most work of the recording.
    `activities` has column host_id, the slice that launched it; `names` are those of all slices. Both tables are
    returned as they are if steps are marked, or no ranges are such.
    """
    if len(host.steps.step) or not is_without_pytorch(names, header):
        return host, activities
    launched = activities.filter(pl.col("host_id").is_not_null())
    if launched.is_empty():
        return host, activities
    launcher, dur_ns = launched["host_id"].to_numpy(), launched["dur_ns"].to_numpy()
    lanes = host.lane[launcher]
    main = int(np.argmax(np.bincount(lanes)))
    ranges = np.flatnonzero((host.lane == main) & (host.parent < 0) & host.is_kind("annotation"))
    name = pass_evidence.stems(host.names.name).gather(host.name_id[ranges])
    work = _Work(host.start_ns[launcher], dur_ns, int(activities["dur_ns"].sum()))
    candidates = [(group, ranges[(name == group).to_numpy()]) for group in name.unique().sort()]
    covering = [(work.covered_ns(host, ids), str(group), ids) for group, ids in candidates if work.is_steps(host, ids)]
    if not covering:
        return host, activities
    _, range_name, ids = max(covering, key=lambda candidate: candidate[:2])
    steps = Steps(np.arange(len(ids)), host.start_ns[ids], host.end_ns[ids], range_name=range_name)
    host = replace(host, steps=steps, step=steps.at(host.start_ns))
    return host, activities.with_columns(id_column(host.step_of(activities["host_id"]), "step"))


def is_without_pytorch(names: pl.Series, header: Mapping[str, Any]) -> bool:
    """Whether a recorder of any program recorded one in which nothing has a name of PyTorch."""
    return environment.RECORDS_ANY_PROGRAM in header and not names.str.contains(kernel_names.OF_PYTORCH).any()


class _Work:
    """When the work of a recording was launched, how long each takes, and how long all work takes."""

    def __init__(self, launch_ns: Ints, dur_ns: Ints, busy_ns: int) -> None:
        order = np.argsort(launch_ns, kind="stable")
        self.launch_ns, self.busy_ns = launch_ns[order], busy_ns
        self.until_ns = np.append(0, np.cumsum(dur_ns[order]))

    def is_steps(self, host: Host, ids: Ints) -> bool:
        """Whether ranges, by start, may be steps."""
        start_ns, end_ns = host.start_ns[ids], host.end_ns[ids]
        if len(ids) < _MIN_COUNT or (start_ns[1:] < end_ns[:-1]).any():
            return False
        covered_ns, around_ns = self.covered_ns(host, ids), int(self._launched_ns(start_ns[:1], end_ns[-1:])[0])
        return covered_ns >= max(_MIN_WORK_RATIO * around_ns, _MIN_COVERED_RATIO * self.busy_ns, 1)

    def covered_ns(self, host: Host, ids: Ints) -> int:
        """Time of the work that was launched within ranges."""
        return int(self._launched_ns(host.start_ns[ids], host.end_ns[ids]).sum())

    def _launched_ns(self, start_ns: Ints, end_ns: Ints) -> Ints:
        first, end = (np.searchsorted(self.launch_ns, times) for times in (start_ns, end_ns))
        launched_ns: Ints = self.until_ns[end] - self.until_ns[first]
        return launched_ns
