"""The seal of the instrumented trainers: size and SHA-256 of each file of a checkpoint, written last."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracekit.ingest import untrusted_json
from tracekit.ingest.checkpoint_files import result
from tracekit.ingest.checkpoint_files.result import Part, Problem

SEAL_FILE = "seal.json"


def check(folder: Path) -> Part:
    """Return the problems of a sealed checkpoint."""
    try:
        seal = untrusted_json.parse((folder / SEAL_FILE).read_bytes())
        digest, files = seal.pop("sha256"), seal["files"]
        computed_digest = hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()
        sizes = {name: _stated_bytes(expected) for name, expected in files.items()}
    except OSError as error:
        return Part("seal", (result.unreadable(SEAL_FILE, error),))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Part("seal", (result.problem(SEAL_FILE, f"is damaged ({error})"),))
    if computed_digest != digest:
        return Part("seal", (result.problem(SEAL_FILE, "is damaged: its words have changed since it was written"),))
    wrong = {name: _damage(folder, name, expected) for name, expected in files.items()}
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


def _damage(folder: Path, name: str, expected: Mapping[str, Any]) -> Problem | None:
    if Path(name).name != name:
        return result.problem(name, "lies outside of the checkpoint: the seal is not ours")
    try:
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            how = "it was cut" if size < expected["bytes"] else "something was added"
            return result.problem(name, f"has {size:,} bytes, {expected['bytes']:,} were saved: {how}")
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return result.unreadable(name, error)
    return None if digest == expected["sha256"] else result.problem(name, "holds other bytes than were saved")
