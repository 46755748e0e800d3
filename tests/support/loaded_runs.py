"""Runs that several commands of one test module read: the first of them loads, measures and judges it. Not a test."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tracekit.ingest import loader
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules import engine, report_cache
from tracekit.rules.rule import Report, Rule


@contextmanager
def loaded_once() -> Iterator[None]:
    """Have the same unchanged files and options loaded once, and such a run judged once by the same rules.

    Commands with --no-cache or an executor load anew. Tests that replace functions of the analysis must not be inside.
    """
    load, check = loader.load, engine.check
    runs: dict[str, Run] = {}
    reports: dict[tuple[object, ...], Report] = {}

    @functools.wraps(load)
    def load_once(where: Any, *, cache: bool = True, executor: Any = None, **options: Any) -> Run:
        stated = {name: value for name, value in options.items() if name != "on_progress"}
        is_shared = isinstance(where, (str, Path)) and cache and executor is None and stated.keys() <= {"settings"}
        key = report_cache.run_key(str(where), **stated) if is_shared else None
        if key is None:
            return load(where, cache=cache, executor=executor, **options)
        if key not in runs:
            runs[key] = load(where, **options)
        return runs[key]

    @functools.wraps(check)
    def check_once(
        run: Run, rules: Iterable[Rule] | None = None, *, facts: Iterable[TraceFact] = (), **options: Any
    ) -> Report:
        selected = None if rules is None else tuple(rules)
        if run not in runs.values() or options.get("on_crash") is not None:
            return check(run, selected, facts=facts, **options)
        key = (id(run), selected)
        if key not in reports:
            reports[key] = check(run, selected)
        run.measure(facts)
        return reports[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", load_once)
        patch.setattr(engine, "check", check_once)
        yield


@pytest.fixture(scope="module")
def runs_loaded_once() -> Iterator[None]:
    """Runs are loaded once for all tests of the module."""
    with loaded_once():
        yield
