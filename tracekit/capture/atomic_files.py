"""Files of a run: complete when they get their final name, in a folder that one training claims, merged from parts."""

import contextlib
import errno
import gzip
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.conventions import plain_pickles, redaction, regular_files

_appending = threading.Lock()
_LEVEL = 6  # on traces far faster than Python's default of 9, for a few percent more bytes
_MAX_FOLDERS = 1000
_PIECE_BYTES = 1 << 17  # a piece stops the training's Python for about 2 ms
_PRIVATE = 0o600
_PATIENCE_S = 2.0

_UNCOMPRESSED = re.compile(r"rank(\d{5,})\.window(\d{3,})\.json")
# A partial file was never completed and does not belong to the run, but a log is valid up to its last line.
_RUN_FILES = re.compile(
    r"rank\d{5,}\.(?!.*\.partial$)|rank\d{5,}\.metrics\.jsonl\.partial$|run\.json$|attempts\.jsonl$|\.training$"
)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a partial name to write to; rename it to `path` when the block ends, remove it if the block raises."""
    partial = path.with_name(path.name + conventions.PARTIAL_SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, readable by this user only: it can have hosts, paths and settings."""
    with atomic_write(path) as partial:
        partial.unlink(missing_ok=True)
        partial.touch(mode=_PRIVATE)
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add `rows` to a JSON-lines file, secrets redacted, all of them or none. Raises OSError if that fails."""
    _append(path, redaction.redact(_json_lines(rows)))


def append_numbers(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add `rows` as `append_lines` does; their values are numbers, and to look for secrets takes most of the time."""
    _append(path, _json_lines(rows))


def _json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()


def _append(path: Path, text: bytes) -> None:
    """Add lines to a file; other threads and processes may append at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _appending, path.open("ab", buffering=0) as lines:
        before = lines.tell()
        try:
            if lines.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            lines.truncate(before)
            raise


def compress(source: Path, target: Path) -> None:
    """Write `source`, a trace, to `target` through gzip without secrets, and remove it."""
    redactor = redaction.Redactor(lambda _, __: redaction.REDACTED)
    rest = b""
    try:
        with (
            atomic_write(target) as partial,
            regular_files.open_to_read(source) as plain,
            gzip.open(partial, "wb", _LEVEL) as packed,
        ):
            while piece := plain.read(_PIECE_BYTES):
                text = rest + piece
                end = redaction.safe_end(text)
                packed.write(redactor.redact(text[:end]))
                rest = text[end:]
            packed.write(redactor.redact(rest))
    except BaseException:
        # The compressed copy failed: a complete uncompressed file in a scratch folder stays.
        if source.name.endswith(conventions.PARTIAL_SUFFIX):
            source.unlink()
        raise
    source.unlink()


def redact_pickle(path: Path) -> None:
    """Replace secrets in a pickle of plain values, such as a memory snapshot. Raises ValueError for another pickle."""
    clean = path.with_name(f"{path.name}{conventions.PARTIAL_SUFFIX}")
    try:
        plain_pickles.write(path, clean, redaction.Redactor(lambda _, __: redaction.REDACTED).redact)
        clean.replace(path)
    finally:
        clean.unlink(missing_ok=True)


def uncompressed_name(rank: int, window: int) -> str:
    """Return the name of an uncompressed trace in a scratch folder.

    >>> uncompressed_name(3, 1)
    'rank00003.window001.json'
    """
    return conventions.rank_file(rank, f".{conventions.window_folder(window)}.json")


def claim_folder(out: Path, training: str) -> Path:
    """Folder for `training`, a name that its ranks share: `out`, else ``out-2``, ``out-3``, ….

    A folder is free if it is empty or does not exist. It is then marked as this training's: ranks on other nodes find
    it, and other trainings skip it. Raises OSError where none can be written.
    """
    for number in range(1, _MAX_FOLDERS):
        folder = out if number == 1 else out.with_name(f"{out.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / conventions.CLAIM_FILE
        present = [path.name for path in folder.iterdir()]
        if mark.name not in present and present:
            continue  # a run without a claim
        if mark.name not in present and _try_create(mark, training):
            return folder
        if folder_owner(folder) == training:
            return folder
    raise FileExistsError(f"{out} to {out.name}-{_MAX_FOLDERS - 1} are all in use")


def folder_owner(folder: Path) -> str | None:
    """Name of the training that claimed a folder; None if none did."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            text = regular_files.read_text(folder / conventions.CLAIM_FILE)
        except OSError:
            return None
        if text or time.monotonic() > deadline:  # empty between creation and writing
            return text or None
        time.sleep(0.01)


def merge_parts(run: Path, parts: list[Path]) -> int:
    """Move the files of the same run that lie in `parts` into `run`; return how many were moved.

    Uncompressed traces are compressed. Raises ValueError where a part belongs to another training or contains a file
    that exists in the run already, OSError where one cannot be read or moved. All checks precede the first move.
    """
    moves: dict[Path, Path] = {}
    names = {name for name in (folder_owner(run), *map(folder_owner, parts)) if name is not None}
    if len(names) > 1:
        raise ValueError(f"{run} and its parts belong to different trainings: nothing was moved")
    for part in parts:
        if not part.is_dir():
            raise ValueError(f"{part}: no such folder; check the path")
        files = [path for path in sorted(part.rglob("*")) if path.is_file() and _RUN_FILES.match(path.name)]
        if not files:
            raise ValueError(f"{part}: contains no file of a run (rank….pt.trace.json.gz, run.json); nothing was moved")
        for path in files:
            target = run / _path_in_run(path.relative_to(part))
            existing = moves.get(target, target)
            if existing.exists() and path.name not in (conventions.MANIFEST_FILE, conventions.CLAIM_FILE):
                raise ValueError(f"{path} and {existing} are the same file of the run: remove one; nothing was moved")
            if not existing.exists():
                moves[target] = path
    run.mkdir(parents=True, exist_ok=True)
    for target, path in moves.items():
        _move(path, target)
    return len(moves)


def move_traces(scratch: Path, run: Path, rank: int) -> list[Path]:
    """Move a rank's uncompressed traces from `scratch` into `run`, and return their new paths."""
    moved = []
    for path in sorted(scratch.glob(conventions.rank_file(rank, ".window*.json"))):
        target = run / _path_in_run(Path(path.name))
        compress(path, target)
        moved.append(target)
    return moved


def _try_create(mark: Path, training: str) -> bool:
    try:
        with mark.open("x", encoding="utf-8") as file:
            file.write(training)
    except FileExistsError:
        return False
    return True


def _path_in_run(path: Path) -> Path:
    match = _UNCOMPRESSED.fullmatch(path.name)
    if match is None:
        return path
    rank, window = int(match[1]), int(match[2])
    name = conventions.rank_file(rank, conventions.TRACE_SUFFIX)
    return Path(conventions.window_folder(window), name) if window else Path(name)


def _move(path: Path, target: Path) -> None:
    if _UNCOMPRESSED.fullmatch(path.name):
        compress(path, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as partial:
        shutil.copyfile(path, partial)
    path.unlink()
