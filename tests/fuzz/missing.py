"""Recordings without each of their parts, and without two of them: what crashes, and what changes without a reason.

Each part once in each family of recordings (`tests.support.missing_parts`); then pairs by a seed, half of them of
parts that are read into the same tables.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.support import judged_parts, missing_parts
from tests.support.judged_parts import Said
from tests.support.missing_parts import Part

_MOST_SLICES, _MOST_RANKS = 800, 2
"""Of a trace, so that all facts and rules take less than a second."""
Case = tuple[Path, tuple[Part, ...]]


def main() -> int:
    """Run the command; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.missing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--pairs", type=int, default=3000, help="how many pairs (default: 3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs and the sample (default: 0)")
    parser.add_argument("--pairs-only", action="store_true", help="pairs of parts that the log says are read")
    parser.add_argument(
        "--sample", type=int, help="instead: so many random changes over all recordings, half of them pairs"
    )
    parser.add_argument("--of", default="", help="only recordings and parts whose names contain this")
    parser.add_argument("--log", type=Path, help="a line of JSON per case; cases that it has are not tried again")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    tried = Log(options.log)
    if options.sample:
        for case in _sample(options.sample, random.Random(options.seed), options.of):
            if time.monotonic() > deadline:
                break
            tried.add(case)
        print(tried)
        return bool(tried.problems)
    singles = _singles(options.of)
    for case in [] if options.pairs_only else singles:
        if time.monotonic() > deadline:
            break
        tried.add(case)
    for case in _pairs(singles, tried, options.pairs, random.Random(options.seed)):
        if time.monotonic() > deadline:
            break
        tried.add(case)
    print(tried)
    return bool(tried.problems)


class Log:
    """What came of each case."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["case"]: row for row in map(json.loads, lines)}

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, by case."""
        return {name: row["problem"] for name, row in self.rows.items() if row["problem"]}

    def add(self, case: Case) -> None:
        """Judge a case, unless the log has it."""
        name = title(case)
        if name in self.rows:
            return
        problem, tables = judge(case)
        self.rows[name] = {"case": name, "parts": len(case[1]), "problem": problem, "tables": tables}
        if problem:
            print(f"{name}: {problem}", flush=True)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(self.rows[name]) + "\n")

    def __str__(self) -> str:
        counts = Counter((row["parts"], bool(row["tables"]), bool(row["problem"])) for row in self.rows.values())
        rows = [
            f"| {parts} | {sum(n for key, n in counts.items() if key[0] == parts):,} "
            f"| {sum(n for key, n in counts.items() if key[:2] == (parts, True)):,} "
            f"| {sum(n for key, n in counts.items() if key[0] == parts and key[2]):,} |"
            for parts in (1, 2)
        ]
        return "\n".join(
            ("| changed parts | recordings | of them read otherwise | wrong |", "|---|---:|---:|---:|", *rows)
        )


def title(case: Case) -> str:
    """Name of a case."""
    folder, changes = case
    return f"{folder.parent.name}/{folder.name}: {' and '.join(map(str, changes))}"


def judge(case: Case) -> tuple[str, list[str]]:
    """What is wrong with what is said of a case, and the tables that are others than those of the whole recording."""
    folder, changes = case
    whole = _said(folder, ())
    without = _said(folder, changes)
    problem = judged_parts.problem(whole, without, needs_reason=missing_parts.needs_reason(changes))
    return problem, sorted({name for name, _ in without.tables ^ whole.tables} or _said_otherwise(whole, without))


def _said_otherwise(whole: Said, without: Said) -> set[str]:
    alike = (whole.refusal, whole.judgement) == (without.refusal, without.judgement)
    return set() if alike else {"report"}


@lru_cache(maxsize=4)
def _files(folder: Path) -> dict[str, Any]:
    return missing_parts.read(folder, _MOST_SLICES, _MOST_RANKS)


@lru_cache(maxsize=4)
def _whole(folder: Path) -> Said:
    return _judged(folder, ())


def _said(folder: Path, changes: tuple[Part, ...]) -> Said:
    return _judged(folder, changes) if changes else _whole(folder)


def _judged(folder: Path, changes: tuple[Part, ...]) -> Said:
    scratch = Path(tempfile.mkdtemp(prefix="missing-"))
    try:
        return judged_parts.said(missing_parts.changed(_files(folder), changes), scratch / "run")
    finally:
        shutil.rmtree(scratch)


def parts_of(folder: Path) -> list[Part]:
    """Every change of a recording, cut as it is judged."""
    return missing_parts.parts(_files(folder))


def _singles(pattern: str) -> list[Case]:
    """Each part once in each family: first all parts in one family, then in a second one, and so on; names last."""
    of_folder = {folder: parts_of(folder) for folder in missing_parts.folders()}
    before = Counter[Part]()
    cases = []
    for folder, part in missing_parts.of_each_family(of_folder):
        cases.append((part.what == "name", before[part], part.what == "key", str(folder), folder, part))
        before[part] += 1
    return [case for *_, folder, part in sorted(cases) if pattern in title(case := (folder, (part,)))]


def _sample(count: int, source: random.Random, pattern: str) -> Iterator[Case]:
    """Random changes: each family of recordings in turn, one of its recordings, one or two of its parts."""
    families: defaultdict[str, list[Path]] = defaultdict(list)
    for folder in missing_parts.folders():
        if pattern in str(folder):
            families[missing_parts.family(folder)].append(folder)
    for number in range(count):
        # Two changes in a row of the same recording, which is read and judged unchanged only once.
        if number % 2 == 0:
            folder = source.choice(families[sorted(families)[number // 2 % len(families)]])
            folder_parts = parts_of(folder)
        yield folder, tuple(source.sample(folder_parts, 1 + number % 2))


def _pairs(singles: Sequence[Case], tried: Log, count: int, source: random.Random) -> Iterator[Case]:
    """Pairs of parts of which each is read: of one recording, every second of parts of the same tables."""
    read: defaultdict[Path, list[tuple[Part, frozenset[str]]]] = defaultdict(list)
    for case in singles:
        row = tried.rows.get(title(case))
        if row and row["tables"]:
            read[case[0]].append((case[1][0], frozenset(row["tables"])))
    folders = [folder for folder, rows in read.items() if len(rows) > 1]
    drawn = []
    for number in range(count if folders else 0):
        folder = folders[number % len(folders)]
        first, tables = source.choice(read[folder])
        others = [part for part, part_tables in read[folder] if part.path != first.path
                  and (number % 2 or tables & part_tables)]  # fmt: skip
        if others:
            drawn.append((folder, (first, source.choice(others))))
    yield from sorted(drawn, key=lambda case: str(case[0]))


if __name__ == "__main__":
    sys.exit(main())
