"""The attempts at a job, from the folders of its runs: attempts logs, checkpoint logs, and metrics where these lack."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.conventions import log_parts, regular_files
from tracekit.errors import InputError
from tracekit.ingest import untrusted_json
from tracekit.ingest.budget import OverBudgetError
from tracekit.ingest.readers.logs import CheckpointLogs, MetricsLogs, read_manifest
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model.attempt import Attempt, CheckpointCall
from tracekit.model.intervals import Spans
from tracekit.model.manifest import MAX_RANKS

_MAX_TIME_NS = 4_102_444_800 * 10**9  # the year 2100: a later time is damage
_MAX_STEP = 1 << 53
_MAX_STEP_NS = 1 << 60
_MAX_RUNS = 10_000
_HOW_TO = "record it with tracekit record, a Recorder or the instrumented trainers"

_Steps: TypeAlias = tuple[npt.NDArray[np.int64], Spans]
"""Numbers and spans of steps."""


def read(paths: Sequence[Path]) -> tuple[list[Attempt], list[str]]:
    """Attempts in these folders by their time, and notes on what could not be read.

    A path is a run's folder, or a folder of such. Raises InputError if a path has no attempt.
    """
    attempts: list[Attempt] = []
    notes: list[str] = []
    for path in paths:
        folders = _run_folders(path)
        of_path = [attempt for folder in folders for attempt in _attempts_of_folder(folder, notes)]
        if not of_path:
            logs = [folder / conventions.ATTEMPTS_FILE for folder in folders]
            if damaged := next((log for log in logs if log.is_file()), None):
                raise InputError(f"{damaged}: no line states the start of an attempt; is the file whole?")
            raise InputError(f"{path}: no attempts log ({conventions.ATTEMPTS_FILE}) and no metrics log; {_HOW_TO}")
        attempts += of_path
    unique = {(attempt.folder, attempt.begin_ns): attempt for attempt in attempts}
    return sorted(unique.values(), key=lambda attempt: attempt.begin_ns), notes


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise InputError(f"{path}: {what}; name the folder of a run, or a folder of runs")
    if _is_run(path):
        return [path]
    folders = sorted(folder for folder in itertools.islice(path.iterdir(), _MAX_RUNS) if folder.is_dir())
    return [folder for folder in folders if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (conventions.ATTEMPTS_FILE, conventions.MANIFEST_FILE))


def _attempts_of_folder(folder: Path, notes: list[str]) -> list[Attempt]:
    path = folder / conventions.ATTEMPTS_FILE
    if not path.is_file():
        inferred = _attempt_by_metrics(folder)
        if inferred is None:
            return []
        notes.append(f"{folder}: has no attempts log; its steps are placed by run.json and their durations")
        attempts = [inferred]
    else:
        try:
            attempts, bad_lines = parse(regular_files.read_text(path, errors="replace"), str(folder))
        except ValueError as error:
            raise OverBudgetError(f"{path}: the log {error}") from None
        if bad_lines:
            notes.append(f"{path}: {bad_lines} lines are no events of an attempt and were left out")
    return _with_checkpoints(attempts, folder)


def parse(text: str, folder: str) -> tuple[list[Attempt], int]:
    """Attempts that the lines of an attempts log describe, in their order, and how many lines are no events.

    Raises ValueError for far more values than such logs have.
    """
    lines, bad_lines = untrusted_json.parse_lines(text)
    attempts: list[Attempt] = []
    steps: list[list[_Steps]] = []
    for line in lines:
        event, time_ns = line.get("event"), _whole(line, "time_ns", _MAX_TIME_NS)
        if time_ns is not None and event == conventions.ATTEMPT_START:
            attempts.append(_start(line, folder, time_ns))
            steps.append([])
        elif time_ns is not None and attempts and event == conventions.ATTEMPT_STEPS:
            of_line = _steps_of_line(line, time_ns)
            steps[-1] += [] if of_line is None else [of_line]
            bad_lines += of_line is None
        elif time_ns is not None and attempts and event == conventions.ATTEMPT_END:
            attempts[-1] = replace(attempts[-1], loop_end_ns=time_ns, error=_text(line, "error"))
        elif time_ns is not None and event == conventions.ATTEMPT_EXIT:
            if not attempts or attempts[-1].exit_ns is not None:  # it exited before its training began
                launched_ns = _whole(line, "launched_ns", _MAX_TIME_NS)
                begin_ns = time_ns if launched_ns is None else launched_ns
                attempts.append(Attempt(folder, min(begin_ns, time_ns), has_begun=False, launched_ns=launched_ns))
                steps.append([])
            attempts[-1] = _with_exit(attempts[-1], line, time_ns)
        else:
            bad_lines += 1
    return [_with_steps(attempt, parts) for attempt, parts in zip(attempts, steps, strict=True)], bad_lines


def _start(line: Mapping[str, Any], folder: str, time_ns: int) -> Attempt:
    return Attempt(
        folder,
        time_ns,
        first_step=_whole(line, "first_step", _MAX_STEP) or 0,
        world_size=_whole(line, "world_size", MAX_RANKS) or 1,
        process_start_ns=_whole(line, "process_start_ns", time_ns),
        launched_ns=_whole(line, "launched_ns", time_ns),
    )


def _with_exit(attempt: Attempt, line: Mapping[str, Any], time_ns: int) -> Attempt:
    code = line.get("code")
    return replace(
        attempt,
        exit_ns=time_ns,
        failed_ns=_whole(line, "failed_ns", time_ns),
        exit_code=code if type(code) is int and abs(code) < 1 << 31 else None,
        exit_reason=_text(line, "reason"),
    )


def _steps_of_line(line: Mapping[str, Any], time_ns: int) -> _Steps | None:
    """Numbers and spans [begin, end) of a line's steps; None if it is damaged."""
    first_step = _whole(line, "first_step", _MAX_STEP)
    begins, durations = line.get("begin_ns"), line.get("step_ns")
    if first_step is None or not (isinstance(begins, list) and isinstance(durations, list)):
        return None
    is_time = all(type(value) is int and 0 <= value < _MAX_STEP_NS for value in (*begins, *durations))
    if len(begins) != len(durations) or not begins or not is_time:
        return None
    begin_ns = np.array(begins, np.int64) + time_ns
    spans = np.stack((begin_ns, begin_ns + np.array(durations, np.int64)), axis=1)
    return first_step + np.arange(len(begins), dtype=np.int64), spans


