"""Sample the training thread's stack to decide whether it waited for another thread."""

import sys
import threading
from collections.abc import Callable
from types import FrameType

# A thread that waits for another one (Thread.join, Future.result, Queue.get) is inside one of these.
_WAITING = ("wait", "join", "acquire")
_JOINING = "_wait_for_tstate_lock"  # which `is_alive` calls as well


class ThreadSampler:
    """Samples the training thread, assumed to be the main thread, from the thread that created this.

    `step` returns the optimizer steps done, or None where they are not counted.
    """

    def __init__(self, step: Callable[[], int | None]) -> None:
        self.step = step()
        self._count_steps = step
        self._training = threading.main_thread().ident
        self._is_other = threading.get_ident() != self._training
        self._always_waited = True
        self._samples = 0

    def sample(self) -> None:
        """Take one sample. Costs microseconds, and nothing on the training thread itself."""
        if not self._is_other or not self._always_waited:
            return
        frame = sys._current_frames().get(self._training or 0)
        self._samples += 1
        self._always_waited = frame is not None and _waits(frame)

    def blocked(self) -> bool:
        """Return whether training waited in every sample and finished no step meanwhile."""
        return not self._is_other or (self._always_waited and self._samples > 0 and self._count_steps() == self.step)


def _waits(frame: FrameType) -> bool:
    if frame.f_code.co_filename != threading.__file__:
        return False
    caller = frame.f_back if frame.f_code.co_name == _JOINING else frame
    return caller is not None and caller.f_code.co_name in _WAITING
