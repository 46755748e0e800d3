"""Blocks of memory that are older than a snapshot's history, of whose requests nothing is known."""

from pathlib import Path

import polars as pl
import pytest

from tests.support.sample_snapshots import MIB, document, event, frame, segment, write
from tracekit.ingest.readers import memory_snapshots
from tracekit.replay.allocator import playback, snapshot_facts

CASE = Path(__file__).parents[3].parent / "shared" / "cases" / "snapshot_older_blocks" / "memory.pickle.gz"
AT = 1 << 30


def owners_at_peak(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return what a snapshot says of its peak, by place in code and by category."""
    snapshot = memory_snapshots.read(path)
    history = playback.from_snapshot(snapshot, snapshot.devices[0])
    played = playback.replay_as_recorded(history)
    by_place = snapshot_facts.at_peak(snapshot, history, played)
    return by_place, snapshot_facts.categories_at_peak(snapshot, history, played)


def test_a_block_that_was_freed_has_not_the_stack_of_the_next_one_at_its_address(tmp_path):
    # 6 MiB that were there before the history are freed; then 4 MiB are requested at the same address.
    step = [{"name": "step", "filename": "/home/me/train.py", "line": 7}]
    listed = segment(AT, [(4 * MIB, "active_allocated"), (16 * MIB, "inactive")])
    listed["blocks"][0]["frames"] = step
    history = [
        event("free_requested", AT, 6 * MIB), event("free_completed", AT, 6 * MIB),
        event("alloc", AT, 4 * MIB, frames=step),
    ]  # fmt: skip
    by_place, by_category = owners_at_peak(write(tmp_path / "memory.pickle", document([listed], history)))
    assert by_place.select("op", "bytes").rows() == [(None, 6 * MIB)]
    assert by_category["category"].to_list() == ["unknown"]


def test_a_block_that_is_still_there_has_the_stack_that_the_snapshot_states(tmp_path):
    listed = segment(AT, [(6 * MIB, "active_allocated"), (14 * MIB, "inactive")])
    listed["blocks"][0]["frames"] = [{"name": "step", "filename": "/home/me/train.py", "line": 7}]
    history = [event("alloc", AT + 6 * MIB, MIB), event("free_requested", AT + 6 * MIB, MIB)]
    by_place, _ = owners_at_peak(write(tmp_path / "memory.pickle", document([listed], history)))
    assert by_place.filter(pl.col("bytes") == 6 * MIB)["op"].to_list() == ["step (train.py:7)"]


def test_paths_of_windows_name_files_and_parts_of_a_step(tmp_path):
    listed = segment(AT, [(6 * MIB, "active_allocated"), (14 * MIB, "inactive")])
    torch = r"C:\Users\me\venv\Lib\site-packages\torch"
    listed["blocks"][0]["frames"] = [
        frame("reset_parameters") | {"filename": torch + r"\nn\modules\linear.py"},
        frame("main", 9) | {"filename": r"C:\Users\me\train.py"},
    ]
    history = [event("alloc", AT + 6 * MIB, MIB), event("free_requested", AT + 6 * MIB, MIB)]
    by_place, by_category = owners_at_peak(write(tmp_path / "memory.pickle", document([listed], history)))
    assert "main (train.py:9)" in by_place["op"].to_list()
    assert "parameters" in by_category["category"].to_list()


@pytest.mark.skipif(not CASE.exists(), reason="needs the shared cases")
def test_both_tables_of_a_recorded_snapshot_agree_on_what_is_older():
    by_place, by_category = owners_at_peak(CASE)
    unknown_bytes = by_category.filter(pl.col("category") == "unknown")["bytes"].sum()
    earlier_bytes = by_place.filter(pl.col("op").is_null())["bytes"].sum()
    assert abs(unknown_bytes - earlier_bytes) < MIB
