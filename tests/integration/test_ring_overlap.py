"""Overlap of a recorded ring of four gloo ranks, against a mask of each microsecond of what its files say."""

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support.cli_runner import tracekit as tracekit_command
from tests.support.selection import others_in_accuracy
from tracekit.analysis.parallelism import axis_communication
from tracekit.ingest.loader import load

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "parallelism" / "cp-ring"
RANKS, LAYERS = 4, 2
# In forward three blocks go on, in backward three, too, and gradients four times: to their own rank in the end.
CALLS = LAYERS * 2 * (3 + 3 + 4)
# From the call to the end of the wait: gloo's own span begins a little later.
TRANSFERS = ("c10d::send", "c10d::recv_", "gloo:send", "gloo:recv")


def masks(rank: int) -> dict[int, tuple[float, float]]:
    """Return for each step how long transfers are under way, and how long of that an operator runs, in ns."""
    with gzip.open(SAMPLE / f"rank{rank:05d}.pt.trace.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    found = {}
    for step in (event for event in events if event["name"].startswith("ProfilerStep#")):
        mask = np.zeros((2, int(step["dur"]) + 1), bool)
        for event in events:
            name, start_us = event["name"], event["ts"] - step["ts"]
            is_transfer = name in TRANSFERS
            if (is_transfer or name.startswith("aten::")) and 0 <= start_us < step["dur"]:
                mask[0 if is_transfer else 1, round(start_us) : round(start_us + event["dur"])] = True
        found[int(step["name"].split("#")[1])] = (1e3 * mask[0].sum(), 1e3 * mask.all(axis=0).sum())
    return found


@pytest.mark.parametrize("rank", others_in_accuracy(range(RANKS), [0, RANKS - 1]))
def test_hidden_transfers_of_a_recorded_ring_are_those_of_its_files(rank: int):
    rows = load(SAMPLE).table(axis_communication.ring_overlap).filter(rank=rank)
    expected = masks(rank)
    assert rows["step"].to_list() == sorted(expected)
    assert set(rows["calls"]) == {CALLS}
    for step, communication_ns, hidden_ns in rows.select("step", "communication_ns", "hidden_ns").rows():
        assert (communication_ns, hidden_ns) == pytest.approx(expected[step], rel=0.002)


def test_the_command_shows_a_ring_by_rank_and_step():
    rows = json.loads(tracekit_command("summary", SAMPLE, "--by", "ring", "--format", "json").stdout)
    table = load(SAMPLE).table(axis_communication.ring_overlap)
    assert pl.DataFrame(rows).select(table.columns).rows() == table.rows()
    assert all(0 <= row["waited_ns"] <= row["exposed_communication_ns"] for row in rows)
