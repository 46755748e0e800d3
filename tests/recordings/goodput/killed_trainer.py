"""The instrumented trainers with a log of their own: when rank 0 really loaded, stepped and saved, and who was killed.

Each process that the trainers start imports this file, and so writes its events, at once, to the file JOB_EVENTS.
"""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

STEP_S, WARM_UP_S, STALL_S, STALLED_STEP = 0.6, 2.0, 4.0, 30


def note(event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, "time_ns": time.time_ns(), **fields}) + "\n"
    descriptor = os.open(os.environ["JOB_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Function whose begin and end on rank 0 are noted; with the number of optimizer steps of a save."""
    from torch import distributed as dist

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        is_noted, more = dist.get_rank() == 0, {"step": options["step"]} if event == "save" else {}
        if is_noted:
            note(f"{event} begin", **more)
        result = function(*arguments, **options)
        if is_noted:
            note(f"{event} end", **more)
        return result

    return call


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a known duration; the first one of an attempt and one other take longer, and rank 1 dies in one."""
    is_first = [True]

    @functools.wraps(function)
    def step(number: int, *arguments: Any, **options: Any) -> Any:
        from torch import distributed as dist

        rank = dist.get_rank()
        if rank == 0:
            note("step begin", step=number)
        if is_first[0]:
            time.sleep(WARM_UP_S)
        if number == STALLED_STEP:
            time.sleep(STALL_S)
        is_first[0] = False
        time.sleep(STEP_S)
        if rank == 1 and number == int(os.environ["JOB_KILLED_STEP"]):
            note("killed", step=number)
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(number, *arguments, **options)
        if rank == 0:
            note("step end", step=number)
        return result

    return step


if __name__ == "__main__":
    note("launch")
    from instrumented_trainers.__main__ import main

    sys.exit(main())

if __name__ == "__mp_main__":  # a rank
    from instrumented_trainers import loop
    from instrumented_trainers.checkpoints.saver import CheckpointSaver

    loop._restore = noted("load", loop._restore)
    loop._step = slowed(loop._step)
    CheckpointSaver.save = noted("save", CheckpointSaver.save)  # type: ignore[method-assign]
