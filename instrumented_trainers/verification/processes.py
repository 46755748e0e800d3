"""Start the ranks of a verification, each a process of its own, and end them when the time is over."""

import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from instrumented_trainers.verification.case import Case
from tracekit.conventions import python_child

# By the process from which ranks are forked. The first step of an optimizer imports torch's compiler, 0.6 s a rank.
_IMPORTED = ("instrumented_trainers.verification.rank", "torch._dynamo")
_GRACE_S = 5.0  # how long the other ranks have to end by themselves once one has failed
_ALARM_S = 60  # how much longer than its time limit a rank can live at most


def answers(case: Case) -> list[dict[str, Any]]:
    """What each rank of a case answered, in order; one that did not has `error` alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    ranks = [context.Process(target=_serve, args=(case, rank), daemon=True) for rank in range(case.ranks)]
    with python_child.safe_path():
        for process in ranks:
            process.start()
    try:
        is_late = _join(ranks, time.monotonic() + case.timeout_s)
        codes = [process.exitcode for process in ranks]  # None for those that are ended now
    finally:
        _end(ranks)
    return [_answer(case, rank, code, is_late=is_late) for rank, code in enumerate(codes)]


def _serve(case: Case, rank: int) -> None:
    from instrumented_trainers.launch import leave
    from instrumented_trainers.verification import rank as rank_work

    signal.alarm(math.ceil(case.timeout_s) + _ALARM_S)  # whatever happens to the process that started this one
    os.dup2(sys.stderr.fileno(), 1)  # what the user's code prints is no part of the report
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    answer = rank_work.answer(case, rank)
    path = _path(case, rank)
    path.with_suffix(".part").write_text(json.dumps(asdict(answer)), encoding="utf-8")
    path.with_suffix(".part").replace(path)
    leave(0 if answer.error is None else 1)


def _join(ranks: Sequence[BaseProcess], deadline: float) -> bool:
    """Wait until all ranks have ended, or some time after one failed. Return whether the time limit was reached."""
    has_failed = False
    while alive := [process.sentinel for process in ranks if process.exitcode is None]:
        if not has_failed and any(process.exitcode for process in ranks):
            has_failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if (remaining_s := deadline - time.monotonic()) <= 0:
            return not has_failed
        connection.wait(alive, remaining_s)
    return False


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            process.kill()
            process.join()


def _path(case: Case, rank: int) -> Path:
    return Path(case.folder) / f"{case.name}-{rank}.json"


def _answer(case: Case, rank: int, code: int | None, *, is_late: bool) -> dict[str, Any]:
    path = _path(case, rank)
    if path.exists():
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return loaded
    if code is not None:
        return {"error": f"ended with exit code {code}", "has_exited": True}
    return {"error": f"no answer within {case.timeout_s:g} s" if is_late else "ended, as another rank had failed"}
