"""Which commit was trained: as CI says in its environment, else as git says where the folder is a checkout."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_TEXT = 4000

_SHAS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT")  # GitHub, GitLab, Jenkins
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME", "GIT_BRANCH")
_TEXTS = ("CI_COMMIT_MESSAGE",)
_NAME = re.compile(r"[\w./@+][\w./@+-]*")
_TIMEOUT_S = 10
# Nothing that a repository's own settings could have git run.
_SAFE = ("-c", "core.fsmonitor=false", "-c", "log.showSignature=false", "--no-pager")


@dataclass(frozen=True)
class Commit:
    """A commit by its name, its message and the branch it was trained on; None where not known."""

    sha: str | None = None
    text: str | None = None
    branch: str | None = None


def known_commit(
    environment: Mapping[str, str], folder: Path, *, sha: str | None = None, branch: str | None = None
) -> Commit:
    """Return the commit that is trained: as given, else from CI's environment, else from the checkout `folder`."""
    in_checkout = any((place / ".git").exists() for place in (folder, *folder.parents)) and shutil.which("git")
    given = sha or _first(environment, _SHAS)
    sha = given or (_git(folder, "rev-parse", "--verify", "--quiet", "HEAD") if in_checkout else None)
    branch = branch or _first(environment, _BRANCHES)
    if branch is None and given is None and in_checkout:
        branch = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    text = _first(environment, _TEXTS)
    if text is None and in_checkout and sha and _NAME.fullmatch(sha):
        text = _git(folder, "show", "--no-patch", "--format=%B", "--end-of-options", sha + "^{commit}", "--")
    return Commit(sha, text and text[:MAX_TEXT], branch)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says; None where it says nothing."""
    try:
        done = subprocess.run(  # noqa: S603 the words are ours, and a commit's name that was looked at
            ["git", *_SAFE, *words],  # noqa: S607 the user's own git
            cwd=folder,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() or None if done.returncode == 0 else None
