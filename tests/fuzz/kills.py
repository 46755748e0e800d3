"""Kill commands at any moment, then state whether something durable was lost and whether the next start works.

    python -m tests.fuzz.kills --rounds 1000 --jobs 2
    python -m tests.fuzz.kills --rounds 100 --pairs

Each round copies a folder with a run, a baseline and a history, starts a command on it and kills it: before a random
operation on a file, or after a random CPU time (`tests.fuzz.killed`). Then what was there before must be there, files
that were written must be whole or not there, and the same command must end as if nothing had happened. With `--pairs`,
two commands run in the folder at the same time, and both are killed.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tests.support import cli_runner, kineto_files
from tracekit.regression.history import store

TIMEOUT_S = 300
RUN, OTHER, BASELINE, HISTORY, CACHE, OUT = "run", "other", "baseline.json", "history.duckdb", "cache", "out"


@dataclass(frozen=True)
class Command:
    """A command that writes files; `problem` says what is wrong in a folder after it was killed there, None if nothing.

    Its second argument is the folder in which the command was not killed.
    """

    arguments: tuple[str, ...]
    problem: Callable[[Path, Path], str | None]


@dataclass(frozen=True)
class Round:
    """The kills of a round: commands, their moments, how many were killed before their end, and what was wrong."""

    command: str
    moments: tuple[tuple[str, int], ...]
    killed_count: int
    problem: str | None


class Place:
    """The folder that rounds copy, what each command makes of it, and how long each takes."""

    def __init__(self, folder: Path, names: Sequence[str] | None = None) -> None:
        """Prepare the rounds of these commands; of all by default."""
        self._folder = folder
        self._before = folder / "before"
        self._made: dict[str, Path] = {}
        self.lengths: dict[str, tuple[int, int]] = {}
        self._prepare(COMMANDS if names is None else names)

    def _prepare(self, names: Iterable[str]) -> None:
        for name, starts_us in ((RUN, 100.0), (OTHER, 140.0)):
            for rank in (0, 1):
                trace = kineto_files.trace(rank, start_us=starts_us + rank, steps=6)
                kineto_files.write(self._before / name / f"rank{rank:05}.pt.trace.json", trace)
        for command in (
            ("baseline", "save", OTHER, "--out", BASELINE),
            ("history", "add", OTHER, "--db", HISTORY, "--commit", "a" * 40),
            ("check", OTHER, "--format", "json"),
        ):
            ended = run(self._before, command)
            assert ended.returncode in (0, 1), ended.stderr
        for name in names:
            self._made[name] = shutil.copytree(self._before, self._folder / name.replace(" ", "-"))
            ended = run(self._made[name], COMMANDS[name].arguments, "count", 0)
            assert ended.returncode in (0, 1), ended.stderr
            operations, cpu_us = ended.stderr.split()[-2:]
            self.lengths[name] = int(operations), int(cpu_us)

    def kill(self, names: Sequence[str], seed: int) -> Round:
        """Kill a command, or several that run at the same time, each at a moment that the seed draws."""
        drawn = random.Random(seed)
        moments = [self._moment(name, drawn) for name in names]
        folder = self._folder / f"round-{seed}"
        shutil.copytree(self._before, folder)
        try:
            with ThreadPoolExecutor(len(names)) as threads:
                started = [
                    threads.submit(run, folder, COMMANDS[name].arguments, mode, number)
                    for name, (mode, number) in zip(names, moments, strict=True)
                ]
                processes = [process.result() for process in started]
            problems = [COMMANDS[name].problem(folder, self._made[name]) for name in dict.fromkeys(names)]
            problems += [
                f"{name} ended with {process.returncode}: {process.stderr[-300:]}"
                for name, process in zip(names, processes, strict=True)
                if process.returncode > 1
            ]
            killed_count = sum(process.returncode < 0 for process in processes)
            return Round(" + ".join(names), tuple(moments), killed_count, next(filter(None, problems), None))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _moment(self, name: str, drawn: random.Random) -> tuple[str, int]:
        operations, cpu_us = self.lengths[name]
        mode = drawn.choice(("operation", "cpu"))
        return mode, drawn.randrange(operations) if mode == "operation" else drawn.randrange(1, cpu_us)


def run(
    folder: Path, command: Sequence[str], mode: str | None = None, number: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder with a cache of its own; in a process that is killed as `mode` and `number` say."""
    paths = [str(folder / part) if part in _PATHS else part for part in command]
    variables = {"TRACEKIT_CACHE_DIR": str(folder / CACHE)}
    if mode is None:
        return cli_runner.tracekit(*paths, cwd=folder, **variables)
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.killed", str(folder), mode, str(number), *paths],
        cwd=folder,
        env=cli_runner.environment(**variables, POLARS_MAX_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


_PATHS = (RUN, OTHER, BASELINE, HISTORY, OUT)


# What must be true after a kill ---------------------------------------------------------------------------------------


def _checks_as_before(folder: Path, made: Path) -> str | None:
    """Return what differs in the report of a run that is read through the cache; None if nothing."""
    ended = run(folder, ("check", RUN, "--format", "json"))
    if ended.returncode not in (0, 1):
        return f"check ends with {ended.returncode}: {ended.stderr[-300:]}"
    is_same = ended.stdout.replace(str(folder), "FOLDER") == _report(made)
    return None if is_same else "check reports something else"


@functools.cache
def _report(made: Path) -> str:
    return run(made, ("check", RUN, "--format", "json")).stdout.replace(str(made), "FOLDER")


def _baseline_is_whole(folder: Path, made: Path) -> str | None:
    old, new = (folder.parent / "before" / BASELINE).read_bytes(), (made / BASELINE).read_bytes()
    left = (folder / BASELINE).read_bytes()
    if left != old and _without_times(left) != _without_times(new):
        return f"the baseline is neither the old nor the new one: {len(left)} bytes"
    ended = run(folder, COMMANDS["baseline save"].arguments)
    return None if ended.returncode == 0 else f"baseline save ends with {ended.returncode}: {ended.stderr[-300:]}"


def _without_times(baseline: bytes) -> object:
    try:
        return {name: value for name, value in json.loads(baseline).items() if name not in ("created", "created_at")}
    except ValueError:
        return None


def _history_is_whole(folder: Path, made: Path) -> str | None:
    old, new = (store.read(where / HISTORY) for where in (folder.parent / "before", made))
    left = store.read(folder / HISTORY)
    if not any(_equal(left, each) for each in (old, new)):
        return f"the history is neither the old nor the new one: {left.runs.height} runs"
    ended = run(folder, COMMANDS["history add"].arguments)
    if ended.returncode != 0:
        return f"history add ends with {ended.returncode}: {ended.stderr[-300:]}"
    return None if _equal(store.read(folder / HISTORY), new) else "the history lacks what was added"


def _equal(one: store.History, other: store.History) -> bool:
    def rows(table: pl.DataFrame) -> pl.DataFrame:
        # A run has its path and when it was added; each round has another folder.
        plain = table.drop([name for name in ("run", "at_ns", "added_ns", "digest") if name in table.columns])
        return plain.sort(plain.columns) if plain.columns else plain

    pairs = ((getattr(one, name), getattr(other, name)) for name in ("runs", "metrics", "findings"))
    return all(rows(a).equals(rows(b), null_equal=True) for a, b in pairs)


def _copy_is_whole(folder: Path, made: Path) -> str | None:
    """Return what is wrong with the folder that a command writes at once."""
    if (folder / OUT).exists():
        return None if _contents(folder / OUT) == _contents(made / OUT) else "the copy is not whole"
    ended = run(folder, COMMANDS["scrub"].arguments)
    if ended.returncode != 0:
        return f"scrub ends with {ended.returncode}: {ended.stderr[-300:]}"
    return None if _contents(folder / OUT) == _contents(made / OUT) else "the second copy is not whole"


def _files_are_whole(folder: Path, made: Path) -> str | None:
    """Return what is wrong with the files that a command writes one by one."""
    whole = _contents(made / OUT)
    left = _contents(folder / OUT) if (folder / OUT).exists() else {}
    damaged = [name for name, content in left.items() if not name.endswith(".partial") and whole.get(name) != content]
    return f"{damaged[0]} is not whole" if damaged else None


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _exported(folder: Path, made: Path) -> str | None:
    left, whole = folder / OUT, made / OUT
    return None if not left.exists() or left.read_bytes() == whole.read_bytes() else "the export is not whole"


COMMANDS = {
    "check": Command(("check", RUN, "--format", "json"), _checks_as_before),
    "baseline save": Command(("baseline", "save", RUN, "--out", BASELINE), _baseline_is_whole),
    "history add": Command(("history", "add", RUN, "--db", HISTORY, "--commit", "b" * 40), _history_is_whole),
    "scrub": Command(("scrub", RUN, OUT), _copy_is_whole),
    "cache clear": Command(("cache", "clear"), _checks_as_before),
    "simulate": Command(
        ("simulate", "--gpus", "2", "--layers", "1", "--steps", "2", "--model", "125m", "--out", OUT), _files_are_whole
    ),
    "export": Command(("export", RUN, "--out", OUT), _exported),
}

PAIRS = (
    ("history add", "history add"),
    ("baseline save", "baseline save"),
    ("check", "check"),
    ("check", "cache clear"),
    ("history add", "baseline save"),
    ("scrub", "check"),
    ("export", "export"),
)
"""Commands that write to one file, or to one cache."""


def main() -> int:
    """Run the command; return 1 if something was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=70)
    parser.add_argument("--seconds", type=float, default=1e9, help="or stop after so many")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at a time (default: 2)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() // 10**9, help="of the first round (default: the time)"
    )
    parser.add_argument("--command", action="append", choices=COMMANDS, help="kill only this one; repeatable")
    parser.add_argument("--pairs", action="store_true", help="two commands at the same time")
    options = parser.parse_args()
    commands = PAIRS if options.pairs else [(name,) for name in options.command or COMMANDS]
    deadline = time.monotonic() + options.seconds
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="tracekit-kills-") as folder,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as processes,
    ):
        place = Place(Path(folder))
        seeds = range(options.seed, options.seed + options.rounds)
        rounds = []
        for done in processes.map(place.kill, itertools.islice(itertools.cycle(commands), options.rounds), seeds):
            rounds.append(done)
            if done.problem:
                print(f"{done.command}, {done.moments}: {done.problem}", flush=True)
            if time.monotonic() > deadline:
                processes.shutdown(cancel_futures=True)
                break
    print(_table(rounds))
    return any(each.problem for each in rounds)


def _table(rounds: Sequence[Round]) -> str:
    counts, killed, wrong = Counter[str](), Counter[str](), Counter[str]()
    for done in rounds:
        counts[done.command] += 1
        killed[done.command] += done.killed_count
        wrong[done.command] += done.problem is not None
    lines = ["| command | rounds | killed | lost or broken |", "|---|---|---|---|"]
    lines += [f"| {name} | {count} | {killed[name]} | {wrong[name]} |" for name, count in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
