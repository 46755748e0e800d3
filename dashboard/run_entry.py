"""What the dashboard knows of a run before it opens it, and which file names are those of traces."""

from dataclasses import dataclass

from tracekit import conventions
from tracekit.ingest import archives, readers
from tracekit.rules.report_entry import Summary

LIVE_S = 20.0
"""A run is being recorded if one of its files changed within this time."""
SETTLED_S = 2.0
"""A trace is complete if it has not changed for this long."""


@dataclass(frozen=True)
class RunEntry:
    """One run on disk: `name` is unique in the catalog, `stamp` changes when a file of the run does."""

    name: str
    path: str
    stamp: str = ""
    files: int = 0
    snapshots: int = 0
    """Memory snapshots of a run without traces: only the page Memory shows them."""
    has_snapshots: bool = False
    """Whether it has memory snapshots, next to traces or alone."""
    size_bytes: int = 0
    role: str = ""
    """What its processes do in a job of several programs, as its manifest states."""
    strategy: str = ""
    model: str = ""
    world_size: int | None = None
    created_ns: int | None = None
    """When it was recorded, by its manifest or else by its newest file."""
    problem: str = ""
    """Why it cannot be opened, if that is known without reading a trace."""
    is_live: bool = False
    """Whether its files changed a moment ago, so that the training may still run."""
    traces_stamp: str = ""
    """Changes when one of its traces or its manifest does; '' while one is being written."""
    is_private: bool = False
    """Whether it was uploaded: only that session sees it, and nothing of it is cached on disk."""
    roots: tuple[str, ...] = ()
    """The real paths that its files may be in."""
    check_error: str = ""
    """Why its check in the background failed."""
    summary: Summary | None = None
    """The summary of its check; None if its current files were not checked."""

    @property
    def has_comparisons(self) -> bool:
        """Whether it was checked and what comparisons of runs read was measured, too."""
        return self.summary is not None and self.summary.has_comparisons


def is_trace_by_name(name: str) -> bool:
    """Return whether a file is a trace by its name alone: a JSON file may be anything."""
    return may_be_trace(name) and ("trace" in name.lower() or "rank" in name.lower() or not name.endswith(".json"))


def is_snapshot(name: str) -> bool:
    """Return whether a file with this name is a memory snapshot, such as rank00000.memory.pickle or snapshot.pickle."""
    lower = name.lower()
    is_named = "memory" in lower or "snapshot" in lower
    return is_named and lower.endswith(conventions.SNAPSHOT_SUFFIXES) and not name.startswith(".")


def may_have_traces(name: str) -> bool:
    """Return whether a file with this name may be a trace or an archive of traces."""
    return may_be_trace(name) or (name.lower().endswith(archives.SUFFIXES) and not name.startswith("."))


def may_be_trace(name: str) -> bool:
    """Return whether a file with this name may be a trace."""
    other = (conventions.MANIFEST_FILE, conventions.TRUTH_FILE)
    return readers.may_have_traces(name.lower()) and not name.startswith(".") and name not in other
