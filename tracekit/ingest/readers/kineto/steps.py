"""Training steps on the host: from the profiler's marks, otherwise from the optimizer's steps or repetitions."""

from dataclasses import dataclass

import numpy as np

from tracekit.ingest.readers.kineto.name_patterns import HostNames
from tracekit.model.nesting import Flags, Ints


@dataclass(frozen=True)
class Steps:
    """The host windows of the steps, by start; `from_optimizer` where the profiler marked none.

    Iterations that were found by repetition have an `alike_ratio`, the share of distinct kernels that recur in each,
    and a `covered_ratio`, their share of the time of that work; `on_device` if their times are the device's.
    """

    step: Ints
    start_ns: Ints
    end_ns: Ints
    from_optimizer: bool = False
    alike_ratio: float | None = None
    covered_ratio: float = 1.0
    on_device: bool = False

    def at(self, times: Ints) -> Ints:
        """Return the index of the step whose window contains each time; -1 outside all steps."""
        if not len(self.step):
            return np.full(len(times), -1, np.int64)
        index = np.searchsorted(self.start_ns, times, side="right") - 1
        return np.where((index >= 0) & (times < self.end_ns[np.maximum(index, 0)]), index, -1)


def find(names: HostNames, name_id: Ints, marked: Flags, start: Ints, end: Ints) -> Steps:
    """Return the steps that slices mark; `name_id` is each slice's name, `marked` whether it may mark a step."""
    marks = np.flatnonzero(names.step.is_not_null().to_numpy()[name_id] & marked)
    if not len(marks):
        return _by_optimizer(names, name_id, start, end)
    marks = marks[np.argsort(start[marks], kind="stable")]
    step = names.step.gather(name_id[marks]).to_numpy().astype(np.int64)
    _, first = np.unique(step, return_index=True)
    first = np.sort(first)
    return Steps(step[first], start[marks][first], end[marks][first])


def _by_optimizer(names: HostNames, name_id: Ints, start: Ints, end: Ints) -> Steps:
    """Return steps that end where the optimizer steps, counted from 0; later work belongs to no step.

    Several optimizers with no backward between them end one step.
    """
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
