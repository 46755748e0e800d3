"""Device windows of steps: from the first activity a step launched on the main lane to that of the next step."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.kineto.steps import Steps
from tracekit.model.nesting import Ints

_LAST = np.iinfo(np.int64).max

Row = tuple[int | None, int | None, int | None, int, int, int | None]


def table(steps: Steps, activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the steps table: one row per step and device; without steps, one window of all work on each device.

    The main lane is that with most compute, or, in a trace of nothing but communication, with most of this.
    """
    lane, start = activities["lane"].to_numpy(), activities["start_ns"].to_numpy()
    end = start + activities["dur_ns"].to_numpy()
    computes = (activities["kind"] == "compute").to_numpy()
    computes = computes if computes.any() else (activities["kind"] == "communication").to_numpy()
    step_index = _step_index(steps, activities["step"])
    device_of = dict(zip(lanes["lane"].to_list(), lanes["device"].to_list(), strict=True))
    rows: list[Row] = []
    for device in dict.fromkeys(device_of.values()):
        on_device = np.isin(lane, [number for number, lane_device in device_of.items() if lane_device == device])
        if on_device.any() and not len(steps.step):
            rows.append((None, None, None, int(start[on_device].min()), int(end[on_device].max()), device))
        elif (on_device & computes).any():
            main = on_device & (lane == _busiest(lane, end - start, on_device & computes)) & (step_index >= 0)
            rows += _of_device(
                steps,
                device,
                _min_per_step(step_index, start, main, steps),
                -_min_per_step(step_index, -end, on_device & (step_index >= 0), steps),
            )
    rows.sort(key=lambda row: (row[3], -1 if row[5] is None else row[5]))
    names = ("step", "host_start_ns", "host_end_ns", "start_ns", "end_ns", "device")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")


def _step_index(steps: Steps, step: pl.Series) -> Ints:
    """Return the index in `steps` of each activity's step; -1 outside steps."""
    if not len(steps.step):
        return np.full(len(step), -1, np.int64)
    order = np.argsort(steps.step)
    has_step = step.is_not_null().to_numpy()
    index = np.full(len(step), -1, np.int64)
    index[has_step] = order[np.searchsorted(steps.step[order], step.drop_nulls().to_numpy())]
    return index


def _busiest(lane: Ints, dur: Ints, among: npt.NDArray[np.bool_]) -> int:
    """Return the lane with the most busy time; the first of several."""
    lanes, index = np.unique(lane[among], return_inverse=True)
    time = np.zeros(len(lanes), np.int64)
    np.add.at(time, index, dur[among])
    return int(lanes[np.argmax(time)])


def _min_per_step(step_index: Ints, times: Ints, among: npt.NDArray[np.bool_], steps: Steps) -> Ints:
    """Return the smallest time in each step."""
    smallest = np.full(len(steps.step), _LAST, np.int64)
    np.minimum.at(smallest, step_index[among], times[among])
    return smallest


def _of_device(steps: Steps, device: int | None, start: Ints, end: Ints) -> list[Row]:
    """Return the windows of steps with a start: each ends where the next starts, the last at its own end."""
    started = np.flatnonzero(start != _LAST)
    started = started[np.argsort(start[started], kind="stable")]
    until = np.append(start[started][1:], end[started][-1:])
    columns = (steps.step[started], steps.start_ns[started], steps.end_ns[started], start[started], until)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    if steps.on_device:  # nothing is known of the host
        return [(step, None, None, *window, device) for step, _, _, *window in rows]
    return [(*row, device) for row in rows]
