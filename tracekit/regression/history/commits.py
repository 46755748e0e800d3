"""Which commit was trained: as CI says in its environment, else as git says where the folder is a checkout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tracekit.conventions import git

MAX_TEXT = 4000

_SHAS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT")  # GitHub, GitLab, Jenkins
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME", "GIT_BRANCH")
_TEXTS = ("CI_COMMIT_MESSAGE",)
_NAME = re.compile(r"[\w./@+][\w./@+-]*")


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
    in_checkout = git.is_checkout(folder)
    stated_sha = sha or _first(environment, _SHAS)
    sha = stated_sha or (git.head(folder) if in_checkout else None)
    branch = branch or _first(environment, _BRANCHES)
    if branch is None and stated_sha is None and in_checkout:
        branch = git.output(folder, "symbolic-ref", "--quiet", "--short", "HEAD") or None
    text = _first(environment, _TEXTS)
    if text is None and in_checkout and sha and _NAME.fullmatch(sha):
        text = git.output(folder, "show", "--no-patch", "--format=%B", "--end-of-options", sha + "^{commit}", "--")
    return Commit(sha, text[:MAX_TEXT] if text else None, branch)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
