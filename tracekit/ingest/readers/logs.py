"""The recorder's logs that lie beside a trace: checkpoint stages and metrics, one JSON object a line."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.ingest import untrusted_json
from tracekit.model import schema

_PLACE = ("step", "rank")


def read_beside(trace_path: str, rank: int) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return checkpoints, metrics and data-quality issues from the logs beside a trace (of a window: one folder up)."""
    bad: list[str] = []
    checkpoints = list(_lines(trace_path, rank, conventions.CHECKPOINT_LOG_SUFFIX, bad))
    metrics = [
        {"step": line["step"], "name": name, "value": float(value)}
        for line in _lines(trace_path, rank, conventions.METRICS_SUFFIX, bad)
        for name, value in line.items()
        if name not in _PLACE and isinstance(line.get("step"), int) and _is_number(value)
    ]
    issues = pl.DataFrame(
        [("bad_log", message, 0.0) for message in bad], schema=schema.DATA_QUALITY.schema, orient="row"
    )
    return _conform(schema.CHECKPOINTS, checkpoints), _conform(schema.METRICS, metrics), issues


def _lines(trace_path: str, rank: int, suffix: str, bad: list[str]) -> Iterator[dict[str, Any]]:
    folder = Path(trace_path).parent
    name = conventions.rank_file(rank, suffix)
    path = next((p for p in (folder / name, folder.parent / name) if p.is_file()), None)
    if path is None:
        return
    skipped = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = untrusted_json.parsed(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        elif text.strip():
            skipped += 1
    if skipped:
        bad.append(f"{path}: {skipped} lines are not JSON objects and were left out.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _conform(table: schema.Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    if not rows:
        return table.empty()
    picked = {c.name: pl.Series(c.name, [row.get(c.name) for row in rows], strict=False) for c in table.columns}
    return pl.DataFrame({c.name: picked[c.name].cast(c.dtype, strict=False) for c in table.columns})
