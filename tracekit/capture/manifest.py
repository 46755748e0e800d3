"""``run.json``: what a run was, for readers of its traces, without secrets: keys, logins in URLs."""

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.rank_info import ranks_of_host, this_role, this_world_size
from tracekit.conventions import git, redaction

_GIT_TIMEOUT_S = 3.0
"""On a slow file system, the training starts without knowing its commit."""


class ManifestFile:
    """The manifest of a run being recorded, rewritten whenever more is known. One rank of the run writes it.

    The arguments are those of `manifest`. The methods raise OSError where it cannot be written.
    """

    def __init__(self, folder: Path, provided: Mapping[str, Any], *, device: str, world_size: int | None) -> None:
        self._path = folder / conventions.MANIFEST_FILE
        self._fields = manifest(provided, device=device, world_size=world_size)
        self._has_own_determinism = "determinism" in provided
        self._windows: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()  # windows are added by the thread that writes them

    def describe(self, more: Mapping[str, Any]) -> None:
        """Add what became known during training, secrets redacted."""
        self._fields = {**self._fields, **redact(dict(more))}
        self.write()

    def add_window(
        self,
        window: int,
        *,
        first_step: int,
        steps: int,
        removed: Iterable[int] = (),
        reason: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a window that is written, with the outlier that is its `reason`, and drop the `removed` ones."""
        if not self._has_own_determinism:  # a program may choose it after it has made its recorder
            self._fields = {**self._fields, "determinism": determinism()}
        self._windows[window] = {"window": window, "first_step": first_step, "steps": steps}
        if reason is not None:
            self._windows[window]["outlier"] = dict(reason)
        for number in removed:
            self._windows.pop(number, None)
        self.write()

    def write(self) -> None:
        """Write the manifest."""
        with self._lock:
            windows = [self._windows[number] for number in sorted(self._windows)]
            atomic_files.write_json(self._path, {**self._fields, "windows": windows})


def manifest(provided: Mapping[str, Any], *, device: str, world_size: int | None = None) -> dict[str, Any]:
    """Manifest of the run on `device`, cuda or cpu, this process belongs to, secrets redacted.

    `provided` holds what only the training knows (strategy, mesh, model, arguments, …); it overrides what is detected.
    """
    nccl = torch.cuda.nccl.version() if device == "cuda" else None
    fields = {
        "schema": conventions.RUN_SCHEMA,
        "created_ns": time.time_ns(),
        "strategy": None,
        "world_size": this_world_size() if world_size is None else world_size,
        "mesh": None,
        "model": None,
        "arguments": None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in nccl) if nccl else None,
        },
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "host": socket.gethostname(),
        "processors": processors(),
        "determinism": determinism(),
        "command": [os.path.basename(sys.argv[0]) if sys.argv else "", *sys.argv[1:]],  # noqa: PTH119 may be "-c"
        "simulated": False,
    }
    role = this_role()
    stated_role = {} if role is None else {"role": role}
    clean: dict[str, Any] = redact({**fields, **stated_role, **provided})
    return clean | _commit(provided.get("commit"))


def processors() -> dict[str, int | float | None]:
    """What the ranks of this host have to compute with: cores, and the threads that want them.

    Keys cores (of the host), usable_cores (that this process may run on, by its affinity), quota_cores (by its control
    group; null without a limit), threads (of each rank inside an op) and ranks (on this host; null where not known).
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "quota_cores": _quota_cores(),
        "threads": torch.get_num_threads(),
        "ranks": ranks_of_host(),
    }


def determinism() -> dict[str, bool]:
    """What this process demands of algorithms: the same results each time, and the fastest convolutions.

    Keys deterministic_algorithms, cudnn_deterministic and cudnn_benchmark, as PyTorch calls them.
    """
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def redact(value: Any) -> Any:
    """Return `value` fit for JSON, with secrets replaced by ``[redacted]``, as `redaction` recognizes them.

    A list is also read as a command line: what follows the flag ``--token`` is replaced. Other objects become their
    text.

    >>> redact(["train.py", "--hf-token", "abc", "--data", "s3://me:abc@host/x", "--lr=1", "api_key=abc"])
    ['train.py', '--hf-token', '[redacted]', '--data', 's3://[redacted]@host/x', '--lr=1', 'api_key=[redacted]']
    """
    return json.loads(redaction.redact(json.dumps(_fit_for_json(value)).encode()))


def _fit_for_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _fit_for_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_fit_for_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _commit(commit: object) -> dict[str, Any]:
    """Commit of the working directory, and whether tracked files differ from it; null where unknown."""
    if commit is not None:
        return {"commit": commit} if git.is_sha(commit) else {}
    folder = Path.cwd()
    sha = git.head(folder, _GIT_TIMEOUT_S) if git.is_checkout(folder) else None
    changed = None if sha is None else git.has_changes(folder, _GIT_TIMEOUT_S)
    return {"commit": sha, "uncommitted_changes": changed}


def _quota_cores() -> float | None:
    """Cores' worth of time that the control group of this process may use, by version 2 or 1 of the interface."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join(Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in names).split()
            quota_us, period_us = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # "max" is no number: no limit
            continue
        if quota_us > 0 and period_us > 0:  # version 1 writes -1 for no limit
            return quota_us / period_us
    return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 no path to compose
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
