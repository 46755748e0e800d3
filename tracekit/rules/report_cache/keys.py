"""The key of a cached report: the state of the run's files, the hash of the code, and the rules."""

import dataclasses
import functools
import hashlib
import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.conventions import object_storage
from tracekit.conventions.devices import DeviceOverride
from tracekit.ingest import disk_cache, file_states, files, readers
from tracekit.ingest.file_states import FileState, FileStates
from tracekit.ingest.remote import RemoteFile
from tracekit.model import plugins
from tracekit.rules.registry import RULES, all_rules


def run_states(path: str) -> FileStates | None:
    """States of a run's files; None if there are no files, or too many.

    For a URL the files are listed; None also if the server states no version of one.
    """
    if object_storage.is_url(path):
        return remote_states(files.list_remote(path).files, path)
    return file_states.of_run(path, readers.companion_suffixes())


def remote_states(listed: Iterable[RemoteFile], url: str) -> FileStates | None:
    """Return the states of the files of a run behind a URL; None if one has no version, or there are too many."""
    read = [file for file in listed if files.is_read_by_tracekit(file.name)]
    states = [
        FileState(file.url.removeprefix(url.rstrip("/")).lstrip("/"), file.size_bytes or 0, 0, 0, version=file.version)
        for file in read
        if file.version is not None
    ]
    if len(states) < len(read) or not 0 < len(read) <= file_states.MAX_FILES:
        return None
    return FileStates(tuple(sorted(states, key=lambda state: state.path)))


def run_key(path: str, known_states: FileStates | None = None, devices: Sequence[DeviceOverride] = ()) -> str | None:
    """Return the key of a run's report; None if it cannot be cached.

    `devices` are what a user states of devices. Raises InputError if a URL cannot be listed.
    """
    states = run_states(path) if known_states is None else known_states
    if states is None:
        return None
    # The report's file names depend on how the run's path was written.
    absolute = path if object_storage.is_url(path) else str(Path(path).absolute())
    text = repr((_code_hash(), path, absolute, states.stamp, *devices))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def _code_hash() -> str:
    """Return the hash of all code that makes a report, and of the rules with their thresholds, plugins among them."""
    package = Path(conventions.__file__).parents[1]
    rules = [(rule.code, rule.__module__, rule.__qualname__, dataclasses.asdict(rule())) for rule in all_rules()]
    added: list[type | ModuleType] = [rule for rule in all_rules() if rule not in RULES]
    added += [type(reader) for reader in readers.available() if reader not in readers.READERS]
    added += [
        importlib.import_module(point.module)
        for group in ("tracekit.metrics", "tracekit.causes")
        for point in plugins.entry_points(group=group)
    ]
    parts = {
        "code": disk_cache.code_hash(package, ("**/*.py",)),
        "libraries": [pl.__version__, np.__version__],
        "rules": rules,
        "plugins": sorted({disk_cache.plugin_hash(plugin) for plugin in added}),
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
