"""``run.json``: what a run was, for readers of its traces."""

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.rank_info import this_world_size
from tracekit.capture.redaction import redact
from tracekit.conventions import git

_GIT_TIMEOUT_S = 3.0
"""On a slow file system, the training starts without knowing its commit."""


class ManifestFile:
    """The manifest of a run being recorded, rewritten whenever more is known. One rank of the run writes it.

    The arguments are those of `manifest`. The methods raise OSError where it cannot be written.
    """

    def __init__(self, folder: Path, provided: Mapping[str, Any], *, device: str, world_size: int | None) -> None:
        self._path = folder / conventions.MANIFEST_FILE
        self._fields = manifest(provided, device=device, world_size=world_size)
        self._windows: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()  # windows are added by the thread that writes them

    def describe(self, more: Mapping[str, Any]) -> None:
        """Add what became known during training, secrets redacted."""
        self._fields = {**self._fields, **redact(dict(more))}
        self.write()

    def add_window(self, window: int, *, first_step: int, steps: int, removed: Iterable[int] = ()) -> None:
        """Add a window that is written, and drop the `removed` ones."""
        self._windows[window] = {"window": window, "first_step": first_step, "steps": steps}
        for number in removed:
            self._windows.pop(number, None)
        self.write()

    def write(self) -> None:
        """Write the manifest."""
        with self._lock:
            windows = [self._windows[number] for number in sorted(self._windows)]
            atomic_files.write_json(self._path, {**self._fields, "windows": windows})


def manifest(provided: Mapping[str, Any], *, device: str, world_size: int | None = None) -> dict[str, Any]:
    """Return the manifest of the run on `device`, cuda or cpu, this process belongs to, secrets redacted.

    `provided` holds what only the training knows (strategy, mesh, model, arguments, …); it overrides what is detected.
    """
    fields = {
        "schema": conventions.RUN_SCHEMA,
        "created_ns": time.time_ns(),
        "strategy": None,
        "world_size": this_world_size() if world_size is None else world_size,
        "mesh": None,
        "model": None,
        "arguments": None,
        "versions": _versions(device),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "host": socket.gethostname(),
        "command": [os.path.basename(sys.argv[0]) if sys.argv else "", *sys.argv[1:]],  # noqa: PTH119 may be "-c"
        "simulated": False,
    }
    clean: dict[str, Any] = redact({**fields, **provided})
    # After the redaction, which takes the name of a commit for a key.
    return clean | _commit(provided.get("commit"))


def _commit(commit: object) -> dict[str, Any]:
    """Return the commit of the working directory, and whether tracked files differ from it; null where unknown."""
    if commit is not None:
        return {"commit": commit} if git.is_sha(commit) else {}
    folder = Path.cwd()
    sha = git.head(folder, _GIT_TIMEOUT_S) if git.is_checkout(folder) else None
    changed = None if sha is None else git.has_changes(folder, _GIT_TIMEOUT_S)
    return {"commit": sha, "uncommitted_changes": changed}


def _versions(device: str) -> dict[str, str | None]:
    nccl = torch.cuda.nccl.version() if device == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(str(part) for part in nccl) if nccl else None,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 no path to compose
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
