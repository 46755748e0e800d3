"""A file to report a crash with: the traceback, and a small scrubbed run on which the command fails in the same way."""

import contextlib
import getpass
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.conventions import VERSION, python_child, regular_files
from tracekit.model import units

LIMIT = "TRACEKIT_CRASH_REPORT"
"""The variable with the most seconds that a small run may take; with 0, no file is written."""
_DEFAULT_LIMIT_S, _MAX_LIMIT_S = 30.0, 3600.0
REPEATED = frozenset({"check", "summary", "kernels", "memory", "whatif", "query"})
"""Commands that can be repeated: without the options that name files they only read and print."""
FOUND = "found-"
_REPRODUCTION = "tracekit.cli.reproduction"
_ROOT = Path(__file__).parents[1]
_MAX_MESSAGE, _MAX_FRAMES = 1000, 100


@dataclass(frozen=True)
class CrashReport:
    """The file written, and what is in it in words."""

    path: Path
    content: str


def write(error: Exception, words: Sequence[str]) -> CrashReport | None:
    """Write a zip file to report an error of the command `words` with, to the folder of temporary files.

    It has no path, user or host name. Finding a small run takes at most 30 s, or what TRACEKIT_CRASH_REPORT states, or
    until Ctrl-C. None if the file cannot be written, or if TRACEKIT_CRASH_REPORT is 0.
    """
    limit_s = _limit_s()
    if limit_s <= 0:
        return None
    if sys.stderr.isatty():
        sys.stderr.write(
            f"tracekit: looking for a small example of an internal error, {limit_s:.0f} s; Ctrl-C ends it\n"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="tracekit-crash-") as folder:
            run = _small_run(error, words, Path(folder), limit_s)
            parts = [path for path in sorted(run.rglob("*")) if path.is_file()] if run else []
            number, name = tempfile.mkstemp(prefix="tracekit-crash-", suffix=".zip")
            with os.fdopen(number, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("report.json", _scrub(_report(error, words)))
                for path in parts:
                    archive.write(path, Path("run") / path.relative_to(run or path))
            what = f"the traceback and {_size(parts)} on which the command fails" if parts else "the traceback"
    except Exception:  # noqa: BLE001 the error itself must be shown in any case
        return None
    return CrashReport(Path(name), f"{what}, without names and paths")


def place_of(error: BaseException) -> str:
    """Return the type of an error's first cause, and the places in tracekit and elsewhere that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT)]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*ours[-1:], *frames[-1:])]
    return " ".join((type(error).__name__, *places))


def _limit_s() -> float:
    try:
        limit_s = float(os.environ.get(LIMIT, ""))
    except ValueError:
        return _DEFAULT_LIMIT_S
    return min(limit_s, _MAX_LIMIT_S) if limit_s >= 0 else _DEFAULT_LIMIT_S


def _small_run(error: Exception, words: Sequence[str], folder: Path, limit_s: float) -> Path | None:
    """Return the folder of the smallest run that was found; None if none was."""
    if isinstance(error, MemoryError) or not REPEATED & set(words):
        return None
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    variables |= {LIMIT: "0", "TRACEKIT_CACHE_DIR": str(folder / "cache")}
    variables = python_child.environment(variables)
    command = python_child.module_command(_REPRODUCTION, str(folder), place_of(error), *words)
    silent = subprocess.DEVNULL
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        subprocess.run(  # noqa: S603  the command of this process
            command, env=variables, timeout=limit_s, check=False, stdin=silent, stdout=silent, stderr=silent
        )
    return max(folder.glob(f"{FOUND}*"), default=None)


def _size(files: Sequence[Path]) -> str:
    events = sum(regular_files.read_bytes(path).count(b'"ph"') for path in files)
    return f"{units.count(len(files), 'file')} with {units.count(events, 'event')}"


def _report(error: Exception, words: Sequence[str]) -> dict[str, object]:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = str(cause)
    command = next((word for word in words if not word.startswith("-")), "")
    paths = {word for word in words if word and _is_path(word) and (word != command or "/" in word)}
    for path in sorted(paths, key=len, reverse=True):
        message = message.replace(path, "PATH")
    return {
        "schema": "tracekit.crash/1",
        "tracekit": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "command": ["PATH" if word in paths else word for word in words],
        "error": type(cause).__name__,
        "message": message[:_MAX_MESSAGE],
        "traceback": [
            f"{_module(frame.filename)}:{frame.lineno} in {frame.name}" for frame in _frames(error)[-_MAX_FRAMES:]
        ],
    }


def _is_path(word: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return "/" in word or os.sep in word or Path(word).exists()
    return True


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Return the frames of an error and of its causes, the outermost first."""
    frames: list[traceback.FrameSummary] = []
    while error is not None:
        frames += traceback.extract_tb(error.__traceback__)
        error = error.__cause__
    return frames


def _module(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_ROOT.parent)) if path.is_relative_to(_ROOT) else path.name


def _scrub(report: dict[str, object]) -> bytes:
    """Return a report as JSON without paths and names; without its texts where they would still have some."""
    from tracekit.ingest.scrub.secrets import HOST, USER, Secrets

    secrets = Secrets()
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        secrets.add(USER, json.dumps(getpass.getuser())[1:-1].encode())
    secrets.add(HOST, json.dumps(socket.gethostname())[1:-1].encode())
    text = json.dumps(report, indent=1).encode()
    secrets.learn(text)
    hidden = secrets.hide(text)
    if secrets.find_leaks(hidden):
        return json.dumps({**report, "message": "", "command": []}, indent=1).encode()
    return hidden
