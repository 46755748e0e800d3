"""Kill a recorded training at any moment, a rank or its launcher, and state whether something recorded was lost.

    python -m tests.fuzz.record_kills --rounds 100
    python -m tests.fuzz.record_kills --rounds 100 --two

Each round records a training window after window, and kills one of its processes by SIGKILL: some time after a random
change in the folder of the run, so that files are being written in many rounds. Traces that were whole before must be
whole afterwards, logs must still have their lines, and `check` must read the run, or say that it has no trace. With
`--two`, two recordings that name the same folder are killed at once, and a third must work in it.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import cli_runner
from tests.support.python_path import PYTHON_PATH

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
SINGLE = (sys.executable, str(SCRIPTS / "plain_single.py"), "long")
OF_20_STEPS = SINGLE[:2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OF_TWO_RANKS = (*TORCHRUN, str(SCRIPTS / "plain_ddp.py"), "--steps", "100000", "--save-at", "0")
RANK, RECORDER, LAUNCHER = VICTIMS = ("rank", "recorder", "launcher")
"""A process that trains; `tracekit record`; torchrun, which starts the ranks."""
_MAX_CHANGES = 24
_MAX_DELAY_S = 0.05
_TIMEOUT_S = 480.0
_MOST_S = 40
"""A training whose recorder was killed goes on for so long, at most."""


@dataclass(frozen=True)
class Round:
    """One kill: which process, after how many changes in the folder of the run, and what was wrong afterwards."""

    victim: str
    ranks: int
    changes: int
    traces: int
    """Whole traces before the kill."""
    problem: str | None


def kill(seed: int, *, ranks: int | None = None) -> Round:
    """Record a training and kill it at the moment that the seed draws."""
    drawn = random.Random(seed)
    count = drawn.choice((1, 1, 2)) if ranks is None else ranks
    victim = drawn.choice(VICTIMS if count > 1 else VICTIMS[:2])
    changes, delay_s = drawn.randrange(1, _MAX_CHANGES), drawn.random() * _MAX_DELAY_S
    with tempfile.TemporaryDirectory(prefix="tracekit-record-kill-") as folder:
        run = Path(folder) / "run"
        process = _record(Path(folder), SINGLE if count == 1 else OF_TWO_RANKS)
        try:
            _wait_for_changes(run, changes, process)
            time.sleep(delay_s)
            before = _contents(run)
            _kill(victim, process.pid)
            # A rank or the launcher ends the others; without the recorder the training ends by itself.
            _, errors = process.communicate(timeout=_TIMEOUT_S)
            _wait_for_end(run)
        finally:
            _end(process)
        problem = _lost(before, run) or _unreadable(run, before)
        if problem is None and victim != RECORDER and ("Traceback" in errors and "tracekit/" in errors):
            problem = f"the recorder failed: {errors[-300:]}"
        return Round(victim, count, changes, len(_traces(before)), problem)


def kill_two(seed: int) -> Round:
    """Record two trainings into one folder at the same time, kill a process of each, and record a third."""
    drawn = random.Random(seed)
    victims = [drawn.choice((RANK, RECORDER)) for _ in range(2)]
    changes, delay_s = drawn.randrange(1, 2 * _MAX_CHANGES), drawn.random() * _MAX_DELAY_S
    with tempfile.TemporaryDirectory(prefix="tracekit-record-kill-") as name:
        folder, runs = Path(name), Path(name) / "runs"
        processes = [_record(folder, SINGLE, out="runs/run", most_s=_MOST_S) for _ in victims]
        try:
            _wait_for_changes(runs, changes, processes[0])
            time.sleep(delay_s)
            before = _contents(runs)
            for victim, process in zip(victims, processes, strict=True):
                _kill(victim, process.pid)
            errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in processes]
            _wait_for_end(runs)
        finally:
            for process in processes:
                _end(process)
        problem = _lost(before, runs)
        for run in sorted(runs.iterdir()) if runs.exists() else ():
            in_run = {path: content for path, content in before.items() if path.startswith(f"{run.name}/")}
            problem = problem or _unreadable(run, in_run)
        left = _contents(runs)
        third = _record(folder, OF_20_STEPS, out="runs/run")
        try:
            third_errors = third.communicate(timeout=_TIMEOUT_S)[1]
        finally:
            _end(third)
        if problem is None and (third.returncode or len(_traces(_contents(runs))) <= len(_traces(left))):
            problem = f"the next recording ends with {third.returncode}: {third_errors[-300:]}"
        problem = problem or _lost(left, runs)
        if problem is None and any("Traceback" in text and "tracekit/" in text for text in errors):
            problem = f"a recorder failed: {errors}"
        return Round(" + ".join(victims), 2, changes, len(_traces(before)), problem)


# The training ---------------------------------------------------------------------------------------------------------


def _record(folder: Path, training: Sequence[str], *, out: str = "run", most_s: int = 400) -> "subprocess.Popen[str]":
    options = ("--quiet", "--no-memory", "--steps", "3:5", "--warmup", "1", "--every", "6", "--out", out)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tracekit", "record", *options, "--scratch", str(scratch), "--", *training],
        cwd=folder,
        env=cli_runner.environment(PYTHONPATH=PYTHON_PATH, SECONDS_AT_MOST=str(most_s)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for_changes(run: Path, changes: int, process: "subprocess.Popen[str]") -> None:
    """Wait until files have appeared, disappeared or grown in the folder of the run so many times."""
    deadline, seen, last = time.monotonic() + _TIMEOUT_S, 0, None
    while seen < changes and process.poll() is None and time.monotonic() < deadline:
        now = _listing(run)
        seen, last = seen + (now != last), now
        time.sleep(0.002)


def _listing(run: Path) -> list[str]:
    return sorted(str(path) for path in run.rglob("*")) if run.exists() else []


def _kill(victim: str, recorder: int) -> None:
    """Kill the recorder, its child or a process below that; the recorder if the training has not begun."""
    launched = [child for child in _children(recorder) if _command(child) != _command(recorder)]
    below = [child for parent in launched for child in _children(parent)]
    chosen = {RECORDER: [recorder], LAUNCHER: launched, RANK: below or launched}[victim] or [recorder]
    with contextlib.suppress(ProcessLookupError):
        os.kill(chosen[-1], signal.SIGKILL)


def _command(pid: int) -> bytes:
    """Command line of a process; the recorder's fork that receives the signals of its group has the recorder's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    try:
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return []


