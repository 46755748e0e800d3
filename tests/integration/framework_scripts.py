"""Scripts of frameworks on the ranks of `tests.support.process_group`, whose processes have imported them. Not a test.

A script finds what torchrun or a shell would give it: its arguments, its environment and no process group.
"""

import functools
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from tests.support import process_group
from tests.support.process_group import Outcome
from tests.support.python_path import REPOSITORY

IMPORTED = "tests.support.frameworks_by_ranks"
_CASE_TIMEOUT_S = 300
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def run_worlds(cases: Mapping[int, Mapping[str, Callable[[], object]]]) -> dict[int, dict[str, Outcome]]:
    """Run cases as `process_group` does, by number of ranks and name."""
    return process_group.run_worlds(cases, timeout_s=400, case_timeout_s=_CASE_TIMEOUT_S, imported=IMPORTED)


def run_example(name: str, *arguments: str, ranks: int = 2) -> None:
    """Run an example as its docstring says: by torchrun on several ranks, by python on one. Fails if it does."""
    run = under_torchrun if ranks > 1 else in_one_process
    example = REPOSITORY / "examples" / f"{name}.py"
    run_worlds({ranks: {name: run(example, *arguments)}})[ranks][name].results()


def in_process_group(script: Path, *arguments: str) -> Callable[[], None]:
    """Return a case that runs the script where a process group exists."""
    return functools.partial(_run_in_process_group, str(script), arguments)


def under_torchrun(script: Path, *arguments: str) -> Callable[[], None]:
    """Return a case that runs the script with the environment and the store that torchrun gives it."""
    return functools.partial(_run_under_torchrun, str(script), arguments)


def in_one_process(script: Path, *arguments: str) -> Callable[[], None]:
    """Return a case on one rank that runs the script as if nothing was distributed."""
    return functools.partial(_run_in_one_process, str(script), arguments)


# In a rank's process -------------------------------------------------------------------------------------------------


def _run_in_process_group(script: str, arguments: tuple[str, ...]) -> None:
    _run(script, arguments, TORCHELASTIC_RUN_ID="cases", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], GROUP_RANK="0")


def _run_under_torchrun(script: str, arguments: tuple[str, ...]) -> None:
    ranks = dist.get_world_size()
    first = dist.get_rank() == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if first else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        _run(script, arguments, TORCHELASTIC_RUN_ID="cases", LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0", **found)
    finally:  # the server lives in the first rank's process, which therefore leaves last; only that rank waits
        store.add("ended", 1)
        if first:
            _wait_for_all(store, ranks)


def _wait_for_all(store: dist.TCPStore, ranks: int) -> None:
    until = time.monotonic() + _CASE_TIMEOUT_S
    while store.add("ended", 0) < ranks and time.monotonic() < until:
        time.sleep(0.05)


def _run_in_one_process(script: str, arguments: tuple[str, ...]) -> None:
    dist.destroy_process_group()
    for name in _OF_RANKS:
        del os.environ[name]
    _run(script, arguments)


def _run(script: str, arguments: tuple[str, ...], **environment: str) -> None:
    _reset_accelerate()
    before, words = dict(os.environ), sys.argv
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.argv = words


def _reset_accelerate() -> None:
    """Forget the state of an earlier script, which otherwise lasts as long as the process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
