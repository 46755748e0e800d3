"""What a checkout says of itself, also where its settings name programs to run."""

import shutil
import subprocess

import pytest

from tracekit.conventions import git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    _git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "Start")
    return folder


def _git(folder, *words):
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_commit_and_whether_tracked_files_differ_from_it(checkout):
    assert git.is_checkout(checkout)
    assert git.head(checkout) == _git(checkout, "rev-parse", "HEAD").strip()
    assert git.has_changes(checkout) is False
    (checkout / "notes").write_text("not tracked\n")
    assert git.has_changes(checkout) is False
    (checkout / "train.py").write_text("lr = 2\n")
    assert git.has_changes(checkout) is True


def test_nothing_is_known_outside_of_a_checkout_of_a_repository_without_commits_and_of_a_broken_one(tmp_path):
    assert not git.is_checkout(tmp_path)
    assert git.head(tmp_path) is None
    _git(tmp_path, "init", "-q")
    assert git.head(tmp_path) is None
    (tmp_path / ".git" / "config").write_text("[core\n")
    assert git.head(tmp_path) is None
    assert git.has_changes(tmp_path) is None


def test_no_program_of_the_repository_runs(checkout, tmp_path):
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho x >> {ran}\ncat\n")
    program.chmod(0o755)
    hooks = checkout / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout"):
        shutil.copy(program, hooks / name)
    for name in ("core.fsmonitor", "core.sshCommand", "filter.e v.il.clean", "filter.e v.il.process"):
        _git(checkout, "config", name, str(program))
    _git(checkout, "config", "filter.e v.il.required", "true")
    (checkout / ".gitattributes").write_text("* filter=e\\040v.il\n")
    (checkout / ".git" / "info").mkdir(exist_ok=True)
    (checkout / ".git" / "info" / "attributes").write_text("*.py filter=quiet\n")
    _git(checkout, "config", "filter.quiet.clean", str(program))
    (checkout / "train.py").write_text("lr = 3\n")  # of the same size: only its content differs
    assert git.head(checkout)
    assert git.has_changes(checkout) is True
    assert not ran.exists()
    # What ran would have been seen: without our precautions, it does.
    subprocess.run(["git", "status"], cwd=checkout, check=False, capture_output=True)
    assert ran.exists()