def _wait_for_end(run: Path) -> None:
    """Wait until nothing changes in the folder of the run: a training that lost its recorder ends a little later."""
    still, last = 0, _sizes(run)
    while still < 5:
        time.sleep(0.2)
        now = _sizes(run)
        still, last = (still + 1 if now == last else 0), now


def _sizes(run: Path) -> dict[str, int]:
    found = {}
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):
            found[str(path)] = path.stat().st_size
    return found


def _end(process: "subprocess.Popen[str]") -> None:
    """End what is left of the session that was started for the round."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# What must be true after a kill ---------------------------------------------------------------------------------------


def _contents(run: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(run.rglob("*")) if run.exists() else []:
        with contextlib.suppress(OSError):  # renamed meanwhile
            if path.is_file():
                found[str(path.relative_to(run))] = path.read_bytes()
    return found


def _traces(contents: dict[str, bytes]) -> list[str]:
    return [name for name in contents if name.endswith(".pt.trace.json.gz")]


def _lost(before: dict[str, bytes], run: Path) -> str | None:
    """Return what of a run has been lost or damaged; None if nothing."""
    after = _contents(run)
    for name, content in before.items():
        if name in _traces(before) or name.endswith((".jsonl", "run.json")):
            left = after.get(name)
            if left is None:
                return f"{name} is gone"
            whole = content[: content.rfind(b"\n") + 1] if name.endswith(".jsonl") else b""
            if not left.startswith(whole):
                return f"{name} lost lines"
    for name in _traces(after):
        try:
            json.loads(gzip.decompress(after[name]))
        except (OSError, EOFError, ValueError) as error:
            return f"{name} is not whole: {error}"
    return None


def _unreadable(run: Path, before: dict[str, bytes]) -> str | None:
    """Return what is wrong with a report on the run; None if nothing."""
    if not run.exists():
        return "the run is gone" if before else None
    ended = cli_runner.in_a_process("check", run, "--format", "json", "--no-cache")
    if ended.returncode in (0, 1):
        return None
    is_empty = not _traces(_contents(run)) and ended.returncode == 2 and "internal" not in ended.stderr
    return None if is_empty else f"check ends with {ended.returncode}: {ended.stderr[-300:]}"


def main() -> int:
    """Run the command; return 1 if something was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.record_kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9, help="of the first round")
    parser.add_argument("--two", action="store_true", help="two recordings into one folder")
    options = parser.parse_args()
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        rounds.append(done := kill_two(seed) if options.two else kill(seed))
        print(f"seed {seed}: {done}", flush=True) if done.problem else None
    counts = Counter((each.victim, each.ranks) for each in rounds)
    wrong = Counter((each.victim, each.ranks) for each in rounds if each.problem)
    whole = Counter((each.victim, each.ranks) for each in rounds if each.traces)
    print("| killed | ranks | rounds | with whole traces before | lost or broken |\n|---|---|---|---|---|")
    for key in sorted(counts):
        print(f"| {key[0]} | {key[1]} | {counts[key]} | {whole[key]} | {wrong[key]} |")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
