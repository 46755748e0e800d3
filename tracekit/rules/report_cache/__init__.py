"""Runs that were checked before: their reports and facts from the user's cache directory, without their traces.

`report` is what `loading.load` and `checking.check` come to with the default thresholds, kept across processes; the run
in it reads a trace only where a page asks for something that was not measured. `summary` is the little of it that a
list of runs shows.

Only the dashboard asks here. `tracekit check` judges each time it is called: its report names files as the command
line names them, and what fails a build must rest on the files that lie there, not on what a cache says of them.
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
    """Return the report of a run by all rules with their default thresholds, kept or made now and then kept.

    Its run has `facts` and `surveys` measured, and all that the rules asked for. Raises what `loading.load` and
    `checking.check` raise.
    """
    key = keys.run_key(path)
    kept = store.get(key, path) if key is not None else None
    if kept is not None:
        return kept
    run = loader.load(path)
    made = engine.check(run, facts=facts, on_progress=on_progress)
    for survey in surveys:
        run.run_table(survey)
    if key is not None and keys.run_key(path) == key:  # else it was written to while it was read
        store.put(key, made)
    return made


def summary(path: str, state: keys.FileStates | None = None) -> Summary | None:
    """Return the summary of a run that was checked; None where it was not, or has changed since.

    `state` is that of its files where a caller knows it already.
    """
    key = keys.run_key(path, state)
    return None if key is None else store.report_cache().get(key, entry.read_summary)
