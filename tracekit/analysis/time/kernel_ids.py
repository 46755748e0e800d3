"""Which kernels are the same work: equal name, grid, block, bytes and input shapes."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model.trace import Trace

_NEIGHBOURS = (1, 2, -1, -2)
_ODD = 0x9E3779B97F4A7C15


def kernel_ids(trace: Trace, work: pl.DataFrame, *, of_place: bool = True) -> npt.NDArray[np.uint64]:
    """Return an id for each row of `launches.work`, shape (n,); equal for the same work.

    Same work: name, grid, block, bytes, and input shapes of the launching op; without recorded shapes, the neighbouring
    kernels on its lane, two on either side (not without `of_place`).
    """
    own = trace.ops.select(pl.col("id").alias("parent_id"), "shapes").unique("parent_id")
    calls = trace.ops.select(pl.col("id").alias("launch_id"), "parent_id").unique("launch_id")
    shapes = (
        work.select("launch_id")
        .join(calls, on="launch_id", how="left", maintain_order="left")
        .join(own, on="parent_id", how="left", maintain_order="left")
    )
    plain = work.select(pl.struct("name", "grid", "block", "bytes").hash(seed=0)).to_series().to_numpy()
    shaped = shapes.select(pl.col("shapes").hash(seed=0)).to_series().to_numpy()
    otherwise = _in_context(plain, work) if of_place else plain
    return np.where(shapes["shapes"].is_not_null().to_numpy(), plain ^ shaped, otherwise)


def places(work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return an id for each row's place in the program, shape (n,): its name and those of its neighbours."""
    return _in_context(work.select(pl.col("name").hash(seed=0)).to_series().to_numpy(), work)


def _in_context(plain: npt.NDArray[np.uint64], work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return kernel hashes mixed with their neighbours', which separates GEMMs of one grid by position."""
    mixed = plain.copy()
    lane = work["lane"].to_numpy()
    for each in np.unique(lane):
        rows = np.flatnonzero(lane == each)
        own = plain[rows]
        for distance in _NEIGHBOURS:
            near = np.roll(own, distance)
            near[slice(0, distance) if distance > 0 else slice(distance, None)] = 0
            mixed[rows] = mixed[rows] * np.uint64(_ODD) + near
    return mixed
