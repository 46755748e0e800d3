"""``run.json``: what a run was, for readers of its traces, without secrets: keys, logins in URLs."""

import os
import platform
import re
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
from tracekit.capture.rank_info import ranks_of_host, this_world_size
from tracekit.conventions import git

_GIT_TIMEOUT_S = 3.0
"""On a slow file system, the training starts without knowing its commit."""
REDACTED = "[redacted]"

_SECRET_WORDS = ("auth", "authorization", "bearer", "key", "keys", "passphrase", "pat", "pwd", "sig", "signature")
_SECRET_ENDINGS = (
    "token",
    "password",
    "passwd",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
    "accesskey",
)
# "key" is also half of attention's vocabulary.
_ATTENTION = re.compile(r"key[-_]?values?|query[-_]?key", re.IGNORECASE)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_SECRET_VALUES = re.compile(
    r"""
      \b(?:hf|npm|gh[pousr])_[A-Za-z0-9]{30,} | \bgithub_pat_\w{30,} | \bglpat-[\w-]{20,}
    | \bsk-[\w-]{20,} | \b[rsp]k_(?:live|test)_\w{16,} | \bxox[a-z]-[\w-]{10,} | \bpypi-[\w-]{16,}
    | \bAIza[\w-]{30,} | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \beyJ[\w-]+\.[\w-]+\.[\w-]*                   # a JSON web token
    | (?<=[Bb]earer\ )[\w.~+/=-]{8,} | (?<=[Bb]asic\ )[\w+/=-]{8,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*
    | (?<![\w/.+=-])(?=[A-Za-z+=]*[0-9])(?=[0-9+=]*[A-Za-z])[A-Za-z0-9+=]{32,}(?![\w/.-])  # a long run of random text
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_LOGIN = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.IGNORECASE)
_NAME = re.compile(r"(?P<name>[\w.-]+)[\"']?\s*[=:]\s*")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic)\s+)?[^&;,\s]+", re.IGNORECASE)
_FLAG = re.compile(r"-{1,2}(?P<name>[A-Za-z][\w.-]*)\Z")


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
        "command": [os.path.basename(sys.argv[0]) if sys.argv else "", *sys.argv[1:]],  # noqa: PTH119 may be "-c"
        "simulated": False,
    }
    clean: dict[str, Any] = redact({**fields, **provided})
    # After the redaction, which takes the name of a commit for a key.
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


def redact(value: Any, name: str = "") -> Any:
    """Return `value` fit for JSON, with what looks secret replaced by ``[redacted]``.

    Every value under a name such as api_key, HF_TOKEN or db-password is replaced. In text, keys of known forms are
    replaced, logins in URLs, and what is assigned to such a name. A list is also read as a command line: what follows
    the flag ``--token`` is replaced. Other objects become their text.

    >>> redact(["train.py", "--hf-token", "abc", "--data", "s3://me:abc@host/x", "--lr=1", "api_key=abc"])
    ['train.py', '--hf-token', '[redacted]', '--data', 's3://[redacted]@host/x', '--lr=1', 'api_key=[redacted]']
    """
    if is_secret_name(name) and value is not None and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, Mapping):
        return {str(key): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        clean: list[Any] = []
        secret_next = False
        for word in value:
            flag = _FLAG.match(word) if isinstance(word, str) else None
            if secret_next and not (flag and word.startswith("--")):
                clean.append(REDACTED)
                secret_next = False
            else:
                clean.append(redact(word))
                secret_next = bool(flag and is_secret_name(flag.group("name")))
        return clean
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _redact_text(str(value))


def is_secret_name(name: str) -> bool:
    """Return whether a name announces a secret: one of its words is token, key, password, secret or the like.

    >>> [is_secret_name(name) for name in ("hf_token", "apiKey", "tokens_per_second", "key_value_heads", "monkey")]
    [True, True, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(_ATTENTION.sub("", name))]
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


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


def _redact_text(text: str) -> str:
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    parts, done = [], 0
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end())
        if value and match.start() >= done and is_secret_name(match.group("name")):
            parts += [text[done : match.end()], REDACTED]
            done = value.end()
    return _SECRET_VALUES.sub(REDACTED, "".join((*parts, text[done:])))
