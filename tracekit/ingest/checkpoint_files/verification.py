"""Find the checkpoints at a path and verify each."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tracekit.errors import InputError
from tracekit.ingest.checkpoint_files import distributed, result, safetensors, seals, zip_archives
from tracekit.ingest.checkpoint_files.result import WHOLE, Part, VerifiedCheckpoint

_MAX_DEPTH = 4
_CHECKED = (zip_archives.SUFFIXES, (safetensors.SUFFIX, safetensors.INDEX_SUFFIX, distributed.SHARD_SUFFIX))
_SUFFIXES = tuple(suffix for suffixes in _CHECKED for suffix in suffixes)
_NAMES = (seals.SEAL_FILE, distributed.METADATA_FILE)


def verify(path: Path) -> list[VerifiedCheckpoint]:
    """Return each checkpoint at `path` and below, by name, with its problems.

    A checkpoint is a folder that holds a seal of our trainers, a `.metadata` or shards of torch.distributed.checkpoint,
    .safetensors files, or files of torch.save; or such a file alone. Raises InputError if there is none.
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder; check the path")
    if path.is_file():
        return _with_remedies([result.combine(str(path), [_one_file(path)])])
    verified = [result.combine(str(folder), _parts(folder)) for folder in _folders(path, depth=0)]
    if not verified:
        raise InputError(
            f"{path}: no checkpoint here or up to {_MAX_DEPTH} folders below (looked for {', '.join(_NAMES)}, "
            f"*{', *'.join(_SUFFIXES)})"
        )
    return _with_remedies(verified)


def _folders(folder: Path, *, depth: int) -> Iterator[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    if any(child.name in _NAMES or child.name.endswith(_SUFFIXES) for child in children if child.is_file()):
        yield folder
    for child in children:
        if depth < _MAX_DEPTH and child.is_dir() and not child.is_symlink():
            yield from _folders(child, depth=depth + 1)


def _parts(folder: Path) -> list[Part]:
    names = sorted(child.name for child in folder.iterdir() if child.is_file())
    parts = []
    if seals.SEAL_FILE in names:
        return [seals.check(folder)]
    if distributed.METADATA_FILE in names:
        parts.append(distributed.check(folder))
    shards = [name for name in names if name.endswith(distributed.SHARD_SUFFIX)]
    if shards and not parts:
        what = f"is missing, and {len(shards)} shards are there: the save did not end, or is under way"
        parts.append(Part("torch.distributed.checkpoint", (result.problem(distributed.METADATA_FILE, what),)))
    if parts and _others_are_sealed(folder):
        what = "is missing, but other checkpoints here have one: the save did not end, or is under way"
        parts.append(Part("seal", (result.problem(seals.SEAL_FILE, what),)))
    tensors = [name for name in names if name.endswith(safetensors.SUFFIX)]
    indexes = [name for name in names if name.endswith(safetensors.INDEX_SUFFIX)]
    if tensors or indexes:
        parts.append(safetensors.check(folder, tensors, indexes))
    saved = [name for name in names if name.endswith(zip_archives.SUFFIXES)]
    if saved:
        parts.append(zip_archives.check(folder, saved))
    return parts


def _one_file(path: Path) -> Part:
    if path.name.endswith(safetensors.SUFFIX):
        return safetensors.check(path.parent, [path.name], [])
    if not path.name.endswith(zip_archives.SUFFIXES):
        raise InputError(f"{path}: is no checkpoint: name its folder, or a file *{', *'.join(zip_archives.SUFFIXES)}")
    return zip_archives.check(path.parent, [path.name])


def _others_are_sealed(folder: Path) -> bool:
    return any((other / seals.SEAL_FILE).is_file() for other in folder.parent.iterdir() if other != folder)


def _with_remedies(verified: list[VerifiedCheckpoint]) -> list[VerifiedCheckpoint]:
    """Add the remedy to each checkpoint that is not whole: load the last whole one before it, or the next after it."""
    done = []
    for number, checkpoint in enumerate(verified):
        before = [other.path for other in verified[:number] if other.status == WHOLE]
        after = [other.path for other in verified[number + 1 :] if other.status == WHOLE]
        usable = before[-1:] or after[:1]
        way = f"go on from {usable[0]}, which is whole" if usable else "no other checkpoint here is whole"
        remedy = f"do not load it; restore what is wrong from a copy, or {way}" if usable else (
            f"do not load it; restore what is wrong from a copy ({way})"
        )  # fmt: skip
        if checkpoint.status == result.UNREADABLE:
            remedy = "make the files readable to you and verify again, before it is loaded"
        done.append(checkpoint if checkpoint.status == WHOLE else replace(checkpoint, remedy=remedy))
    return done
