"""Runs each subject in a fresh process. Rounds interleave the subjects, so that other load affects all of them."""

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

COMMAND, COMMAND_CACHED = "tracekit summary", "tracekit summary cached"
CACHED = "tracekit cached"
FLOORS = ("simdjson", "orjson", "msgspec", "json")
_COMMANDS: Mapping[str, tuple[str, ...]] = {COMMAND: ("--no-cache",), COMMAND_CACHED: ()}
_SLOW = ("hta", "hta load", "json")
_TIMEOUT_S = 3600
_MIB = 1 << 20


class SubjectFailedError(Exception):
    """A subject failed; the message is its last line on stderr."""


@dataclass(frozen=True)
class Sample:
    """Times of one process: the work without imports (unknown for a command), and the whole process."""

    work_wall_s: float | None
    work_cpu_s: float | None
    whole_wall_s: float
    whole_cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Result:
    """The samples of one case, per round and subject; a subject that failed has an error instead."""

    case: Case
    size_bytes: int
    rounds: tuple[Mapping[str, Sample], ...]
    failures: Mapping[str, str]

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return the measured subjects, in order."""
        return tuple(dict.fromkeys(name for samples in self.rounds for name in samples))

    def median(self, subject: str) -> Sample:
        """Return the median over rounds of each quantity."""
        of_subject = [samples[subject] for samples in self.rounds if subject in samples]
        wall_s = [s.work_wall_s for s in of_subject if s.work_wall_s is not None]
        cpu_s = [s.work_cpu_s for s in of_subject if s.work_cpu_s is not None]
        return Sample(
            work_wall_s=median(wall_s) if wall_s else None,
            work_cpu_s=median(cpu_s) if cpu_s else None,
            whole_wall_s=median(s.whole_wall_s for s in of_subject),
            whole_cpu_s=median(s.whole_cpu_s for s in of_subject),
            peak_mib=median(s.peak_mib for s in of_subject),
        )

    def ratios(self, over: str, under: str, quantity: str) -> list[float]:
        """Return a quantity of `over` divided by that of `under`, of each round that has both."""
        both = [samples for samples in self.rounds if over in samples and under in samples]
        return [getattr(samples[over], quantity) / getattr(samples[under], quantity) for samples in both]


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
    """Measure every available subject (or those in `only`) on one case, `rounds` times."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRACEKIT_CACHE_DIR": str(work / "cache")}
    selected = [subject for subject in subjects(case) if not only or subject in only]
    failures: dict[str, str] = {}
    if {CACHED, COMMAND_CACHED} & set(selected):
        _run(CACHED, folder, environment)  # fills the cache
    measured: list[dict[str, Sample]] = []
    for turn in range(rounds):
        measured.append({})
        for subject in selected:
            if subject in failures or (turn and case.is_large and subject in _SLOW):
                continue
            say(f"{case.name}: {subject}, round {turn + 1} of {rounds}")
            try:
                measured[-1][subject] = _run(subject, folder, environment)
            except SubjectFailedError as error:
                failures[subject] = str(error)
    return Result(case, size_bytes, tuple(measured), failures)


def subjects(case: Case) -> tuple[str, ...]:
    """Return the subjects available for a case: those that are installed."""
    floors = tuple(name for name in FLOORS if find_spec(name))
    rival = ("hta" if case.has_device else "hta load",) if find_spec("hta") else ()
    return ("tracekit", COMMAND, *rival, CACHED, COMMAND_CACHED, *floors)


def _run(subject: str, folder: Path, environment: Mapping[str, str]) -> Sample:
    if subject in _COMMANDS:
        command = ["-m", "tracekit", "summary", str(folder), "--format", "json", *_COMMANDS[subject]]
    else:
        command = ["-m", "benchmarks.measure", subject, str(folder)]
    began_s = time.perf_counter()
    out, error, status, usage = run_process([sys.executable, *command], environment)
    whole_wall_s = time.perf_counter() - began_s
    if status:
        last = (error.strip().splitlines() or ["nothing on stderr"])[-1]
        raise SubjectFailedError(f"exit code {status}: {last[:200]}")
    times = {} if subject in _COMMANDS else json.loads(out.splitlines()[-1])
    return Sample(
        work_wall_s=times.get("wall_s"),
        work_cpu_s=times.get("cpu_s"),
        whole_wall_s=whole_wall_s,
        whole_cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mib=usage.ru_maxrss * 1024 / _MIB,
    )


def run_process(command: list[str], environment: Mapping[str, str]) -> tuple[str, str, int, resource.struct_rusage]:
    """Run a command; return its output, exit code, and the resources that it and its children used."""
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
        # wait4 is the only way to learn the resources of a single process.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return out, error.result(), process.returncode, usage
