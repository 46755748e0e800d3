"""Which kernels are the same work: equal name, grid, block, bytes and input shapes."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import launches, trace_columns
from tracekit.model import columns, sweep_line
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

_NEIGHBOURS = (1, 2, -1, -2)
_ODD = 0x9E3779B97F4A7C15


@memoize
def kernel_ids(trace: Trace, device: int | None) -> npt.NDArray[np.uint64]:
    """Return an id for each row of a device's `launches.work`, shape (n,); equal for the same work.

    Same work: name, grid, block, bytes, and input shapes of the launching op; without recorded shapes, the neighbouring
    kernels on its lane, two on either side.
    """
    plain, has_shapes = _plain_ids(trace, device)
    return np.where(has_shapes, plain, _in_context(plain, launches.work(trace, device)))


def kernel_ids_anywhere(trace: Trace, device: int | None) -> npt.NDArray[np.uint64]:
    """Return `kernel_ids` that do not depend on the neighbouring kernels, even without recorded shapes."""
    return _plain_ids(trace, device)[0]


@memoize
def _plain_ids(trace: Trace, device: int | None) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return an id for each row of the work, from shapes where the launching op has them, and where it has."""
    work = launches.work(trace, device)
    plain = work.select(pl.struct("name", "grid", "block", "bytes").hash(seed=0)).to_series().to_numpy()
    if trace.ops["shapes"].null_count() == trace.ops.height:
        return plain, np.zeros(len(plain), np.bool_)
    parent = sweep_line.at(trace_columns.parent_ids(trace), launches.work_columns(trace, device).call, -1)
    row = columns.rows_of(trace.ops["id"].to_numpy(), parent)
    shapes = columns.rows_or_nulls(trace.ops.select("shapes"), row)["shapes"]
    has_shapes = shapes.is_not_null().to_numpy()
    return np.where(has_shapes, plain ^ shapes.hash(seed=0).to_numpy(), plain), has_shapes


def places(work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return an id for each row's place in the program, shape (n,): its name and those of its neighbours."""
    return _in_context(work.select(pl.col("name").hash(seed=0)).to_series().to_numpy(), work)


def _in_context(plain: npt.NDArray[np.uint64], work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return kernel hashes mixed with their neighbours', which separates GEMMs of one grid by position."""
    lane = work["lane"].to_numpy()
    order = np.argsort(lane, kind="stable")
    hashes, on = plain[order], lane[order]
    mixed = hashes.copy()
    for distance in _NEIGHBOURS:
        near = np.where(np.roll(on, distance) == on, np.roll(hashes, distance), np.uint64(0))
        near[slice(0, distance) if distance > 0 else slice(distance, None)] = 0
        mixed = mixed * np.uint64(_ODD) + near
    ids = np.empty_like(mixed)
    ids[order] = mixed
    return ids
