"""Other files of a run than traces: the manifest, checkpoint stages and metrics (a JSON object a line), snapshots."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.conventions import regular_files
from tracekit.ingest import untrusted_json
from tracekit.ingest.budget import OverBudgetError
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema
from tracekit.model.manifest import Manifest
from tracekit.model.trace import Trace

_MAX_MANIFEST_BYTES = 4 << 20
_MOST = 1 << 60
_NEEDED = ("checkpoint", "operation", "stage", "start_ns", "dur_ns")
"""What a stage of a save or load is, and when: without these a line says nothing."""
_STATED = ("step", "blocking")
"""What the recorder states of each stage, and rules read."""


class _Logs(Reader):
    has_traces = False
    usage = "name the run's folder or a trace file"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the file is named like a log."""
        return name.endswith(self.suffixes)

    def companions(self, rank: int) -> Sequence[str]:
        """Return the name of a rank's log."""
        return [conventions.rank_file(rank, suffix) for suffix in self.suffixes]


class CheckpointLogs(_Logs):
    """Reads rank00000.checkpoint.jsonl."""

    name = "checkpoint log"
    suffixes = (conventions.CHECKPOINT_LOG_SUFFIX,)
    contents = "stages of checkpoint saves and loads of a rank"

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return a trace with checkpoints and data_quality only."""
        lines, skipped = _lines(path)
        checkpoints, dropped = _conform(schema.CHECKPOINTS, lines)
        complete = checkpoints.drop_nulls(_NEEDED)
        issues = [_issues(path, skipped, dropped), _lacking(path, checkpoints, _NEEDED, _STATED)]
        return Trace(rank, window, path, checkpoints=complete, data_quality=pl.concat(issues))


class AttemptsLogs(Reader):
    """Recognizes attempts.jsonl; `job_attempts` reads it."""

    name = "attempts log"
    suffixes = (conventions.ATTEMPTS_FILE,)
    contents = "start, steps, end and exit of each attempt at a job (`tracekit goodput`)"
    has_traces = False
    usage = "name the run's folder: tracekit goodput"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the file is named like an attempts log."""
        return name.rpartition("/")[2] == conventions.ATTEMPTS_FILE


class MetricsLogs(_Logs):
    """Reads rank00000.metrics.jsonl."""

    name = "metrics log"
    suffixes = (conventions.METRICS_SUFFIX,)
    contents = "loss, tokens/s and allocator counters of each step of a rank"

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return a trace with metrics and data_quality only."""
        read_lines, skipped = _lines(path)
        lines = [_with_throughput_of_all_ranks(line) for line in read_lines]
        steps: list[object] = []
        names: list[str] = []
        values: list[float] = []
        dropped = 0
        for line in lines:
            step = _as_dtype(line.get("step"), pl.Int64())
            dropped += step is None and "step" in line
            for name, value in line.items():
                if name in ("step", "rank") or not _is_number(value):
                    continue
                if not _is_possible(name, value):
                    dropped += 1
                    continue
                steps.append(step)
                names.append(name)
                values.append(float(value))
        metrics = pl.DataFrame({"step": steps, "name": names, "value": values}, schema=schema.METRICS.schema)
        step_metrics = metrics.drop_nulls("step")
        issues = [_issues(path, skipped, dropped), _lacking(path, metrics, ("step",))]
        if path.endswith(conventions.PARTIAL_SUFFIX):
            issues.append(_growing(path, rank, step_metrics))
        return Trace(rank, window, path, metrics=step_metrics, data_quality=pl.concat(issues))


def _with_throughput_of_all_ranks(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line in which tokens per second are those of all ranks.

    Before simulated runs stated the speed per GPU in a column of its own, their tokens_per_second were those of one.
    """
    is_of_one_gpu = line.get("simulated") is True and conventions.TOKENS_PER_GPU_METRIC not in line
    if not is_of_one_gpu or conventions.TOKENS_METRIC not in line:
        return line
    names = {conventions.TOKENS_METRIC: conventions.TOKENS_PER_GPU_METRIC}
    return {names.get(name, name): value for name, value in line.items()}


