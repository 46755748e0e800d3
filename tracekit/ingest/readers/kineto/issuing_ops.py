"""Which host op issued a collective: the one around its launch, or, on the host, the next of its kind in order."""

import re

import numpy as np

from tracekit.ingest.readers.kineto.events import Args
from tracekit.ingest.readers.kineto.host_slices import Host
from tracekit.model.nesting import Ints

_MAX_DEPTH = 64


def around(host: Host, launches: Ints, slice_args: dict[int, Args]) -> list[int]:
    """Return, for each launching slice, the nearest slice around it that says what it communicates; -1 for none."""
    return [_climb(host, int(at), slice_args) for at in launches]


def in_order(host: Host, running: Ints) -> Ints:
    """Return, for slices that run collectives on the host, by start, the c10d op that issued each; -1 where not known.

    Nothing in a trace ties them. As many are issued as run, so the i-th issued is the i-th run: of all where their
    numbers agree, else among those whose kinds do.
    """
    issued = np.flatnonzero(host.names.issues_collective[host.named]) if len(host.named) else running
    issued = issued[np.argsort(host.start_ns[issued], kind="stable")]
    if len(issued) == len(running):
        return issued
    found = np.full(len(running), -1, np.int64)
    run_as = np.array([_ran(name) for name in host.names.name.gather(host.named[running])])
    issued_as = np.array([_runs_as(name) for name in host.names.name.gather(host.named[issued])])
    for kind in np.unique(run_as):
        runs, issues = np.flatnonzero(run_as == kind), issued[issued_as == kind]
        if len(runs) == len(issues):
            found[runs] = issues
    return found


def _climb(host: Host, at: int, slice_args: dict[int, Args]) -> int:
    for _ in range(_MAX_DEPTH):
        if at < 0 or at in slice_args:
            return at
        at = int(host.parent[at])
    return -1


def _ran(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.partition(":")[2].lower())


def _runs_as(name: str) -> str:
    kind = re.sub(r"[^a-z]", "", name.removeprefix("c10d::").lower().replace("base", ""))
    return "allreduce" if kind.startswith("reducescatter") else kind  # gloo makes one of the other
