"""Merge the files of one run: from other nodes, or from a scratch folder that outlived its training."""

import re
import shutil
from pathlib import Path

from tracekit import conventions
from tracekit.capture import atomic_files

_UNCOMPRESSED = re.compile(r"rank(\d{5,})\.window(\d{3,})\.json")
# A partial file was never completed and does not belong to the run, but a log is valid up to its last line.
_RUN_FILES = re.compile(r"rank\d{5,}\.(?!.*\.partial$)|rank\d{5,}\.metrics\.jsonl\.partial$|run\.json$|\.training$")


def merge_parts(run: Path, parts: list[Path]) -> int:
    """Move the files of the same run that lie in `parts` into `run`; return how many were moved.

    Uncompressed traces are compressed. Raises ValueError where a part belongs to another training or contains a file
    that exists in the run already, OSError where one cannot be read or moved. All checks precede the first move.
    """
    moves: dict[Path, Path] = {}
    names = {
        name for name in (atomic_files.folder_owner(run), *map(atomic_files.folder_owner, parts)) if name is not None
    }
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


def finish(scratch: Path, run: Path, rank: int) -> list[Path]:
    """Move a rank's uncompressed traces from `scratch` into `run`, and return their new paths."""
    moved = []
    for path in sorted(scratch.glob(conventions.rank_file(rank, ".window*.json"))):
        target = run / _path_in_run(Path(path.name))
        atomic_files.compress(path, target)
        moved.append(target)
    return moved


def _path_in_run(path: Path) -> Path:
    """Return the path in the run for a file of a part."""
    match = _UNCOMPRESSED.fullmatch(path.name)
    if match is None:
        return path
    rank, window = int(match[1]), int(match[2])
    name = conventions.rank_file(rank, conventions.TRACE_SUFFIX)
    return Path(conventions.window_folder(window), name) if window else Path(name)


def _move(path: Path, target: Path) -> None:
    if _UNCOMPRESSED.fullmatch(path.name):
        atomic_files.compress(path, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.atomic_write(target) as partial:
        shutil.copyfile(path, partial)
    path.unlink()