def _lines(path: str) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a log, and how many other lines were skipped. Raises OverBudgetError."""
    try:
        return untrusted_json.parse_lines(regular_files.read_text(path, errors="replace"))
    except ValueError as error:
        raise OverBudgetError(f"{path}: the log {error}") from None


def _growing(path: str, rank: int, metrics: pl.DataFrame) -> pl.DataFrame:
    """Data-quality issue of a metrics log that its rank has not closed."""
    end = "has no step" if metrics.is_empty() else f"ends with step {max(metrics['step'])}"
    message = (
        f"{path}: the metrics log of rank {rank} is not closed and {end}: the training is running, or the rank was "
        "killed (kill -9, out of memory), and what it did in its last second is missing."
    )
    return pl.DataFrame([("growing_log", message, 0.0)], schema=schema.DATA_QUALITY.schema, orient="row")


def _issues(path: str, skipped: int, dropped: int) -> pl.DataFrame:
    """Return the data-quality issues of a log: lines that are no objects, and values of a wrong type."""
    lines = f"{path}: {skipped} lines are not JSON objects and were left out."
    values = f"{path}: {dropped} values have a wrong type or size and were left out."
    rows = [("bad_log", text, 0.0) for text, count in ((lines, skipped), (values, dropped)) if count]
    return pl.DataFrame(rows, schema=schema.DATA_QUALITY.schema, orient="row")


def _lacking(path: str, rows: pl.DataFrame, needed: Sequence[str], stated: Sequence[str] = ()) -> pl.DataFrame:
    """Data-quality issues of values that rows lack: without those that are needed a row is left out."""
    absent = {name: rows[name].null_count() for name in (*needed, *stated) if rows[name].null_count()}
    left_out = [name for name in absent if name in needed]
    incomplete = [f"{name} ({count} of {rows.height})" for name, count in absent.items()]
    if not incomplete:
        return schema.DATA_QUALITY.empty()
    effect = "; values without " + " or ".join(left_out) + " were left out" if left_out else ""
    message = f"{path}: the log does not state {', '.join(incomplete)}{effect}."
    return pl.DataFrame([("bad_log", message, 0.0)], schema=schema.DATA_QUALITY.schema, orient="row")


def _is_possible(name: str, value: float) -> bool:
    """Return whether a number can be what its name says: times and sizes are added up as int64."""
    return not name.endswith(("_ns", "_bytes")) or abs(value) < _MOST


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float64 can represent
        return False


def _conform(table: schema.Table, rows: list[dict[str, Any]]) -> tuple[pl.DataFrame, int]:
    """Return rows as a table, and how many of their values have a wrong type: these are null."""
    columns = {c.name: [_as_dtype(row.get(c.name), c.dtype) for row in rows] for c in table.columns}
    dropped = sum(
        typed is None and row.get(name) is not None
        for name, values in columns.items()
        for typed, row in zip(values, rows, strict=True)
    )
    return pl.DataFrame(columns, schema=table.schema), dropped


def _as_dtype(value: object, dtype: pl.DataType) -> object:
    """Return a value as a column of this type has it; None if it does not fit."""
    if dtype == pl.String:
        return value if isinstance(value, str) else None
    if dtype == pl.Boolean:
        return value if isinstance(value, bool) else None
    if not isinstance(value, int | float) or not _is_number(value):
        return None
    if dtype == pl.Float64:
        return float(value)
    return int(value) if -(1 << 63) <= value < 1 << 63 else None


PICKLE_STARTS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


class MemorySnapshots(Reader):
    """Recognizes memory snapshots; `reader.read` returns their tables."""

    name = "CUDA memory snapshot (pickle)"
    suffixes = (conventions.MEMORY_SNAPSHOT_SUFFIX, ".pickle")
    contents = "segments, blocks, allocator history and call stacks (`tracekit memory`)"
    has_traces = False
    usage = "analyze it with: tracekit memory"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the file is a pickle."""
        return head.startswith(PICKLE_STARTS)


class Manifests(Reader):
    """Reads run.json; it has no trace."""

    name = "run manifest"
    suffixes = (conventions.MANIFEST_FILE,)
    contents = "strategy, world size, model, arguments, versions and commit of the run"
    has_traces = False
    usage = "name the run's folder or a trace file"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether the file is called run.json or states the schema of a manifest."""
        return name == conventions.MANIFEST_FILE or f'"{conventions.RUN_SCHEMA}"'.encode() in head[:200]


def read_manifest(path: Path) -> Manifest | None:
    """The manifest, for programs that load no run; None if it is no JSON object of at most 4 MiB."""
    try:
        with regular_files.open_to_read(path) as file:
            is_manifest = regular_files.size(file) <= _MAX_MANIFEST_BYTES
            return Manifest.of(parse_manifest(file.read())) if is_manifest else None
    except (OSError, ValueError):
        return None


def parse_manifest(text: str | bytes) -> Mapping[str, Any]:
    """Return the fields of a manifest. Raises ValueError if it is not a JSON object."""
    fields = untrusted_json.parse(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields
