"""Times of steps: by events on the GPU, where the host runs ahead of the device, else by the host's clock."""

import time
from collections import deque

import torch

from tracekit.capture.metrics import Pending

_MOST_PENDING = 64


class StepTimer:
    """Times what lies between `begin` and `end`, in ns.

    On a GPU that is the time between two events on the current stream: a host that only queues work returns from a step
    before the device has done it, and waits for many steps at once where it reads a value.
    """

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._began: tuple[int, torch.cuda.Event | None] | None = None
        self._measured: deque[Pending] = deque(maxlen=_MOST_PENDING)
        self.latest_ns = 0
        """The time of the latest step that is known to have ended; 0 before the first one."""

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter_ns(), self._event()

    def skip(self) -> None:
        """Leave the current step out: nobody saw it begin."""
        self._began = None

    def end(self) -> Pending | None:
        """Return the time of the step that ends now; None if it is unknown."""
        if self._began is None:
            return None
        began_ns, began = self._began
        took_ns = max(1, time.perf_counter_ns() - began_ns)
        ended = self._event() if began is not None else None
        if began is None or ended is None:
            pending = Pending(None, lambda: took_ns)
        else:
            pending = Pending(ended, lambda: max(1, round(began.elapsed_time(ended) * 1e6)))
        self._note(pending)
        self.latest_ns = self.latest_ns or took_ns
        return pending

    def _note(self, time_ns: Pending) -> None:
        """Note a step's time, and read the earlier ones that are known by now."""
        self._measured.append(time_ns)
        while self._measured and self._measured[0].ready:
            self.latest_ns = int(self._measured.popleft().value())

    def _event(self) -> torch.cuda.Event | None:
        """Record an event; None on the CPU, before the training uses the GPU, and where the GPU has failed."""
        if not (self._on_device and torch.cuda.is_initialized()):
            return None
        try:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        except RuntimeError:  # the training's own next call raises it
            return None
        return event
