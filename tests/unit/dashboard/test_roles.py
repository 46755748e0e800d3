"""Roles of a job in the dashboard: each is listed as a run, and the timeline can draw all of them."""

import json
import shutil
from pathlib import Path

import pytest

from dashboard import run_catalog, runs_table
from tests.support.dashboard_pages import component, page
from tracekit.ingest import disk_cache
from tracekit.rules import report_cache

RECORDING = Path(__file__).parents[2] / "recordings" / "roles"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    for name in ("rollout", "trainer"):
        shutil.copytree(RECORDING / name, folder / name)
    return folder


def place_labels(timeline_page):
    sent = component(timeline_page, "timeline").bytes
    return json.loads(sent[4 : 4 + int.from_bytes(sent[:4], "little")])["places"]


def test_the_timeline_draws_the_other_role_on_request(folder):
    shown = page("timeline", folder)
    assert not shown.exception
    (toggle,) = [toggle for toggle in shown.toggle if toggle.label == "With trainer"]
    assert place_labels(shown) == {}
    with_roles = toggle.set_value(True).run()
    assert not with_roles.exception
    assert place_labels(with_roles) == {"0": "rollout rank 0", "1": "trainer rank 0", "2": "trainer rank 1"}


def listed_roles(folder):
    entries = run_catalog.list_runs([str(folder)]).entries
    return dict(runs_table.table(entries).select("run", "role").iter_rows())


def test_the_list_says_which_role_a_run_is_of(folder):
    assert listed_roles(folder) == {"rollout": "rollout", "trainer": "trainer"}


def test_the_list_says_how_many_roles_the_files_of_a_folder_are_of(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "job"
    folder.mkdir()
    for file in RECORDING.rglob("*.json.gz"):
        shutil.copy(file, folder / f"{file.parent.name}-{file.name}")
    report_cache.report(str(folder))
    assert listed_roles(folder) == {"job": "trainer (1 of 2 roles)"}


def test_a_run_without_a_role_has_no_such_choice(folder, tmp_path):
    for name in ("rollout", "trainer"):
        shutil.copytree(folder / name, tmp_path / name)
        manifest = json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))
        del manifest["role"]
        (tmp_path / name / "run.json").write_text(json.dumps(manifest))
    shown = page("timeline", tmp_path)
    assert not shown.exception
    assert [toggle for toggle in shown.toggle if toggle.label.startswith("With ")] == []
