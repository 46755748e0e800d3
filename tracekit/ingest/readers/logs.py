"""The recorder's logs of a rank: checkpoint stages and metrics, one JSON object a line."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema
from tracekit.model.trace import Trace


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
        lines, issues = _lines(path)
        return Trace(rank, window, path, checkpoints=_conform(schema.CHECKPOINTS, lines), data_quality=issues)


class MetricsLogs(_Logs):
    """Reads rank00000.metrics.jsonl."""

    name = "metrics log"
    suffixes = (conventions.METRICS_SUFFIX,)
    contents = "loss, tokens/s and allocator counters of each step of a rank"

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return a trace with metrics and data_quality only."""
        lines, issues = _lines(path)
        metrics = [
            {"step": line["step"], "name": name, "value": float(value)}
            for line in lines
            for name, value in line.items()
            if name not in ("step", "rank") and isinstance(line.get("step"), int) and _is_number(value)
        ]
        return Trace(rank, window, path, metrics=_conform(schema.METRICS, metrics), data_quality=issues)


def _lines(path: str) -> tuple[list[dict[str, Any]], pl.DataFrame]:
    """Return the JSON objects of a log, and a data-quality issue if other lines were skipped."""
    lines, skipped = [], 0
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = untrusted_json.parse(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif text.strip():
            skipped += 1
    issue = ("bad_log", f"{path}: {skipped} lines are not JSON objects and were left out.", 0.0)
    return lines, pl.DataFrame([issue] if skipped else [], schema=schema.DATA_QUALITY.schema, orient="row")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float64 can represent
        return False


def _conform(table: schema.Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    if not rows:
        return table.empty()
    picked = {c.name: pl.Series(c.name, [row.get(c.name) for row in rows], strict=False) for c in table.columns}
    return pl.DataFrame({c.name: picked[c.name].cast(c.dtype, strict=False) for c in table.columns})