def _with_steps(attempt: Attempt, parts: list[_Steps]) -> Attempt:
    """Attempt with the steps of its lines, whose times do not go back: an earlier time is damage, and moves forward."""
    if not parts:
        return attempt
    numbers, spans = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    end_ns = np.maximum.accumulate(np.maximum(spans[:, 1], attempt.begin_ns))
    begin_ns = np.maximum(spans[:, 0], np.concatenate(([attempt.begin_ns], end_ns[:-1])))
    ordered = np.stack((np.minimum(begin_ns, end_ns), end_ns), axis=1)
    return replace(attempt, step_spans=ordered, step_numbers=np.maximum.accumulate(numbers))


def _whole(line: Mapping[str, Any], name: str, most: int) -> int | None:
    value = line.get(name)
    return value if type(value) is int and 0 <= value <= most else None


def _text(line: Mapping[str, Any], name: str) -> str | None:
    value = line.get(name)
    return value[:200] if isinstance(value, str) and value else None


def _leading_log(folder: Path, suffix: str) -> tuple[int, Path] | None:
    """Lowest rank with such a log, and the log's path with its final name."""
    for ending in (suffix, suffix + conventions.PARTIAL_SUFFIX):
        for file in sorted(folder.glob(f"rank*{ending}")):
            rank = file.name.removesuffix(ending).removeprefix("rank")
            if rank.isascii() and rank.isdigit() and int(rank) < MAX_RANKS:
                return int(rank), folder / conventions.rank_file(int(rank), suffix)
    return None


def _with_checkpoints(attempts: Sequence[Attempt], folder: Path) -> list[Attempt]:
    """Attempts with the saves and loads of the lowest rank with a checkpoint log, on the thread that trains."""
    log = _leading_log(folder, conventions.CHECKPOINT_LOG_SUFFIX)
    if log is None or not attempts:
        return list(attempts)
    rows = CheckpointLogs().read(str(log[1]), TraceInfo(), rank=log[0], window=0).checkpoints
    wholes = rows.filter(
        pl.col("stage").is_in((conventions.TOTAL, conventions.COMPLETE)), pl.col("start_ns").is_between(0, _MAX_TIME_NS)
    )
    launches_ns = np.array([attempt.launch_ns for attempt in attempts])
    number = np.searchsorted(launches_ns, wholes["start_ns"].to_numpy(), side="right") - 1
    end_ns = pl.col("start_ns") + pl.col("dur_ns").clip(0, _MAX_STEP_NS)
    is_blocking = (pl.col("stage") == conventions.TOTAL) & pl.col("blocking").fill_null(value=True)
    calls = (
        wholes.with_columns(pl.Series("attempt", number, pl.Int64), end_ns=end_ns)
        # A resumed training saves checkpoints of the same names again.
        .group_by("attempt", "operation", "checkpoint", maintain_order=True)
        .agg(
            pl.coalesce(pl.col("path").drop_nulls().first(), pl.col("checkpoint").first()),
            pl.col("step", "start_ns").min(),
            pl.coalesce(pl.col("end_ns").filter(is_blocking).max(), pl.col("start_ns").min()).alias("end_ns"),
            pl.col("end_ns").max().alias("complete_ns"),
        )
        .sort("start_ns")
    )
    return [
        replace(
            attempt,
            saves=_calls(calls, index, conventions.SAVE),
            loads=_calls(calls, index, conventions.LOAD),
        )
        for index, attempt in enumerate(attempts)
    ]


def _calls(calls: pl.DataFrame, attempt: int, operation: str) -> tuple[CheckpointCall, ...]:
    rows = calls.filter(pl.col("attempt") == attempt, pl.col("operation") == operation)
    return tuple(
        CheckpointCall(*row) for row in rows.select("path", "step", "start_ns", "end_ns", "complete_ns").iter_rows()
    )


def _attempt_by_metrics(folder: Path) -> Attempt | None:
    """The attempt that run.json and a metrics log describe: its steps follow each other from the time of run.json."""
    manifest, log = read_manifest(folder / conventions.MANIFEST_FILE), _leading_log(folder, conventions.METRICS_SUFFIX)
    if manifest is None or manifest.created_ns is None or log is None:
        return None
    rank, path = log
    files = log_parts.files(path.name, lambda name: (folder / name).is_file())
    tables = [MetricsLogs().read(str(folder / name), TraceInfo(), rank=rank, window=0).metrics for name in files]
    is_time = pl.col("name") == conventions.STEP_TIME_METRIC
    steps = pl.concat(tables).filter(is_time).unique("step", keep="last").sort("step")
    if steps.is_empty():
        return None
    durations_ns = steps["value"].clip(0, 1e15).cast(pl.Int64).to_numpy()
    end_ns = manifest.created_ns + np.cumsum(durations_ns)
    spans = np.stack((end_ns - durations_ns, end_ns), axis=1)
    is_closed = not (folder / (path.name + conventions.PARTIAL_SUFFIX)).exists()
    return Attempt(
        str(folder),
        manifest.created_ns,
        first_step=max(0, int(steps["step"][0])),
        world_size=manifest.world_size or 1,
        step_spans=spans,
        step_numbers=steps["step"].to_numpy(),
        loop_end_ns=int(end_ns[-1]) if is_closed else None,
    )
