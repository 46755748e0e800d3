"""The last sends and receives of this process on backends whose flight recorder has none of them (gloo)."""

import functools
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import distributed

from tracekit.capture.hangs import threads

_MAX_CALLS = 500
_MAX_FRAMES = 32
_DTYPE_PREFIX = "torch."


class MessageLog:
    """A ring of the last sends and receives."""

    def __init__(self) -> None:
        self._calls: deque[dict[str, Any]] = deque(maxlen=_MAX_CALLS)
        self._numbers: Counter[Any] = Counter()

    def install(self) -> None:
        """Observe the methods of process groups that send and receive."""
        group = distributed.ProcessGroup
        for name, op in (("send", "send"), ("recv", "recv"), ("recv_anysource", "recv")):
            setattr(group, name, self._observe(getattr(group, name), op))

    def progress(self) -> tuple[int, int]:
        """Return the number of calls made, and that of the last ones which are complete."""
        calls = list(self._calls)
        return sum(self._numbers.values()), sum(_is_complete(call) for call in calls)

    def entries(self) -> list[dict[str, Any]]:
        """Return the calls as entries of a flight recorder."""
        return [_entry(call) for call in list(self._calls)]

    def _observe(self, method: Callable[..., Any], op: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._begin(group, op, tensors, args)
            work = method(group, tensors, *args, **kwargs)
            if call is not None and work is not None:
                call["work"] = weakref.ref(work)
            return work

        vars(wrapper)["_torchdynamo_disable"] = True
        return wrapper

    def _begin(self, group: Any, op: str, tensors: Any, args: tuple[Any, ...]) -> dict[str, Any] | None:
        try:
            if "nccl" in group.name().lower():
                return None  # its own flight recorder has them
            self._numbers[group.group_name] += 1
            call = {
                "name": (str(group.group_name), str(group.group_desc)),
                "seq": self._numbers[group.group_name],
                "op": op,
                "own": group.rank(),
                "peer": args[0] if len(args) > 1 else None,
                "sizes": [list(tensor.shape) for tensor in tensors],
                "dtypes": [str(tensor.dtype).removeprefix(_DTYPE_PREFIX) for tensor in tensors],
                "created_ns": time.time_ns(),
                "frames": _stack(),
                "work": None,
            }
        except Exception:  # noqa: BLE001 whatever fails here, the training goes on
            return None
        self._calls.append(call)
        return call


def _is_complete(call: dict[str, Any]) -> bool:
    """Return whether a call is complete. A work that nobody holds any more can't be waited for."""
    reference = call["work"]
    if reference is None:
        return False
    work = reference()
    return work is None or bool(work.is_completed())


def _entry(call: dict[str, Any]) -> dict[str, Any]:
    rank, peer = call["own"], "?" if call["peer"] is None else call["peer"]
    is_send = call["op"] == "send"
    return {
        "process_group": call["name"],
        "collective_seq_id": 0,
        "p2p_seq_id": call["seq"],
        "op_id": call["seq"],
        "profiling_name": f"gloo:send {rank}->{peer}" if is_send else f"gloo:recv {rank}<-{peer}",
        "time_created_ns": call["created_ns"],
        "input_sizes": call["sizes"] if is_send else [],
        "input_dtypes": call["dtypes"] if is_send else [],
        "output_sizes": [] if is_send else call["sizes"],
        "output_dtypes": [] if is_send else call["dtypes"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": _is_complete(call),
        "is_p2p": True,
        "frames": call["frames"],
    }


def _stack() -> list[dict[str, Any]]:
    """Return the callers of the observed method, innermost first."""
    frames: list[dict[str, Any]] = []
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if not threads.is_own(code.co_filename):
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return frames
