import json
import os

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
