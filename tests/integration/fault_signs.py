"""Signs of each fault in a run's files, read in plain Python without tracekit's analysis. Not a test."""

import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration import trainings
from tracekit import conventions


@functools.lru_cache(maxsize=8)
def events(run: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        found: list[dict[str, Any]] = json.load(packed)["traceEvents"]
    return found


def named(run: Path, rank: int, start: str) -> list[dict[str, Any]]:
    """Return the slices of a rank whose name starts with a prefix, by time."""
    found = [event for event in events(run, rank) if event["name"].startswith(start) and "dur" in event]
    return sorted(found, key=lambda event: event["ts"])


def phase(run: Path, rank: int, name: str) -> list[dict[str, Any]]:
    return named(run, rank, conventions.span_name(name))


def stage(run: Path, rank: int, name: str) -> dict[str, Any]:
    """Return the line of a stage of the run's only save."""
    rows = trainings.rows(run, rank, conventions.CHECKPOINT_LOG_SUFFIX)
    (row,) = [row for row in rows if row["stage"] == name]
    return row


def extra_compute_ms(run: Path, rank: int) -> list[float]:
    """Return, for each forward pass, how long the slow rank's own products of matrices run, which no model here has."""
    extra = [e for e in named(run, rank, "aten::mm") if e["args"].get("Input Dims") == [[240, 240], [240, 240]]]
    spans = []
    for forward in phase(run, rank, conventions.FORWARD):
        inside = [e for e in extra if within(e, forward)]
        spans.append((inside[-1]["ts"] + inside[-1]["dur"] - inside[0]["ts"]) / 1e3 if inside else 0.0)
    return spans


def quiet_before_layers_ms(run: Path, rank: int = 0) -> Iterator[float]:
    """Yield how long the host recorded nothing before each layer's forward."""
    forwards = phase(run, rank, conventions.FORWARD)
    slices = named(run, rank, "")
    for layer in named(run, rank, "FSDP::pre_forward (layers."):
        if any(within(layer, forward) for forward in forwards):
            before = [e for e in slices if e["tid"] == layer["tid"] and e["ts"] + e["dur"] <= layer["ts"]]
            yield (layer["ts"] - max(e["ts"] + e["dur"] for e in before)) / 1e3


def gaps_in_forward_ms(run: Path) -> list[list[float]]:
    """Return, for each forward pass, how long the host ran no operator, each time, the longest first."""
    slices = named(run, 0, "aten::")
    found = []
    for forward in phase(run, 0, conventions.FORWARD):
        inside = [e for e in slices if e["tid"] == forward["tid"] and within(e, forward)]
        reached, gaps = forward["ts"], []
        for event in inside:
            gaps.append((event["ts"] - reached) / 1e3)
            reached = max(reached, event["ts"] + event["dur"])
        found.append(sorted(gaps, reverse=True))
    return found


def gathered_ahead(run: Path, spans: str = "FSDP") -> list[bool]:
    """Return, for each forward pass, whether the second layer's all-gather was launched before the first layer ran."""
    forwards = phase(run, 0, conventions.FORWARD)
    gathers, ends = (
        [e for e in named(run, 0, f"{spans}::{name}") if any(within(e, forward) for forward in forwards)]
        for name in ("all_gather (layers.1)", "post_forward (layers.0)")
    )
    first = [next(e for e in gathers if within(e, forward)) for forward in forwards]
    return [gather["ts"] < end["ts"] for gather, end in zip(first, ends, strict=True)]


def blocks_bytes(run: Path, at_least: int) -> list[int]:
    """Return the sizes of allocated blocks of at least a size, by time."""
    memory = sorted((e for e in events(run, 0) if e["name"] == "[memory]"), key=lambda event: event["ts"])
    return [event["args"]["Bytes"] for event in memory if event["args"]["Bytes"] >= at_least]


def reads(run: Path) -> int:
    """Return how often the host read a number from a tensor."""
    return len(named(run, 0, "aten::item"))


def waits_for_data_ms(run: Path) -> list[float]:
    return [span["dur"] / 1e3 for span in phase(run, 0, conventions.DATA)]


def step_times_ms(run: Path, rank: int, steps: Sequence[int]) -> list[float]:
    rows = trainings.rows(run, rank, conventions.METRICS_SUFFIX)
    return [row[conventions.STEP_TIME_METRIC] / 1e6 for row in rows if row["step"] in steps]


def within(event: dict[str, Any], span: dict[str, Any]) -> bool:
    return bool(0 <= event["ts"] - span["ts"] < span["dur"])
