"""Training steps: on the host from the profiler's marks, otherwise from the optimizer's steps or repetitions.

The device window of a step is from the first activity that it launched on the main lane to that of the next step. That
of the last step ends with its last activity; on a CPU run, where the host itself does the work, with its mark.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.normalize.name_patterns import HostNames
from tracekit.model.nesting import Flags, Ints, longest_rise

_LAST = np.iinfo(np.int64).max
_LEAST_FOLLOWING = 2
"""Pairs of successive steps, by which it is known that steps follow each other at once."""
_MOST_PAUSE_RATIO = 0.05
"""Share of a step: the profiler's marks follow each other within 0.1 ms, other programs work between their marks."""
_MOST_WRONG_RATIO = 0.34
"""One of three marks at most: of more, nothing says which are right."""
_LEAST_STEP_RATIO = 0.25
"""Share of the typical step: less is a pause between two steps, of which one was not to be marked."""

_Row = tuple[int | None, int | None, int | None, int, int, int | None]


@dataclass(frozen=True)
class Steps:
    """The host windows of the steps, by start; `from_optimizer` where the profiler marked none.

    Iterations that were found by repetition have an `alike_ratio`, the share of distinct kernels that recur in each,
    and a `covered_ratio`, their share of the time of that work; `on_device` if their times are the device's. Work that
    repeats without being iterations has that number of `layers`. `reason` says why it is the one or the other.
    """

    step: Ints
    start_ns: Ints
    end_ns: Ints
    from_optimizer: bool = False
    alike_ratio: float | None = None
    covered_ratio: float = 1.0
    on_device: bool = False
    layers: int = 0
    reason: str = ""
    between_marks: tuple[int, ...] = ()
    """Steps without a mark of their own: each is the time between the marks of the steps before and after it."""
    range_name: str = ""
    """Name of the ranges that are the steps of a program without PyTorch."""

    @property
    def is_marked(self) -> bool:
        """Whether ranges of the host are the steps, which end where the program says."""
        return not self.from_optimizer and self.alike_ratio is None and not self.on_device

    def at(self, times: Ints) -> Ints:
        """Return the index of the step whose window contains each time; -1 outside all steps."""
        if not len(self.step):
            return np.full(len(times), -1, np.int64)
        index = np.searchsorted(self.start_ns, times, side="right") - 1
        return np.where((index >= 0) & (times < self.end_ns[np.maximum(index, 0)]), index, -1)


def find(
    names: HostNames, name_id: Ints, marked: Flags, is_operator: Flags, start: Ints, end: Ints, lost: Ints
) -> Steps:
    """Return the steps that slices mark; `name_id` is each slice's name, `marked` whether it may mark a step.

    `lost` are the numbers of steps of the profiler whose marks have no usable time.
    """
    marks = np.flatnonzero(names.step.is_not_null().to_numpy()[name_id] & marked)
    if not len(marks):
        # Steps that end where the optimizer steps, counted from 0; later work belongs to no step. Several optimizers
        # with no backward between them end one step.
        end_ns = np.sort(end[names.optimizer[name_id]])
        if not len(end_ns):
            return Steps(end_ns, end_ns, end_ns)
        backward = np.sort(start[names.backward[name_id]])
        if len(backward):
            # A step ends at its last optimizer: the next backward, or the end of the trace, comes before the next one.
            following = np.searchsorted(backward, end_ns)
            end_ns = end_ns[np.append(following[1:] > following[:-1], True)]
        start_ns = np.append(start.min(), end_ns[:-1])
        return Steps(np.arange(len(end_ns)), start_ns, end_ns, from_optimizer=True)
    marks = marks[np.argsort(start[marks], kind="stable")]
    step = names.step.gather(name_id[marks]).to_numpy().astype(np.int64)
    _, first = np.unique(step, return_index=True)
    first = np.sort(first)
    step, begins, ends = step[first], start[marks][first], end[marks][first]
    is_wrong = _contradicts(step, ends - begins)
    lost, usable = np.union1d(lost, step[is_wrong]), ~is_wrong
    # Outside of operators the profiler waits for the device when it stops; annotations around that stay open.
    timed = is_operator if is_operator.any() else marked
    first_ns, last_ns = int(start[timed].min()), int(end[timed].max())
    return _with_unmarked(step[usable], begins[usable], ends[usable], lost, first_ns, last_ns)


