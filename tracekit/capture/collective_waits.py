"""Time of each step in which the training's thread waited for collectives on the host, without a profiler.

Two clocks: Python's calls of `Work.wait` (collectives of `torch.distributed`, FSDP, ZeRO), and the timer of
DistributedDataParallel's reducer, which waits in C++ at the end of backward. On a GPU the host waits for no collective:
`Work.wait` orders streams. Not seen are waits of functional collectives (DTensor, compiled graphs).
"""

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

_COMMUNICATION_END, _COMPUTE_END = "backward_comm_time_end", "backward_compute_time_end"


class _Thread(threading.local):
    waited_ns = 0


class _Observer:
    before_wait: Callable[[], None] | None = None


_thread = _Thread()
_observer = _Observer()


class CollectiveWaits:
    """Waits of the thread that calls `take` at the end of each step, from its creation on; the process group exists."""

    def __init__(self) -> None:
        _observe_waits()
        self._taken_ns = _thread.waited_ns
        self._modules: weakref.WeakKeyDictionary[Any, int] | None = None  # with the last iteration that was read

    def take(self) -> Callable[[], int | None]:
        """Function that returns the wait of the step that ends now, in ns; None where a reducer has not stated it.

        Call it at the end of the next step: a reducer states the times of a backward in the forward that follows it.
        """
        waited_ns = _thread.waited_ns - self._taken_ns
        self._taken_ns = _thread.waited_ns
        if self._modules is None:
            self._modules = _timed_modules()
        return functools.partial(self._with_reducers, waited_ns)

    def _with_reducers(self, waited_ns: int) -> int | None:
        assert self._modules is not None
        waits_ns = [wait_ns for module in list(self._modules) if (wait_ns := self._reducer_wait_ns(module)) is not None]
        if self._modules and not waits_ns:
            return None
        return waited_ns + sum(waits_ns)

    def _reducer_wait_ns(self, module: Any) -> int | None:
        """Time from the last gradient to the end of its collectives; None if the last backward was read before."""
        assert self._modules is not None
        times_ns: dict[str, int] = module.logger._get_ddp_logging_data().ints_map
        iteration = times_ns.get("iteration", 0)
        if iteration == self._modules[module] or _COMMUNICATION_END not in times_ns:
            return None
        self._modules[module] = iteration
        return max(0, times_ns[_COMMUNICATION_END] - times_ns[_COMPUTE_END])


def call_before_waits(callback: Callable[[], None] | None) -> None:
    """Call `callback` before each `Work.wait` of this process, in place of an earlier one; None: call nothing."""
    _observer.before_wait = callback
    if callback is not None:
        _observe_waits()


def _observe_waits() -> None:
    """Time the calls of `Work.wait` of this process: 0.3 µs a call."""
    wait = distributed.Work.wait
    if getattr(wait, "_tracekit_timed", False):
        return

    @functools.wraps(wait)
    def timed_wait(*args: Any, **kwargs: Any) -> Any:
        if _observer.before_wait is not None:
            _observer.before_wait()
        began_ns = time.perf_counter_ns()
        try:
            return wait(*args, **kwargs)
        finally:
            _thread.waited_ns += time.perf_counter_ns() - began_ns

    vars(timed_wait).update(_torchdynamo_disable=True, _tracekit_timed=True)
    distributed.Work.wait = timed_wait


def _timed_modules() -> "weakref.WeakKeyDictionary[Any, int]":
    """Modules whose reducer exists, each told to time every backward: by default torch times each hundredth."""
    modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    for module in gc.get_objects():
        if issubclass(type(module), DistributedDataParallel) and getattr(module, "logger", None) is not None:
            module._set_ddp_runtime_logging_sample_rate(1)
            modules[module] = 0
    return modules
