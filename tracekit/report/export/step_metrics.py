"""The metrics logs of a local run as one table, for export to other programs; no trace is needed."""

import re
from pathlib import Path

import polars as pl

from tracekit import conventions
from tracekit.errors import InputError
from tracekit.ingest.readers import manifest
from tracekit.ingest.readers.logs import MetricsLogs
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import schema

COLUMNS = schema.columns("rank step name value at_ns", name=pl.String, value=pl.Float64)
_LOG = re.compile(
    rf"rank(\d{{1,7}}){re.escape(conventions.METRICS_SUFFIX)}(?:{re.escape(conventions.PARTIAL_SUFFIX)})?"
)
_STEP_TIME = "step_time_ns"


def samples(folder: Path) -> pl.DataFrame:
    """Return the metrics of all steps and ranks, by rank, name and step. Columns COLUMNS.

    `at_ns` is the end of the step since 1970: the manifest's time of creation, plus the step times until then. It is
    null where one of these is not known, and early by the time that passes between steps, such as in saves. Raises
    InputError if the folder has no metrics log.
    """
    stated = manifest.read(folder / conventions.MANIFEST_FILE)
    created_ns = None if stated is None else stated.created_ns
    parts = [_of_rank(rank, path, created_ns) for rank, path in logs(folder).items()]
    return pl.concat(parts).sort("rank", "name", "step", maintain_order=True)


def run_name(folder: Path) -> str:
    """Return the name of a run's folder, with '?' for bytes that are not text."""
    return folder.resolve().name.encode("utf-8", "replace").decode()


def logs(folder: Path) -> dict[int, Path]:
    """Return the metrics logs in a folder by rank, complete or still being written. Raises InputError without one."""
    if not folder.is_dir():
        raise InputError(f"{folder}: metrics are exported from a local folder, and this is none; name a run's folder")
    paths = {int(match[1]): path for path in sorted(folder.iterdir()) if (match := _LOG.fullmatch(path.name))}
    if not paths:
        raise InputError(
            f"{folder}: no metrics log (rank*{conventions.METRICS_SUFFIX}) in this folder; record with tracekit"
        )
    return dict(sorted(paths.items()))


def _of_rank(rank: int, path: Path, created_ns: int | None) -> pl.DataFrame:
    metrics = MetricsLogs().read(str(path), TraceInfo(), rank=rank, window=0).metrics
    metrics = metrics.unique(["step", "name"], keep="last", maintain_order=True)
    times = metrics.filter(pl.col("name") == _STEP_TIME).sort("step")
    elapsed = pl.col("value").clip(0, 1e15).cum_sum().cast(pl.Int64)
    ends = times.select("step", at_ns=elapsed + pl.lit(created_ns, pl.Int64))
    timed = metrics.join(ends, on="step", how="left", maintain_order="left")
    return schema.select(timed.with_columns(rank=pl.lit(rank, pl.Int64)), COLUMNS)
