"""Concurrency on a device: the kinds of work that overlap each kernel, and which kernels are the same."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import breakdown, kernel_ids, launches
from tracekit.model import columns, intervals
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints, distinct
from tracekit.model.trace import Trace

COMPUTE, COMMUNICATION, PREPARATION, COPY = KINDS = ("compute", "communication", "preparation", "copy")
"""Kinds of work: preparation is small compute outside the main lane, before or after collectives."""
ALONE_RATIO, CONCURRENT_RATIO = launches.ALONE_RATIO, 0.5
"""Work counts as alone up to the first share of overlapped time, as concurrent from the second."""


@dataclass(frozen=True)
class DeviceWork:
    """One device's work by start: its kind (an index into KINDS), and how long each kind overlapped it.

    `concurrent_ns`, shape (n, len(KINDS)), counts work on other lanes. `kernel` is equal for the same work: name, grid,
    block, bytes, and input shapes of the launching op; without recorded shapes, the neighbouring kernels on its lane.
    """

    device: int | None
    work: pl.DataFrame
    step: Ints
    """The step of each piece of work; -1 for none."""
    kind: Ints
    spans: Spans
    concurrent_ns: npt.NDArray[np.int64]
    kernel: npt.NDArray[np.uint64]

    @cached_property
    def kernel_code(self) -> Ints:
        """Return a number from 0 for each piece of work, equal for equal `kernel`."""
        return np.unique(self.kernel, return_inverse=True)[1].astype(np.int64)

    @property
    def dur_ns(self) -> Ints:
        """Duration of each piece of work."""
        return self.spans[:, 1] - self.spans[:, 0]


@memoize
def device_work(trace: Trace) -> tuple[DeviceWork, ...]:
    """Return the work of each device; empty for a CPU run, whose lanes are threads that wait for each other."""
    return tuple(_work_on_device(trace, device) for device in breakdown.devices(trace) if device is not None)


def _work_on_device(trace: Trace, device: int) -> DeviceWork:
    work = launches.work(trace, device)
    spans = intervals.from_table(work)
    kind = _kinds(trace, device)
    return DeviceWork(
        device,
        work,
        columns.to_ints(work["step"], -1),
        kind,
        spans,
        _concurrent(spans, kind, work["lane"].to_numpy()),
        kernel_ids.kernel_ids(trace, device),
    )


def _kinds(trace: Trace, device: int) -> Ints:
    work = launches.work_columns(trace, device)
    kind = np.where(work.computes, KINDS.index(COMPUTE), KINDS.index(COPY))
    kind[work.communicates] = KINDS.index(COMMUNICATION)
    if work.computes.any():
        dur = work.spans[:, 1] - work.spans[:, 0]
        main = int(np.argmax(np.bincount(work.lane[work.computes], weights=dur[work.computes])))
        small = (launches.work(trace, device)["role"] == "communication").to_numpy()
        small |= np.isin(work.id, launches.preparation(trace, device)["id"].to_numpy())
        kind[work.computes & (work.lane != main) & small] = KINDS.index(PREPARATION)
    return kind.astype(np.int64)


def _concurrent(spans: Spans, kind: Ints, lane: Ints) -> npt.NDArray[np.int64]:
    """Time in which each kind overlapped each span; of its own kind, only other lanes count."""
    concurrent_ns = np.zeros((len(spans), len(KINDS)), np.int64)
    for code in distinct(kind):
        of_kind = kind == code
        other_rows = np.flatnonzero(~of_kind)
        concurrent_ns[other_rows, code] = intervals.coverage(spans[other_rows], spans[of_kind])
        rows = np.flatnonzero(of_kind)
        concurrent_ns[rows, code] = intervals.coverage(spans[rows], intervals.covered_twice(spans[rows], lane[rows]))
    return concurrent_ns
