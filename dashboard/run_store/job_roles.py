"""Runs of the other roles of a job (rollout workers of a trainer), to be drawn on one timeline."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath

from dashboard import run_store, settings
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun
from tracekit.errors import InputError
from tracekit.ingest import loader
from tracekit.report import timeline


@dataclass(frozen=True, eq=False)
class JoinedRun(LoadedRun):
    """A run with the traces of all roles, and of each of its ranks the role and the rank there."""

    labels: dict[int, str] = field(kw_only=True)


def other_roles(entry: RunEntry, listed: Iterable[RunEntry]) -> tuple[RunEntry, ...]:
    """Listed runs in the same folder whose manifests state other roles; none of a run that states none."""
    if not entry.role or entry.is_private:
        return ()
    folder = PurePath(entry.path).parent
    by_path = {
        other.path: other
        for other in listed
        if other.role not in ("", entry.role) and not other.problem and PurePath(other.path).parent == folder
    }
    return tuple(by_path.values())


@run_store.cached_per_run(max_entries=run_store.MAX_OPEN_RUNS)
def load_roles(entry: RunEntry, *other_roles: RunEntry) -> JoinedRun:
    """Return the run of an entry with the traces of other roles. Raises TracekitError, also if there are none."""
    for role_entry in (entry, *other_roles):
        run_store.refuse_links(role_entry)
    paths = [role_entry.path for role_entry in (entry, *other_roles)]
    job = loader.load(paths, settings=settings.read_settings())
    run = next((run for run in job.roles.values() if PurePath(run.path) == PurePath(entry.path)), None)
    if run is None:
        raise InputError(f"{entry.path}: the other roles were not recorded at the same time; open each run by itself")
    joined = timeline.join_roles(run)
    return JoinedRun(joined.run, labels=joined.labels)
