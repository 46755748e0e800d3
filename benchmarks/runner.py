"""Runs each subject in a fresh process, in rounds that interleave the subjects, so that a busy machine troubles all."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.cases import ROOT, Case

COMMAND, COMMAND_AGAIN = "tracekit summary", "tracekit summary again"
AGAIN = "tracekit again"
FLOORS = ("simdjson", "orjson", "msgspec", "json")
_COMMANDS: Mapping[str, tuple[str, ...]] = {COMMAND: ("--no-cache",), COMMAND_AGAIN: ()}
_SLOW = ("hta", "hta load", "json")
_TIMEOUT_S = 3600
_MIB = 1 << 20


class FailedError(Exception):
    """A subject gave no result; the message is its last word."""


@dataclass(frozen=True)
class Sample:
    """What one process took: the work by itself, without imports (not known of a command), and the whole process."""

    work_wall_s: float | None
    work_cpu_s: float | None
    whole_wall_s: float
    whole_cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Result:
    """The samples of one case: for each round, by subject. A subject that failed has words instead."""

    case: Case
    size_bytes: int
    rounds: tuple[Mapping[str, Sample], ...]
    failures: Mapping[str, str]

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return what was measured, in order."""
        return tuple(dict.fromkeys(name for taken in self.rounds for name in taken))

    def median(self, subject: str) -> Sample:
        """Return the median over rounds of each quantity."""
        taken = [samples[subject] for samples in self.rounds if subject in samples]
        wall_s = [s.work_wall_s for s in taken if s.work_wall_s is not None]
        cpu_s = [s.work_cpu_s for s in taken if s.work_cpu_s is not None]
        return Sample(
            work_wall_s=median(wall_s) if wall_s else None,
            work_cpu_s=median(cpu_s) if cpu_s else None,
            whole_wall_s=median(s.whole_wall_s for s in taken),
            whole_cpu_s=median(s.whole_cpu_s for s in taken),
            peak_mib=median(s.peak_mib for s in taken),
        )

    def ratios(self, over: str, under: str, quantity: str) -> list[float]:
        """Return a quantity of `over` divided by that of `under`, of each round that has both."""
        both = [taken for taken in self.rounds if over in taken and under in taken]
        return [getattr(taken[over], quantity) / getattr(taken[under], quantity) for taken in both]


def measure(
    case: Case,
    folder: Path,
    *,
    size_bytes: int,
    rounds: int,
    work: Path,
    only: tuple[str, ...],
    say: Callable[[str], None],
) -> Result:
    """Measure on one case every subject that can be had, or `only` some, `rounds` times over."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRACEKIT_CACHE_DIR": str(work / "cache")}
    wanted = [subject for subject in subjects(case) if not only or subject in only]
    failures: dict[str, str] = {}
    if {AGAIN, COMMAND_AGAIN} & set(wanted):
        _run(AGAIN, folder, environment)  # fills the cache
    taken: list[dict[str, Sample]] = []
    for turn in range(rounds):
        taken.append({})
        for subject in wanted:
            if subject in failures or (turn and case.is_large and subject in _SLOW):
                continue
            say(f"{case.name}: {subject}, round {turn + 1} of {rounds}")
            try:
                taken[-1][subject] = _run(subject, folder, environment)
            except FailedError as error:
                failures[subject] = str(error)
    return Result(case, size_bytes, tuple(taken), failures)


def subjects(case: Case) -> tuple[str, ...]:
    """Return the names of what is measured on a case here: what is not installed is left out."""
    floors = tuple(name for name in FLOORS if find_spec(name))
    rival = ("hta" if case.has_device else "hta load",) if find_spec("hta") else ()
    return ("tracekit", COMMAND, *rival, AGAIN, COMMAND_AGAIN, *floors)


def _run(subject: str, folder: Path, environment: Mapping[str, str]) -> Sample:
    if subject in _COMMANDS:
        command = ["-m", "tracekit", "summary", str(folder), "--format", "json", *_COMMANDS[subject]]
    else:
        command = ["-m", "benchmarks.measure", subject, str(folder)]
    began_s = time.perf_counter()
    out, error, status, usage = _finished([sys.executable, *command], environment)
    whole_wall_s = time.perf_counter() - began_s
    if status:
        last = (error.strip().splitlines() or ["no word on stderr"])[-1]
        raise FailedError(f"exit code {status}: {last[:200]}")
    told = {} if subject in _COMMANDS else json.loads(out.splitlines()[-1])
    return Sample(
        work_wall_s=told.get("wall_s"),
        work_cpu_s=told.get("cpu_s"),
        whole_wall_s=whole_wall_s,
        whole_cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mib=usage.ru_maxrss * 1024 / _MIB,
    )


def _finished(command: list[str], environment: Mapping[str, str]) -> tuple[str, str, int, resource.struct_rusage]:
    """Run a command to its end; return what it wrote, its exit code, and what it and its children used."""
    with (
        subprocess.Popen(
            ["timeout", str(_TIMEOUT_S), *command],
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        assert process.stdout
        assert process.stderr
        error = pool.submit(process.stderr.read)
        out = process.stdout.read()
        # Of the ways to wait only this one tells what a single process used.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return out, error.result(), process.returncode, usage
