import json
import os
import tarfile

import pytest

from dashboard import run_catalog


def _run(folder, **manifest):
    folder.mkdir(parents=True)
    (folder / "rank00000.pt.trace.json.gz").write_bytes(b"x" * 100)
    if manifest:
        (folder / "run.json").write_text(json.dumps(manifest))
    return folder


def test_runs_are_listed_from_manifests_and_file_sizes_without_reading_a_trace(tmp_path):
    _run(tmp_path / "demo" / "fsdp2", strategy="fsdp2", world_size=2, model={"name": "tiny"}, created_ns=5)
    _run(tmp_path / "old")
    (tmp_path / "notes").mkdir()
    listed = run_catalog.list_runs([str(tmp_path)]).entries  # the traces are not JSON: reading one would fail
    assert [entry.name for entry in listed] == ["demo/fsdp2", "old"]
    first = listed[0]
    assert (first.strategy, first.world_size, first.model, first.created_ns) == ("fsdp2", 2, "tiny", 5)
    assert (first.files, first.size_bytes, first.problem) == (1, 100, "")


def test_a_run_and_a_single_trace_file_are_separate_entries(tmp_path):
    run = _run(tmp_path / "today")
    listed = run_catalog.list_runs([str(run), str(run / "rank00000.pt.trace.json.gz")]).entries
    assert [entry.name for entry in listed] == ["today", "rank00000.pt.trace.json.gz"]


def test_entries_with_the_same_name_are_numbered(tmp_path):
    listed = run_catalog.list_runs([str(_run(tmp_path / "a" / "run")), str(_run(tmp_path / "b" / "run"))]).entries
    assert [entry.name for entry in listed] == ["run", "run (2)"]


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_path_without_a_run_is_listed_with_its_problem(tmp_path, what):
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    (entry,) = run_catalog.list_runs([str(path)]).entries
    assert str(path) in entry.problem


@pytest.mark.parametrize("content", ["", "[]", '{"model": 3, "world_size": "two"}', "{" * 100])
def test_a_run_with_an_invalid_manifest_is_listed_without_its_values(tmp_path, content):
    run = _run(tmp_path / "run")
    (run / "run.json").write_text(content)
    (entry,) = run_catalog.list_runs([str(tmp_path)]).entries
    assert entry.world_size is None
    assert not entry.problem


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside = _run(tmp_path / "outside" / "secret")
    inside = tmp_path / "inside"
    _run(inside / "own")
    (inside / "link").symlink_to(outside, target_is_directory=True)
    assert [entry.name for entry in run_catalog.list_runs([str(inside)]).entries] == ["own"]


def test_the_stamp_changes_with_the_files(tmp_path):
    run = _run(tmp_path / "run")
    (before,) = run_catalog.list_runs([str(run)]).entries
    file = run / "rank00000.pt.trace.json.gz"
    os.utime(file, ns=(1, 1))
    (touched,) = run_catalog.list_runs([str(run)]).entries
    file.write_bytes(b"y" * 101)
    os.utime(file, ns=(1, 1))
    (grown,) = run_catalog.list_runs([str(run)]).entries
    assert len({before.stamp, touched.stamp, grown.stamp}) == 3


def test_files_of_other_windows_belong_to_the_run(tmp_path):
    run = _run(tmp_path / "run")
    _run(run / "window001")
    (entry,) = run_catalog.list_runs([str(tmp_path)]).entries
    assert (entry.name, entry.files) == ("run", 2)


def test_folders_that_are_not_searched_are_named_with_the_reason(tmp_path):
    runs = tmp_path / "runs"
    _run(runs / "here")
    _run(runs / "a" / "b" / "c" / "too-deep")
    (tmp_path / "elsewhere").mkdir()
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    listing = run_catalog.list_runs([str(runs)])
    assert [entry.name for entry in listing.entries] == ["here"]
    reasons = dict(text.split(": ", 1) for text in listing.skipped)
    assert set(reasons) == {str(runs / "linked"), str(runs / "a" / "b" / "c" / "too-deep")}
    assert "link out of" in reasons[str(runs / "linked")]


def test_an_archive_and_a_folder_of_archives_are_runs_that_open(tmp_path, wording):
    from dashboard import run_store
    from tests.browser import recorded

    recorded.write_run(tmp_path / "whole", kernel="gemm")
    (tmp_path / "runs" / "packed").mkdir(parents=True)
    packed = tmp_path / "runs" / "packed" / "today.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for file in (tmp_path / "whole").iterdir():
            archive.add(file, f"today/{file.name}")
    for path, name in ((packed, "today.tar.gz"), (tmp_path / "runs", "packed")):
        (entry,) = run_catalog.list_runs([str(path)]).entries
        assert (entry.name, entry.files, entry.problem) == (name, 1, "")
        run_store.check(entry)
        (checked,) = run_catalog.list_runs([str(path)]).entries
        assert checked.summary.ranks == 2
        wording(checked.summary.first_finding)
        opened = run_store.open_run(checked)
        assert opened.run.traces().__next__().steps.height == len(recorded.STEPS)  # read again, after the check


def test_memory_snapshots_without_traces_are_runs_that_only_the_page_memory_shows(tmp_path, wording):
    oom = [f"oom/rank{rank:05d}.memory.pickle" for rank in (0, 1)]
    for name in (*oom, "iteration_10/rank0_memory_snapshot.pickle"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x80\x04.")
    _run(tmp_path / "whole")
    (tmp_path / "whole" / "rank00000.memory.pickle").write_bytes(b"\x80\x04.")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.pkl").write_bytes(b"\x80\x04.")
    found = {entry.name: entry for entry in run_catalog.list_runs([str(tmp_path)]).entries}
    assert {name: entry.snapshots for name, entry in found.items()} == {"iteration_10": 1, "oom": 2, "whole": 0}
    wording(found["oom"].problem)
    assert not found["whole"].problem
    (alone,) = run_catalog.list_runs([str(tmp_path / "weights" / "model.pkl")]).entries
    assert alone.snapshots == 1


def test_a_snapshot_that_is_a_link_elsewhere_is_not_shown(tmp_path, wording):
    outside = tmp_path / "outside.memory.pickle"
    outside.write_bytes(b"\x80\x04.")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank00000.memory.pickle").symlink_to(outside)
    (entry,) = run_catalog.list_runs([str(tmp_path / "run")]).entries
    assert entry.snapshots == 0
    wording(entry.problem)
