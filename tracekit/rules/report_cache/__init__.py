"""Reports and facts of runs that were checked before, from the user's cache directory, without reading traces.

`report` returns the result of `loader.load` and `engine.check` with default thresholds, cached across processes; its
run reads a trace only if a page needs a table that was not measured. `summary` returns the part for a list of runs.

Only the dashboard uses this cache. `tracekit check` always judges again: its report names files as the command line
does, and a failed build must depend on the files themselves, not on a cache.
"""

from collections.abc import Callable, Iterable

from tracekit.ingest import loader
from tracekit.model.run import RunFact, Source
from tracekit.model.trace import Fact
from tracekit.rules import engine
from tracekit.rules.report_cache import entry, keys, store
from tracekit.rules.report_cache.summary import Summary
from tracekit.rules.rule import Report

__all__ = ["Summary", "report", "summary"]


def report(
    path: str,
    *,
    facts: Iterable[Fact] = (),
    surveys: Iterable[RunFact] = (),
    on_progress: Callable[[Source], None] | None = None,
) -> Report:
    """Return the report of a run by all rules with default thresholds, from the cache if it is there.

    Its run has measured `facts` and `surveys`, and the facts of all rules. Raises the errors of `loader.load` and
    `engine.check`.
    """
    key = keys.run_key(path)
    cached = store.get(key, path) if key is not None else None
    if cached is not None:
        return cached
    run = loader.load(path)
    made = engine.check(run, facts=facts, on_progress=on_progress)
    for survey in surveys:
        run.run_table(survey)
    if key is not None and keys.run_key(path) == key:  # else the run changed while it was read
        store.put(key, made)
    return made


def summary(path: str, state: keys.FileStates | None = None) -> Summary | None:
    """Return the summary of a run; None if it was not checked, or changed since.

    `state` is the state of its files, if the caller has it already.
    """
    key = keys.run_key(path, state)
    return None if key is None else store.report_cache().get(key, entry.read_summary)
