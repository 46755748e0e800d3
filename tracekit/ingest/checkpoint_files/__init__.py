"""Verify checkpoints on disk, without torch and without executing anything in them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.ingest import untrusted_json
from tracekit.ingest.checkpoint_files import formats
from tracekit.ingest.checkpoint_files.formats import DAMAGED, UNREADABLE, WHOLE, Part, Problem, VerifiedCheckpoint

__all__ = ["DAMAGED", "UNREADABLE", "WHOLE", "Problem", "VerifiedCheckpoint", "verify"]

_MAX_DEPTH = 4
_SEAL_FILE = "seal.json"  # of the instrumented trainers: size and SHA-256 of each file, written last
_CHECKED = (formats.ZIP_SUFFIXES, (formats.SAFETENSORS_SUFFIX, formats.INDEX_SUFFIX, formats.SHARD_SUFFIX))
_SUFFIXES = tuple(suffix for suffixes in _CHECKED for suffix in suffixes)
_NAMES = (_SEAL_FILE, formats.METADATA_FILE)


def verify(path: Path) -> list[VerifiedCheckpoint]:
    """Return each checkpoint at `path` and below, by name, with its problems.

    A checkpoint is a folder that holds a seal of our trainers, a `.metadata` or shards of torch.distributed.checkpoint,
    .safetensors files, or files of torch.save; or such a file alone. Raises InputError if there is none.
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder; check the path")
    if path.is_file():
        return _with_remedies([formats.combine(str(path), [_one_file(path)])])
    verified = [formats.combine(str(folder), _parts(folder)) for folder in _folders(path, depth=0)]
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
    if any(child.name in _NAMES or child.name.endswith(_SUFFIXES) for child in children if not child.is_dir()):
        yield folder
    for child in children:
        if depth < _MAX_DEPTH and child.is_dir() and not child.is_symlink():
            yield from _folders(child, depth=depth + 1)


def _parts(folder: Path) -> list[Part]:
    names = sorted(child.name for child in folder.iterdir() if not child.is_dir())  # a pipe is damage
    parts = []
    if _SEAL_FILE in names:
        return [_check_seal(folder)]
    if formats.METADATA_FILE in names:
        parts.append(formats.check_distributed(folder))
    shards = [name for name in names if name.endswith(formats.SHARD_SUFFIX)]
    if shards and not parts:
        what = f"is missing, and {len(shards)} shards are there: the save did not end, or is under way"
        parts.append(Part("torch.distributed.checkpoint", (formats.problem(formats.METADATA_FILE, what),)))
    if parts and any((other / _SEAL_FILE).is_file() for other in folder.parent.iterdir() if other != folder):
        what = "is missing, but other checkpoints here have one: the save did not end, or is under way"
        parts.append(Part("seal", (formats.problem(_SEAL_FILE, what),)))
    tensors = [name for name in names if name.endswith(formats.SAFETENSORS_SUFFIX)]
    indexes = [name for name in names if name.endswith(formats.INDEX_SUFFIX)]
    if tensors or indexes:
        parts.append(formats.check_safetensors(folder, tensors, indexes))
    saved = [name for name in names if name.endswith(formats.ZIP_SUFFIXES)]
    if saved:
        parts.append(formats.check_zip_archives(folder, saved))
    return parts


def _one_file(path: Path) -> Part:
    if path.name.endswith(formats.SAFETENSORS_SUFFIX):
        return formats.check_safetensors(path.parent, [path.name], [])
    if not path.name.endswith(formats.ZIP_SUFFIXES):
        raise InputError(f"{path}: is no checkpoint: name its folder, or a file *{', *'.join(formats.ZIP_SUFFIXES)}")
    return formats.check_zip_archives(path.parent, [path.name])


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
        if checkpoint.status == formats.UNREADABLE:
            remedy = "make the files readable to you and verify again, before it is loaded"
        done.append(checkpoint if checkpoint.status == WHOLE else replace(checkpoint, remedy=remedy))
    return done


def _check_seal(folder: Path) -> Part:
    """Return the problems of a sealed checkpoint."""
    try:
        seal = untrusted_json.parse(regular_files.read_bytes(folder / _SEAL_FILE))
        digest, files = seal.pop("sha256"), seal["files"]
        computed_digest = hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()
        sizes = {name: _stated_bytes(expected) for name, expected in files.items()}
    except OSError as error:
        return Part("seal", (formats.unreadable(_SEAL_FILE, error),))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Part("seal", (formats.problem(_SEAL_FILE, f"is damaged ({error})"),))
    if computed_digest != digest:
        return Part("seal", (formats.problem(_SEAL_FILE, "is damaged: its words have changed since it was written"),))
    wrong = {name: _damage_of_sealed(folder, name, expected) for name, expected in files.items()}
    return Part(
        "seal",
        tuple(problem for problem in wrong.values() if problem),
        files=len(files),
        total_bytes=sum(sizes.values()),
        checked_bytes=sum(size for name, size in sizes.items() if not wrong[name]),
    )


def _stated_bytes(expected: Any) -> int:
    """Return the stated size of a file. Raises KeyError or TypeError if an entry is not of a seal."""
    if type(expected["bytes"]) is not int or not isinstance(expected["sha256"], str):
        raise TypeError("an entry without size and sha256")
    return int(expected["bytes"])


def _damage_of_sealed(folder: Path, name: str, expected: Mapping[str, Any]) -> Problem | None:
    if Path(name).name != name:
        return formats.problem(name, "lies outside of the checkpoint: the seal is not ours")
    try:
        with regular_files.open_to_read(folder / name) as file:
            size = regular_files.size(file)
            if size != expected["bytes"]:
                how = "it was cut" if size < expected["bytes"] else "something was added"
                return formats.problem(name, f"has {size:,} bytes, {expected['bytes']:,} were saved: {how}")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return formats.unreadable(name, error)
    return None if digest == expected["sha256"] else formats.problem(name, "holds other bytes than were saved")
