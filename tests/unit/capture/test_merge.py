import gzip
import json
from pathlib import Path

import pytest

from tracekit.capture import atomic_files
from tracekit.capture.atomic_files import claim_folder
from tracekit.capture.launcher import command


def part(folder: Path, rank: int, training: str = "one") -> Path:
    """Make what a node with a folder of its own leaves."""
    claim_folder(folder, training)
    (folder / "window001").mkdir()
    for name in ("rank{}.pt.trace.json.gz", "window001/rank{}.pt.trace.json.gz", "rank{}.metrics.jsonl"):
        (folder / name.format(f"{rank:05d}")).write_text(f"of {rank}")
    if rank == 0:
        (folder / "run.json").write_text("{}")
    return folder


def test_parts_from_nodes_become_one_run(tmp_path: Path) -> None:
    parts = [part(tmp_path / f"node{rank}", rank) for rank in (0, 1)]
    assert atomic_files.merge_parts(tmp_path / "run", parts) == 8
    found = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.gz"))
    assert found == [
        "rank00000.pt.trace.json.gz",
        "rank00001.pt.trace.json.gz",
        "window001/rank00000.pt.trace.json.gz",
        "window001/rank00001.pt.trace.json.gz",
    ]
    assert (tmp_path / "run" / "run.json").exists()
    assert (tmp_path / "run" / "rank00001.metrics.jsonl").read_text() == "of 1"


def test_an_uncompressed_trace_is_merged_too(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "rank00003.window002.json").write_text(json.dumps({"traceEvents": []}))
    (tmp_path / "scratch" / "rank00003.window003.json.partial").write_text('{"traceEv')
    assert atomic_files.merge_parts(tmp_path / "run", [tmp_path / "scratch"]) == 1
    with gzip.open(tmp_path / "run" / "window002" / "rank00003.pt.trace.json.gz", "rt") as trace:
        assert json.load(trace) == {"traceEvents": []}
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["rank00003.window003.json.partial"]


@pytest.mark.parametrize("fault", ["another training", "the same rank", "no folder", "nothing of a run"])
def test_parts_that_conflict_are_not_moved(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = part(tmp_path / "node0", 0)
    second = tmp_path / "node1"
    if fault == "nothing of a run":
        second.mkdir()
    elif fault != "no folder":
        part(second, 0 if fault == "the same rank" else 1, "two" if fault == "another training" else "one")
    before = sorted(tmp_path.rglob("*"))
    code = command.merge_run([str(tmp_path / "run"), str(first), str(second)], program="tracekit merge")
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith("tracekit: ")
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
