"""Call trees as files: collapsed stacks, speedscope's JSON, and a Perfetto trace with one slice per stack."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.host import call_trees
from tracekit.errors import ConfigError
from tracekit.report import trace_tracks
from tracekit.report.export import perfetto_encoder
from tracekit.report.trace_tracks import Timeline

_SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SEPARATORS = re.compile(r"[;\x00-\x1f\x7f-\x9f\u2028-\u202e]+")
_TRACK = "time by stack"


def collapsed_stacks(tree: pl.DataFrame, file: BinaryIO, title: str) -> None:
    """Write "outer;inner nanoseconds" lines, as flamegraph.pl, inferno and speedscope read them, by stack.

    Semicolons in names become commas. Of `call_trees.difference` both values are written, as difffolded.pl does.
    """
    del title  # the format has none
    columns = [name for name in ("self_ns", "before_self_ns", "after_self_ns") if name in tree.columns]
    rows = tree.select(columns).rows()
    lines = [
        ";".join(_SEPARATORS.sub(",", frame) for frame in stack) + "".join(f" {value}" for value in values)
        for stack, values in zip(call_trees.stacks(tree), rows, strict=True)
        if any(values)
    ]
    file.writelines(f"{line}\n".encode() for line in sorted(lines))


def speedscope(tree: pl.DataFrame, file: BinaryIO, title: str) -> None:
    """Write a profile for speedscope.app: each stack once, as long as its self time; frames by time, longest first."""
    names = tree["name"].unique(maintain_order=True)
    number = {name: place for place, name in enumerate(names)}
    samples: list[list[int]] = []
    weights: list[int] = []
    frames_of: dict[int, list[int]] = {-1: []}
    for row in _depth_first(tree):
        frames_of[row["node"]] = [*frames_of[row["parent"]], number[row["name"]]]
        if row["self_ns"]:
            samples.append(frames_of[row["node"]])
            weights.append(row["self_ns"])
    profile = {
        "type": "sampled", "name": title, "unit": "nanoseconds",
        "startValue": 0, "endValue": sum(weights), "samples": samples, "weights": weights,
    }  # fmt: skip
    document = {
        "$schema": _SPEEDSCOPE_SCHEMA, "name": title, "activeProfileIndex": 0,
        "exporter": f"tracekit {conventions.VERSION}",
        "shared": {"frames": [{"name": name} for name in names]}, "profiles": [profile],
    }  # fmt: skip
    file.write(json.dumps(document, separators=(",", ":")).encode())


def perfetto(tree: pl.DataFrame, file: BinaryIO, title: str) -> None:
    """Write a Perfetto trace whose slices are the stacks: side by side, each as long as its total time, from 0."""
    starts: dict[int, int] = {}
    free: dict[int, int] = {-1: 0}
    for row in _depth_first(tree):
        starts[row["node"]] = free[row["parent"]]
        free[row["parent"]] += row["total_ns"]
        free[row["node"]] = starts[row["node"]]
    start_ns = np.array([starts[node] for node in tree["node"]], np.int64)
    slices = tree.select(
        pl.lit(1, pl.Int64).alias("track"), pl.lit(_TRACK).alias("track_name"), "name",
        pl.lit("stack").alias("category"), pl.Series("start_ns", start_ns), pl.col("total_ns").alias("dur_ns"),
        pl.lit("stacks").alias("source"), pl.col("node").alias("id"),
    )  # fmt: skip
    rest = {name: kind for name, kind in trace_tracks.SLICES.items() if name not in slices.columns}
    padded = slices.with_columns(pl.lit(None, kind).alias(name) for name, kind in rest.items())
    timeline = Timeline(
        padded.select(list(trace_tracks.SLICES)),
        pl.DataFrame(schema=trace_tracks.COUNTERS),
        pl.DataFrame(schema=trace_tracks.FLOWS),
    )
    perfetto_encoder.write_trace(file, timeline, number=1, name=title, to_run_clock=lambda times: times)


Writer = Callable[[pl.DataFrame, BinaryIO, str], None]
_WRITERS: dict[str, Writer] = {
    ".folded": collapsed_stacks, ".collapsed": collapsed_stacks, ".txt": collapsed_stacks, ".json": speedscope,
    ".pftrace": perfetto, ".perfetto-trace": perfetto,
}  # fmt: skip


def writer_for(path: Path) -> Writer:
    """Writer of the format of a file name. Raises ConfigError for an unknown ending."""
    if path.suffix not in _WRITERS:
        raise ConfigError(
            f"{path}: use the ending of a format: .folded (collapsed stacks), .speedscope.json or .pftrace (Perfetto)"
        )
    return _WRITERS[path.suffix]


def _depth_first(tree: pl.DataFrame) -> Iterator[dict[str, int]]:
    """Yield the nodes, each before those below it; those with the same parent by time, longest first."""
    ordered = tree.sort("total_ns", "node", descending=[False, True])
    below: dict[int, list[dict[str, int]]] = {}
    for row in ordered.iter_rows(named=True):
        below.setdefault(row["parent"], []).append(row)
    waiting = below.get(-1, []).copy()
    while waiting:
        row = waiting.pop()
        yield row
        waiting += below.get(row["node"], [])
