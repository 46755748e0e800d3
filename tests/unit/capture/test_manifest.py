"""What the manifest says of the code that was trained."""

import json
import shutil
import subprocess

import pytest

pytest.importorskip("torch")

from tracekit.capture import Recorder
from tracekit.capture.manifest import manifest

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_it_names_the_commit_of_the_working_directory_and_whether_files_changed(tmp_path, monkeypatch):
    def git(*words):
        author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "Start")
    monkeypatch.chdir(tmp_path)
    written = manifest({}, device="cpu")
    assert (written["commit"], written["uncommitted_changes"]) == (git("rev-parse", "HEAD").strip(), False)
    (tmp_path / "train.py").write_text("lr = 2\n")
    assert manifest({}, device="cpu")["uncommitted_changes"] is True


def test_outside_of_a_checkout_and_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = manifest({}, device="cpu")
    assert (written["commit"], written["uncommitted_changes"]) == (None, None)
    (tmp_path / ".git").mkdir()
    assert manifest({}, device="cpu")["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest({}, device="cpu")["commit"] is None


def test_a_commit_that_the_training_states_is_used_and_anything_else_is_redacted_as_before():
    assert manifest({"commit": SHA}, device="cpu")["commit"] == SHA
    assert manifest({"commit": "github_pat_" + "a1" * 20}, device="cpu")["commit"] == "[redacted]"


@pytest.mark.parametrize(
    ("variables", "role"),
    [
        ({"TRACEKIT_ROLE": "rollout", "ROLE_NAME": "worker"}, "rollout"),
        ({"ROLE_NAME": "actor"}, "actor"),
        ({"ROLE_NAME": "default"}, None),  # torchrun without --role
        ({}, None),
    ],
)
def test_the_role_is_that_of_the_environment(variables, role, monkeypatch):
    for name in ("TRACEKIT_ROLE", "ROLE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert manifest({}, device="cpu").get("role") == role
    assert manifest({"role": "trainer"}, device="cpu")["role"] == "trainer"


def test_a_recorder_states_its_role(tmp_path):
    with Recorder(tmp_path, role="rollout", steps=None, device="cpu"):
        pass
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["role"] == "rollout"
