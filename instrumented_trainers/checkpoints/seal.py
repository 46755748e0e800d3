"""The seal of a checkpoint: written last, with the checksum of every file.

torch detects a missing or truncated file, but silently loads one whose bytes have changed. A checkpoint without a
seal is incomplete; one whose files do not match its seal is damaged.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instrumented_trainers.config import TrainingConfig
from tracekit.conventions.strategies import CP, PP, TP, Layout

SEAL_FILE = "seal.json"
_PARTIAL = SEAL_FILE + ".partial"


@dataclass(frozen=True)
class Seal:
    """What was saved, by which training, and what the files must look like."""

    step: int
    """Optimizer steps done."""
    sequences: int
    """Sequences of the text that all ranks together have trained on: where the data goes on."""
    strategy: str
    world_size: int
    arguments: Mapping[str, Any]
    """What the result of the training depends on, as `resume.training_arguments` gives it."""
    lineage: tuple[Mapping[str, Any], ...] = ()
    """The checkpoints that the training itself resumed from, oldest first."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: bytes and sha256."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """How the ranks were laid out, by axis; empty: in data-parallel ranks only."""

    @property
    def data_ranks(self) -> int:
        """Return among how many ranks the text was divided."""
        return Layout(**self.layout).data_ranks if self.layout else self.world_size

    def has_places_of(self, config: TrainingConfig) -> bool:
        """Return whether each rank of a training has the place in the mesh, and so the data, of a rank that saved."""
        now = asdict(config.layout)
        same = all(self.layout.get(axis, 1) == now[axis] for axis in (PP, CP, TP))
        return same and self.world_size == config.world_size


class InvalidSealError(ValueError):
    """A seal cannot be read, or does not match its own checksum."""


def complete(folder: Path) -> list[Path]:
    """Return the sealed checkpoints under `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_sealed(path))


def unfinished_saves(folder: Path) -> list[Path]:
    """Return the checkpoints under `folder` whose save did not finish, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not is_sealed(path))


def is_sealed(path: Path) -> bool:
    """Return whether there is a checkpoint at `path` whose save finished."""
    return (path / SEAL_FILE).is_file()


def write(path: Path, seal: Seal) -> None:
    """Seal the checkpoint at `path`, durably: all names in the folder are on disk when the seal has its own."""
    fields = {**asdict(seal), "lineage": list(seal.lineage)}
    partial = path / _PARTIAL
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(fields), **fields}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / SEAL_FILE)
    _sync_folder(path)
    _sync_folder(path.parent)


def read(path: Path) -> Seal:
    """Return the seal of the checkpoint at `path`. Raises BrokenSealError if it cannot be trusted."""
    try:
        fields = json.loads((path / SEAL_FILE).read_text(encoding="utf-8"))
        expected = fields.pop("sha256")
        seal = Seal(**{**fields, "lineage": tuple(fields["lineage"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidSealError(f"{SEAL_FILE}: {error}") from error
    if _digest(fields) != expected:
        raise InvalidSealError(f"{SEAL_FILE}: it has changed since it was written")
    return seal


def describe(path: Path, name: str, *, sync: bool = False) -> dict[str, Any]:
    """Return bytes and sha256 of a file of the checkpoint at `path`; with `sync`, after it is on disk."""
    with (path / name).open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(path: Path, name: str, expected: Mapping[str, Any]) -> str | None:
    """Damage to a file of the checkpoint at `path`, with the rank that wrote it; None where it is intact."""
    file = f"rank {_writer(name)}: {name}"
    try:
        actual = describe(path, name)
    except OSError as error:
        return f"{file}: {error.strerror}"
    if actual["bytes"] != expected["bytes"]:
        return f"{file} has {actual['bytes']:,} bytes, {expected['bytes']:,} were saved"
    return None if actual["sha256"] == expected["sha256"] else f"{file} differs from the saved file"


def _writer(name: str) -> int:
    """Return the rank that wrote a file; what is no shard is rank 0's."""
    shard = re.match(r"__(\d+)_", name)
    return int(shard[1]) if shard else 0


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    # A file's name is in its folder, and that has to reach the disk too.
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
