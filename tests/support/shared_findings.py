"""What `check` finds in folders that no test changes, judged once for all workers of pytest-xdist. Not a test."""

import fcntl
import hashlib
import os
import pickle
from pathlib import Path

import tracekit

FOLDER_VARIABLE = "TRACEKIT_TESTS_FOLDER"
"""The environment variable with the folder that the workers of one run of pytest share; tests/conftest.py sets it."""


def findings(folder: Path) -> tuple[tracekit.Finding, ...]:
    """Return the findings of all rules on a recording, with their default settings.

    The first worker that asks judges the recording; the others wait for it and read its findings.
    """
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    stored = Path(os.environ[FOLDER_VARIABLE]) / f"findings-{name}.pickle"
    with stored.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            report = tracekit.check(tracekit.load(folder))
            partial = stored.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(tuple(report.findings)))
            partial.rename(stored)
    found: tuple[tracekit.Finding, ...] = pickle.loads(stored.read_bytes())
    return found
