"""What git says of a checkout, without running anything that the repository itself names.

A repository's settings can name programs: hooks, a file system monitor, filters of file contents, a way to reach the
server of a partial clone. None of them runs here.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 10.0
_SAFE = (
    "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false",
    "-c", "protocol.allow=never", "--no-pager",
)  # fmt: skip
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C.UTF-8",
}  # fmt: skip
_SHA = re.compile(r"[0-9a-f]{40,64}")


def is_checkout(folder: Path) -> bool:
    """Return whether a folder is in a checkout, and git is installed."""
    return any((place / ".git").exists() for place in (folder, *folder.parents)) and shutil.which("git") is not None


def output(folder: Path, *words: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return the output of a git command in a folder, stripped; None where it fails or takes longer."""
    try:
        done = subprocess.run(  # noqa: S603 the words are ours
            ["git", *_SAFE, *words],  # noqa: S607 the user's own git
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def head(folder: Path, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return the commit of a checkout; None where there is none."""
    sha = output(folder, "rev-parse", "--verify", "--quiet", "HEAD", timeout_s=timeout_s)
    return sha if is_sha(sha) else None


def is_sha(text: object) -> bool:
    """Return whether a value is the full name of a commit."""
    return isinstance(text, str) and _SHA.fullmatch(text) is not None


def has_changes(folder: Path, timeout_s: float = TIMEOUT_S) -> bool | None:
    """Return whether tracked files differ from the commit, submodules aside; None where git cannot say."""
    # Status reads the content of files that may have changed, through the filters that the settings name.
    listed = output(folder, "config", "--null", "--name-only", "--list", timeout_s=timeout_s)
    if listed is None:
        return None
    names = {name.rsplit(".", 1)[0] for name in listed.split("\0") if name.startswith("filter.")}
    if any("=" in name for name in names):
        return None  # -c could not name it
    off = [word for name in sorted(names) for ending in _FILTER for word in ("-c", f"{name}.{ending}")]
    words = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all", "--no-renames")
    changed = output(folder, *off, "status", *words, timeout_s=timeout_s)
    return None if changed is None else bool(changed)


_FILTER = ("clean=", "smudge=", "process=", "required=false")
