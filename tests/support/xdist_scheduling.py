"""Distribution of tests over pytest-xdist's workers: file by file, with some files together in one worker.

Browser tests share one dashboard server, which each worker that runs any of them would have to start. They mostly wait,
so other workers have the machine meanwhile. Ranks of frameworks are forked from one process that has imported them, and
those of other trainings from one that has imported torch and the trainers, which takes 5 s of CPU time.
"""

import itertools
import os
from typing import TypeVar

from xdist.scheduler import LoadFileScheduling

ONE_WORKER = {
    "browser": ("tests/browser/",),
    "frameworks": (
        "tests/integration/test_yafsdp_frameworks.py",
        "tests/integration/test_adapter_accelerate.py",
        "tests/integration/test_adapter_huggingface.py",
        "tests/integration/test_adapter_lightning.py",
    ),
    "ranks": (
        "tests/integration/test_pipelines.py",
        "tests/integration/test_strategies.py",
        "tests/integration/test_yafsdp_",
        "tests/integration/test_hybrid_",
        "tests/integration/test_checkpoint_",
        "tests/integration/test_trainers_",
        "tests/integration/test_watched_saves.py",
        "tests/integration/test_recorded_pipelines.py",
        "tests/integration/test_sends.py",
        "tests/integration/test_ranks.py",
    ),
}
"""How folders and files begin that one worker runs, by a name for them; the first name counts."""
LONG_FILES = (
    "tests/integration/test_record.py",
    "tests/integration/test_hostile_inputs.py",
    "tests/integration/test_stored_answers.py",
    "tests/integration/test_verify_training.py",
    "tests/integration/test_missing_metadata.py",
    "tests/integration/test_odd_values.py",
    "tests/integration/test_record_to_url.py",
    "tests/integration/test_remote_runs.py",
    "tests/integration/test_pytest_plugin.py",
    "tests/integration/test_interruptions.py",
    "tests/integration/test_executors.py",
    "tests/integration/test_cli.py",
    "tests/integration/test_hostile_folder.py",
    "tests/integration/test_nsight.py",
    "tests/unit/dashboard/test_dashboard.py",
    "tests/integration/test_hostile_names.py",
    "tests/integration/test_whatif.py",
    "tests/integration/test_trainers.py",
    "tests/unit/rules/test_registry.py",
    "tests/integration/test_hang_watch.py",
)
"""Files with most CPU time, 15 s or more, in that order: one that began last would leave the other workers idle."""
_Test = TypeVar("_Test")
_MAX_WORKERS = 4


def worker_count() -> int:
    """Return the number of cores plus one: many tests wait for ranks, a browser or a command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores + 1)


def long_files_first(tests: list[tuple[str, _Test]]) -> list[_Test]:
    """Return tests, given with their ids, in order, but those of one worker and then of long files before all others.

    >>> long_files_first([("tests/a.py::test_x", 1), (f"{LONG_FILES[1]}::test_y", 2), ("tests/b.py::test_z", 3)])
    [2, 1, 3]
    """
    first = (*itertools.chain(*ONE_WORKER.values()), *LONG_FILES)

    def place(test: tuple[str, _Test]) -> int:
        return next((place for place, start in enumerate(first) if test[0].startswith(start)), len(first))

    return [test for _, test in sorted(tests, key=place)]


class ScheduleByFile(LoadFileScheduling):
    """Assigns test files to workers one at a time, and those of `ONE_WORKER` together to the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        together = (name for name, starts in ONE_WORKER.items() if nodeid.startswith(starts))
        return next(together, super()._split_scope(nodeid))
