"""Runs each subject in a fresh process, interleaved with the others, and takes medians."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.cases import ROOT, Case

COMMAND = "tracekit summary"
FLOORS = {"json": "json", "orjson": "orjson", "msgspec": "msgspec", "simdjson": "simdjson"}
_SLOW = ("hta", "hta load", "json")
_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Sample:
    """What one process took: the work itself (imports excluded; None where it is a command), and all of it."""

    work_wall_s: float
    work_cpu_s: float
    whole_wall_s: float
    whole_cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Result:
    """Medians by subject, for one case. A subject that failed has words instead."""

    case: Case
    size_bytes: int
    medians: Mapping[str, Sample]
    failures: Mapping[str, str]


def measure(
    case: Case, folder: Path, *, size_bytes: int, repeat: int, work: Path, say: Callable[[str], None]
) -> Result:
    """Measure every subject that can be had on one case, `repeat` times over."""
    samples: dict[str, list[Sample]] = {}
    failures: dict[str, str] = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRACEKIT_CACHE_DIR": str(work / "cache")}
    _run("tracekit again", folder, environment)  # fills the cache
    for turn in range(repeat):
        for subject in subjects(case):
            if subject in failures or (turn and case.is_large and subject in _SLOW):
                continue
            say(f"{case.name}: {subject}, {turn + 1} of {repeat}")
            try:
                samples.setdefault(subject, []).append(_run(subject, folder, environment))
            except (subprocess.SubprocessError, ValueError) as error:
                failures[subject] = str(error)
    return Result(case, size_bytes, {name: _median(taken) for name, taken in samples.items() if taken}, failures)


def subjects(case: Case) -> tuple[str, ...]:
    """Return the names of what is measured on a case here: what is not installed is left out."""
    floors = tuple(name for name, module in FLOORS.items() if find_spec(module))
    rival = ("hta" if case.has_device else "hta load",) if find_spec("hta") else ()
    return ("tracekit", COMMAND, "tracekit again", *rival, *floors)


def _run(subject: str, folder: Path, environment: Mapping[str, str]) -> Sample:
    if subject == COMMAND:
        command = [sys.executable, "-m", "tracekit", "summary", str(folder), "--no-cache", "--format", "json"]
    else:
        command = [sys.executable, "-m", "benchmarks.measure", subject, str(folder)]
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stderr
    # wait4 gives this one process's own peak memory and CPU time, with those of its children.
    out, error = process.communicate(timeout=_TIMEOUT_S) if False else _read(process)
    _, status, usage = os.wait4(process.pid, 0)
    whole_wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (error.strip().splitlines() or ["no word on stderr"])[-1]
        raise ValueError(f"exit code {process.returncode}: {last[:200]}")
    told = json.loads(out.splitlines()[-1]) if subject != COMMAND else {"wall_s": 0.0, "cpu_s": 0.0}
    return Sample(told["wall_s"], told["cpu_s"], whole_wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
