"""Spans of the garbage collector in recorded windows: full collections only, and nothing once the window ended."""

import gc
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tracekit.rules.engine import check
from tracekit.rules.host_phases import GarbageCollection

torch = pytest.importorskip("torch", reason="needs torch")

from tracekit.capture.recorder import Recorder  # noqa: E402


def record(out: Path, generation: int) -> tracekit.Run:
    """Run of four steps, each of which collects garbage; steps 1 and 2 are recorded."""
    weights = torch.ones(64, 64)
    was_enabled, watchers = gc.isenabled(), list(gc.callbacks)
    gc.disable()  # the only collections are those below
    try:
        with Recorder(out, steps="1:3", warmup=1, device="cpu", memory=False) as recorder:
            for number in range(4):
                assert len(gc.callbacks) == len(watchers) + (number in (1, 2))
                weights @ weights
                gc.collect(generation)
                weights @ weights
                recorder.step()
    finally:
        if was_enabled:
            gc.enable()
    assert gc.callbacks == watchers
    return tracekit.load(out, cache=False)


def test_each_full_collection_has_a_span_in_its_step_and_a_finding(tmp_path: Path) -> None:
    run = record(tmp_path, 2)
    collections = run.trace(0).ops.filter(pl.col("name").str.starts_with("gc:"))
    assert collections["step"].to_list() == [1, 2]
    (finding,) = check(run, [GarbageCollection()]).findings
    assert finding.steps == (1, 2)


def test_young_generations_have_none(tmp_path: Path) -> None:
    run = record(tmp_path, 1)
    assert not run.trace(0).ops["name"].str.starts_with("gc:").any()
    assert check(run, [GarbageCollection()]).findings == ()
