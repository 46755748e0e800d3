"""The device windows of steps: from the first work a step launched on the main lane to the next step's first."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.kineto.steps import Steps
from tracekit.model.nesting import Ints

_LAST = np.iinfo(np.int64).max

Row = tuple[int | None, int | None, int | None, int, int, int | None]


def table(steps: Steps, activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the steps table: one row per step and device; without steps, one window of all the work on each device."""
    lane, start = activities["lane"].to_numpy(), activities["start_ns"].to_numpy()
    end = start + activities["dur_ns"].to_numpy()
    computes = (activities["kind"] == "compute").to_numpy()
    at = _places(steps, activities["step"])
    device_of = dict(zip(lanes["lane"].to_list(), lanes["device"].to_list(), strict=True))
    rows: list[Row] = []
    for device in dict.fromkeys(device_of.values()):
        mine = np.isin(lane, [each for each, its in device_of.items() if its == device])
        if mine.any() and not len(steps.step):
            rows.append((None, None, None, int(start[mine].min()), int(end[mine].max()), device))
        elif (mine & computes).any():
            main = mine & (lane == _busiest(lane, end - start, mine & computes)) & (at >= 0)
            rows += _of_device(
                steps, device, _least(at, start, main, steps), -_least(at, -end, mine & (at >= 0), steps)
            )
    rows.sort(key=lambda row: (row[3], -1 if row[5] is None else row[5]))
    names = ("step", "host_start_ns", "host_end_ns", "start_ns", "end_ns", "device")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")


def _places(steps: Steps, step: pl.Series) -> Ints:
    """Return where in `steps` the step of each activity stands; -1 outside steps."""
    if not len(steps.step):
        return np.full(len(step), -1, np.int64)
    order = np.argsort(steps.step)
    known = step.is_not_null().to_numpy()
    at = np.full(len(step), -1, np.int64)
    at[known] = order[np.searchsorted(steps.step[order], step.drop_nulls().to_numpy())]
    return at


def _busiest(lane: Ints, dur: Ints, among: npt.NDArray[np.bool_]) -> int:
    """Return the lane with most time; of several such, the first."""
    lanes, index = np.unique(lane[among], return_inverse=True)
    time = np.zeros(len(lanes), np.int64)
    np.add.at(time, index, dur[among])
    return int(lanes[np.argmax(time)])


def _least(at: Ints, times: Ints, among: npt.NDArray[np.bool_], steps: Steps) -> Ints:
    """Return the least time in each step."""
    least = np.full(len(steps.step), _LAST, np.int64)
    np.minimum.at(least, at[among], times[among])
    return least


def _of_device(steps: Steps, device: int | None, start: Ints, end: Ints) -> list[Row]:
    """Return the windows of the steps that have a start: each to the start of the next, the last to its own end."""
    known = np.flatnonzero(start != _LAST)
    known = known[np.argsort(start[known], kind="stable")]
    until = np.append(start[known][1:], end[known][-1:])
    columns = (steps.step[known], steps.start_ns[known], steps.end_ns[known], start[known], until)
    return [(*row, device) for row in zip(*(column.tolist() for column in columns), strict=True)]