def _contradicts(step: Ints, dur: Ints) -> Flags:
    """Flag marks, by start, that take no time or without which the numbers rise, if they are few."""
    is_wrong = dur == 0
    rising = np.flatnonzero(~is_wrong)[longest_rise(step[~is_wrong])]
    is_wrong[np.setdiff1d(np.arange(len(step)), rising)] = True
    return np.asarray(is_wrong & (is_wrong.mean() <= _MOST_WRONG_RATIO))


def _with_unmarked(step: Ints, start: Ints, end: Ints, lost: Ints, first_ns: int, last_ns: int) -> Steps:
    """The steps of marks, and those whose mark is `lost`: the time between the marks before and after it.

    A number that is missing between two marks is such a step too where steps follow each other at once. Of the first or
    last step it is the time from the first operator (`first_ns`) or to the end of the last one (`last_ns`).
    """
    pause_ns, typical_ns = start[1:] - end[:-1], np.median(end - start)
    follows = np.diff(step) == 1
    is_dense = follows.sum() >= _LEAST_FOLLOWING and np.median(pause_ns[follows]) <= _MOST_PAUSE_RATIO * typical_ns
    numbers = [int(step[0]) - 1, *(step[:-1] + 1).tolist(), int(step[-1]) + 1]
    begins, ends = np.append(first_ns, end), np.append(start, last_ns)
    is_one = np.concatenate([[True], np.diff(step) == 2, [True]])
    is_missing = is_one & (np.isin(numbers, lost) | (is_dense & np.concatenate([[False], is_one[1:-1], [False]])))
    places = np.flatnonzero(is_missing & (ends - begins > _LEAST_STEP_RATIO * typical_ns))
    unmarked = np.array(numbers)[places]
    return Steps(
        np.insert(step, places, unmarked),
        np.insert(start, places, begins[places]),
        np.insert(end, places, ends[places]),
        between_marks=tuple(unmarked.tolist()),
    )


def device_windows(steps: Steps, activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the steps table: one row per step and device; one window of all work on each device if none is in a step.

    The main lane is that with most compute; in a trace without any, with most communication, else with most work.
    """
    lane, start = activities["lane"].to_numpy(), activities["start_ns"].to_numpy()
    end = start + activities["dur_ns"].to_numpy()
    computes = (activities["kind"] == "compute").to_numpy()
    computes = computes if computes.any() else (activities["kind"] == "communication").to_numpy()
    computes = computes if computes.any() else np.ones(len(lane), bool)  # nothing but copies
    step_index = _step_index(steps, activities["step"])
    device_of = dict(zip(lanes["lane"].to_list(), lanes["device"].to_list(), strict=True))
    rows: list[_Row] = []
    for device in dict.fromkeys(device_of.values()):
        on_device = np.isin(lane, [number for number, lane_device in device_of.items() if lane_device == device])
        if on_device.any() and not (step_index >= 0).any():
            rows.append((None, None, None, int(start[on_device].min()), int(end[on_device].max()), device))
        elif (on_device & computes).any():
            on_main = on_device & (lane == _busiest(lane, end - start, on_device & computes))
            rows += _of_device(
                steps,
                device,
                _min_per_step(step_index, start, on_main & (step_index >= 0), steps),
                -_min_per_step(step_index, -end, on_device & (step_index >= 0), steps),
                np.sort(start[on_main & (step_index < 0)]),
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
    smallest = np.full(len(steps.step), _LAST, np.int64)
    np.minimum.at(smallest, step_index[among], times[among])
    return smallest


def _of_device(steps: Steps, device: int | None, start: Ints, end: Ints, outside: Ints) -> list[_Row]:
    """Return the windows of steps with a start: each ends where the next starts, the last at its own end.

    `outside` are the starts of work of no step on the main lane, in order.
    """
    started = np.flatnonzero(start != _LAST)
    started = started[np.argsort(start[started], kind="stable")]
    until = np.append(start[started][1:], end[started][-1:])
    if device is None and steps.is_marked and len(started):
        until[-1] = max(until[-1], steps.end_ns[started[-1]])
    # Work of steps without a mark lies between those whose numbers do not follow each other.
    for place in np.flatnonzero(np.diff(steps.step[started]) > 1).tolist():
        outside_after = outside[np.searchsorted(outside, start[started[place]]) :]
        own_end_ns = outside_after[0] if len(outside_after) else end[started[place]]
        until[place] = min(until[place], own_end_ns)
    columns = (steps.step[started], steps.start_ns[started], steps.end_ns[started], start[started], until)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    if steps.on_device:  # nothing is known of the host
        return [(step, None, None, *window, device) for step, _, _, *window in rows]
    return [(*row, device) for row in rows]
