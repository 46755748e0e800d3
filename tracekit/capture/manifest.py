"""``run.json``: what a run was, for whoever reads its traces."""

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.place import this_world_size
from tracekit.capture.redaction import redact


def manifest(given: Mapping[str, Any], *, device: str, world_size: int | None = None) -> dict[str, Any]:
    """Return the manifest of the run on `device`, cuda or cpu, this process belongs to, secrets redacted.

    `given` holds what only the training knows (strategy, mesh, model, arguments, …) and wins over what is found here.
    """
    found = {
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
    clean: dict[str, Any] = redact({**found, **given})
    return clean


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
