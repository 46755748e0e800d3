"""Roles of a job in the dashboard: each is listed as a run, and the timeline can draw all of them."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.dashboard_pages import component, page

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


def test_a_run_without_a_role_has_no_such_choice(folder, tmp_path):
    for name in ("rollout", "trainer"):
        shutil.copytree(folder / name, tmp_path / name)
        manifest = json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))
        del manifest["role"]
        (tmp_path / name / "run.json").write_text(json.dumps(manifest))
    shown = page("timeline", tmp_path)
    assert not shown.exception
    assert [toggle for toggle in shown.toggle if toggle.label.startswith("With ")] == []
