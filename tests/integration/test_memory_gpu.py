"""On a GPU: trace and snapshot of one run agree, and a replay comes to the record, a prediction to what happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import tracekit
from tracekit.analysis.memory import allocations
from tracekit.ingest.readers import memory_snapshots
from tracekit.replay.allocator import playback, snapshot_facts
from tracekit.replay.allocator.recorded_history import ALLOC, REQUEST
from tracekit.replay.allocator.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SCRIPT = Path(__file__).parent / "scripts" / "gpu_memory.py"
CONF = "PYTORCH_CUDA_ALLOC_CONF"
TOLERANCE = 0.05


def train(folder: Path, settings: str = "") -> dict[str, int]:
    """Train under allocator settings; return what torch counted."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in (CONF, "PYTORCH_ALLOC_CONF")}
    environment |= {CONF: settings} if settings else {}
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    counted: dict[str, int] = json.loads(done.stdout)
    return counted


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "default"
    return folder, train(folder)


@pytest.fixture(scope="module")
def history(trained):
    return playback.from_snapshot(memory_snapshots.read(trained[0] / "rank00000.memory.pickle"), 0)


def test_trace_and_snapshot_have_the_same_blocks_and_times(trained, history):
    trace = tracekit.load(str(trained[0]), cache=False).trace(0)
    events = trace.allocations.filter(pl.col("device") == 0)
    played = playback.replay_as_recorded(history)
    is_allocation = np.isin(history.action, (ALLOC, REQUEST))
    blocks = list(zip(history.address[is_allocation].tolist(), played.moved_bytes[is_allocation].tolist(), strict=True))
    traced = list(events.select("address", "delta_bytes").iter_rows())
    begin = next(i for i in range(len(blocks)) if blocks[i : i + len(traced)] == traced)
    allocated_bytes = snapshot_facts.allocated_over_time(history, played)[1:][is_allocation][
        begin : begin + len(traced)
    ]
    live = allocations.live(trace).filter(pl.col("device") == 0)
    assert live["live_bytes"].to_list() == allocated_bytes.tolist()
    apart_ns = events["at_ns"].to_numpy() - history.at_ns[is_allocation][begin : begin + len(traced)]
    assert abs(np.median(apart_ns)) < 50_000_000


def test_a_replay_takes_the_recorded_segments_and_torchs_own_counts_agree(trained, history):
    _, counted = trained
    played = playback.replay_as_recorded(history)
    assert played.address_mismatches == 0
    assert [event.bytes for event in played.segment_allocations] == [
        event.bytes for event in history.segment_allocations
    ]
    assert len(played.segment_allocations) == counted["num_device_alloc"]
    assert len(played.segment_frees) == counted["num_device_free"]
    assert played.peak_reserved_bytes == counted["reserved_bytes.all.peak"]
    assert history.retries == counted["num_alloc_retries"] == 0


@pytest.mark.parametrize("settings", ["expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"])
def test_a_replay_predicts_the_result_of_other_settings(tmp_path, history, settings):
    predicted = playback.predict(history, Settings.parse(settings))
    counted = train(tmp_path / "run", settings)
    assert predicted.peak_reserved_bytes == pytest.approx(counted["reserved_bytes.all.peak"], rel=TOLERANCE)
    assert predicted.retries == counted["num_alloc_retries"]
