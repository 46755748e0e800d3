"""Runs inputs in worker processes, and says which of them tracekit failed on."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli_runner import ROOT

CPU_S = 4
MEMORY_BYTES = 2 << 30
"""Of address space beyond that of an idle process. Resident memory is limited by MAX_GROWTH_MIB."""
MAX_GROWTH_MIB = 512
_KNOWN_CODES = (0, 1, 2, 4)
_OF_TIME = "s of CPU time"


@dataclass(frozen=True)
class Failure:
    """One input that was not handled: an internal error, a signal, too much time or memory, output that is no JSON.

    The reason "contradiction" is a report that contradicts itself (`contradictions`).
    The reason "library" is an exception of the library that is no TracekitError, or events lost without a finding.
    """

    kind: str
    seed: int
    reason: str
    detail: str

    @property
    def is_of_time(self) -> bool:
        """Whether the input took too much CPU time."""
        return self.reason.endswith(_OF_TIME)


@dataclass(frozen=True)
class Outcome:
    """What was wrong with an input, None if nothing was, and the CPU time that drawing and handling it took."""

    failure: Failure | None
    cpu_s: float


class Worker:
    """A process that handles inputs; started again after one that ended it."""

    def __init__(self, folder: Path, cpu_s: int = CPU_S) -> None:
        self._folder, self._cpu_s = folder, cpu_s
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, kind: str, seed: int, *, way: str = "command") -> Outcome:
        """What was wrong with an input that is handled in a way of `worker`, and the CPU time that it took."""
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{way}\t{kind}\t{seed}\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self._process = None
            detail = (self._folder / "stderr").read_text(errors="replace")[-400:]
            return Outcome(Failure(kind, seed, ended(code, self._cpu_s), detail), self._cpu_s)
        result = json.loads(line)
        if result["is_full"]:
            self.close()
        return Outcome(judged(result, self._cpu_s), result["all_cpu_s"])

    def _started(self) -> "subprocess.Popen[str]":
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        variables |= {"XDG_CACHE_HOME": str(self._folder / "cache"), "TMPDIR": str(self._folder)}
        variables |= {"TRACEKIT_CRASH_REPORT": "0"}  # a report takes longer than the limit
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker", str(self._cpu_s), str(MEMORY_BYTES)]
        with (self._folder / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                text=True,
                cwd=ROOT,
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def worker(cpu_s: int = CPU_S) -> Iterator[Worker]:
    """Yield a worker that is ended with the block; an input may take `cpu_s` of CPU time."""
    with tempfile.TemporaryDirectory(prefix="tracekit-fuzz-") as folder:
        made = Worker(Path(folder), cpu_s)
        try:
            yield made
        finally:
            made.close()


def judged(result: dict[str, object], cpu_s: int = CPU_S) -> Failure | None:
    """Return what is wrong with how a command ended, None if nothing is."""
    reasons = {
        "exception": bool(result["raised"]),
        f"exit code {result['code']}": result["code"] not in (*_KNOWN_CODES, None),
        "output is no JSON": not result["is_json"],
        f"more than {cpu_s} {_OF_TIME}": float(str(result["cpu_s"])) > cpu_s,
        f"more than {MAX_GROWTH_MIB} MiB": int(str(result["grown_mib"])) > MAX_GROWTH_MIB,
        "contradiction": bool(result["contradiction"]),
        "library": bool(result["library"]),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is None:
        return None
    return Failure(
        str(result["kind"]),
        int(str(result["seed"])),
        reason,
        str(result["raised"] or result["contradiction"] or result["library"] or result["stderr"]),
    )


def ended(code: int, cpu_s: int = CPU_S) -> str:
    """Return in words what an exit code of a process says."""
    names = {24: f"more than {cpu_s} {_OF_TIME}", 11: "segmentation fault", 6: "abort", 9: "killed"}
    return names.get(-code, f"signal {-code}") if code < 0 else f"the process ended with {code}"
