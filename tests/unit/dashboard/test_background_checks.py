"""Checks of listed runs in the background, by a real process."""

import time
from dataclasses import replace

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from dashboard import background_checks, run_catalog
from dashboard.background_checks import BackgroundChecks
from dashboard.pages import kernels, memory, ranks
from tests.browser import recorded
from tracekit.ingest import disk_cache
from tracekit.rules import report_cache

DEADLINE_S = 240


def _wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_listed_runs_are_checked_while_somebody_looks_and_those_that_fail_say_why(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    report_cache._code_hash.cache_clear()  # it may be that of a plug-in of an earlier test
    runs = tmp_path / "runs"
    runs.mkdir()
    recorded.write_run(runs / "good", kernel="gemm")
    (runs / "empty").mkdir()
    (runs / "empty" / "rank00000.pt.trace.json").write_text("no trace")
    catalog = run_catalog.Catalog([str(runs)])

    def settled():  # files written a moment ago look as if the run were being recorded
        return [replace(entry, is_live=False) for entry in run_catalog.list_runs([str(runs)]).entries]

    def is_done():
        catalog.checks.watch(settled())
        return not any(map(catalog.checks.is_due, settled()))

    _wait_until(is_done)
    entries = {entry.name: entry for entry in settled()}
    assert catalog.checks.errors.keys() == {entries["empty"].stamp}
    assert entries["good"].summary.findings["warning"] == 2
    assert kernels.PAGE.cost_ratio(entries["good"]) + ranks.PAGE.cost_ratio(entries["good"]) > 0
    assert memory.PAGE.lack(entries["good"], listed_runs=2)
    large = replace(entries["empty"], stamp="another", size_bytes=background_checks.MAX_BYTES + 1)
    assert not catalog.checks.is_due(large)
    catalog.checks.request([large])
    assert catalog.checks.is_due(large)
    _wait_until(lambda: not catalog.checks.progress.current)
    catalog.forget()
    assert next(entry for entry in catalog.listing().entries if entry.name == "empty").check_error


def test_the_check_ends_where_nobody_looks(tmp_path):
    recorded.write_run(tmp_path / "good", kernel="gemm")
    checks = BackgroundChecks(watched_s=0.01)
    checks.watch([replace(entry, is_live=False) for entry in run_catalog.list_runs([str(tmp_path)]).entries])
    assert checks.progress.waiting == 1
    _wait_until(lambda: checks.progress.waiting == 0)
    assert checks.errors == {}
