"""Logs of a training as the recorder writes them, for tests that watch one. Not a test."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from tracekit import conventions

Line = Mapping[str, object]


def line(step: int, *, ms: float = 100, **more: object) -> dict[str, object]:
    return {"step": step, "step_time_ns": round(ms * 1e6), **more}


def steady(
    count: int, *, first: int = 0, seed: int = 0, jitter: float = 0.02, ms: float = 100
) -> list[dict[str, object]]:
    """Return steps of about `ms` ms, their logarithm spread by `jitter`."""
    noise = random.Random(seed)
    return [line(first + n, ms=ms * math.exp(noise.gauss(0, jitter))) for n in range(count)]


def path(folder: Path, rank: int = 0, *, live: bool = False) -> Path:
    name = conventions.rank_file(rank, conventions.METRICS_SUFFIX)
    return folder / (name + conventions.PARTIAL_SUFFIX if live else name)


def write(folder: Path, *ranks: Iterable[Line], live: bool = False) -> Path:
    """Write a rank's log for each of `ranks`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, lines in enumerate(ranks):
        path(folder, rank, live=live).write_text(text(lines), encoding="utf-8")
    return folder


def append(folder: Path, lines: Iterable[Line], rank: int = 0) -> None:
    with path(folder, rank, live=True).open("a", encoding="utf-8") as file:
        file.write(text(lines))


def text(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(each) + "\n" for each in lines)


def save(
    folder: Path,
    *,
    step: int,
    ms: float,
    rank: int = 0,
    blocking: bool = True,
    stage: str = conventions.TOTAL,
    name: str = "",
) -> None:
    """Add a save to a rank's checkpoint log, which is replaced by a longer copy, as the recorder does."""
    log = folder / conventions.rank_file(rank, conventions.CHECKPOINT_LOG_SUFFIX)
    row = {"checkpoint": name or f"step-{step}", "operation": "save", "step": step, "stage": stage}
    row |= {"start_ns": 10**18 + step, "dur_ns": round(ms * 1e6), "bytes": 1 << 20, "blocking": blocking, "rank": rank}
    copy = log.with_suffix(".copy")
    copy.write_text((log.read_text() if log.exists() else "") + text([row]))
    copy.replace(log)


def manifest(folder: Path, **more: object) -> None:
    (folder / conventions.MANIFEST_FILE).write_text(json.dumps({"schema": conventions.RUN_SCHEMA, **more}))
