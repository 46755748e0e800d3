"""What `tracekit check` has stored is shown without reading a trace; comparisons measure what it has not."""

from dataclasses import replace

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from dashboard import run_catalog, run_store, widgets
from dashboard.background_checks import BackgroundChecks
from tests.browser import recorded
from tests.support.cli_runner import tracekit
from tests.support.dashboard_pages import html_of, page
from tracekit.ingest import disk_cache
from tracekit.model.source import Threads
from tracekit.regression import baseline, scaling, step_change
from tracekit.rules import report_cache


@pytest.fixture
def checked_runs(tmp_path, monkeypatch):
    """Return a folder of two runs that the command line has checked by relative paths."""
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    report_cache._code_hash.cache_clear()  # it may be that of a plug-in of an earlier test
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("a", "b"):
        recorded.write_run(folder / name, kernel="gemm")
        checked = tracekit(
            "check", name, "--fail-on", "never", cwd=folder, **{disk_cache.DIRECTORY_VARIABLE: str(tmp_path / "cache")}
        )
        assert checked.returncode == 0, checked.stderr
    return folder


def _entries(folder):
    # Files written a moment ago look as if the run were being recorded.
    return [replace(entry, is_live=False) for entry in run_catalog.list_runs([str(folder)]).entries]


def _no_read(*_):
    raise AssertionError("a trace is read")


def test_the_list_and_the_pages_of_a_checked_run_read_no_trace(checked_runs, monkeypatch):
    monkeypatch.setattr(report_cache._LazyRun, "read", _no_read)
    entries = _entries(checked_runs)
    assert [entry.summary.findings["warning"] for entry in entries] == [2, 2]
    assert not any(map(BackgroundChecks().is_due, entries))
    shown = page("diagnosis", checked_runs / "a")
    assert not shown.exception
    assert not shown.error
    assert "COMM001" in html_of(shown)
    tabs = [("ranks", {"tab": tab}) for tab in ("waiting", "exposed communication", "bandwidth")]
    for address, choices in (*tabs, ("kernels", {})):
        shown = page(address, checked_runs / "a", **choices)
        assert not shown.exception
        assert not shown.error
    assert "gemm" in html_of(shown)


def test_a_check_by_other_rules_or_without_the_cache_is_not_stored(checked_runs, tmp_path):
    cache = {disk_cache.DIRECTORY_VARIABLE: str(tmp_path / "other")}
    for options in (("--select", "COMM"), ("--set", "COMM001.max_exposed_ratio=0.9"), ("--no-cache",)):
        assert tracekit("check", "a", "--fail-on", "never", *options, cwd=checked_runs, **cache).returncode == 0
    assert not list(tmp_path.glob("other/store/*.report"))
    assert tracekit("check", "a", "--fail-on", "never", cwd=checked_runs, **cache).returncode == 0
    assert len(list(tmp_path.glob("other/store/*.report"))) == 1


def test_charts_have_what_comparisons_read_measured_once(checked_runs):
    entry = _entries(checked_runs)[0]
    assert entry.summary is not None
    assert not entry.has_comparisons
    checks = BackgroundChecks()
    checks.request_comparisons([entry])
    assert checks.is_due(entry)
    run_store.check(entry)
    measured = _entries(checked_runs)[0]
    assert measured.has_comparisons
    assert replace(measured.summary, has_comparisons=False) == entry.summary
    assert not checks.is_due(measured)


def test_a_comparison_measures_what_a_check_has_not_in_one_pass(checked_runs, monkeypatch):
    passes = []
    measure = Threads.measure

    def note(threads, sources, facts, loaded):
        passes.append({(source.path, fact) for source in sources for fact in facts})
        return measure(threads, sources, facts, loaded)

    monkeypatch.setattr(Threads, "measure", note)
    shown = page("compare", checked_runs / "a", checked_runs / "b")
    assert not shown.exception
    assert not shown.error
    compared = {*baseline.FACTS, *step_change.FACTS, *scaling.FACTS}
    with_compared = [one for one in passes if compared & {fact for _, fact in one}]
    traces = [{path for path, _ in one} for one in with_compared]
    assert [len(paths) for paths in traces] == [2, 2]
    assert not traces[0] & traces[1]


def test_a_comparison_that_is_shown_again_shows_no_progress(checked_runs, monkeypatch):
    monkeypatch.setattr(widgets, "_SOON_S", 0.0)
    shown = page("compare", checked_runs / "a", checked_runs / "b")
    assert not shown.get("progress")
    assert not shown.run().get("progress")


def test_progress_of_a_measurement_counts_the_traces(checked_runs, monkeypatch):
    from tests.support.dashboard_pages import testing

    def script(path):
        import time

        from dashboard import run_catalog, run_store, widgets
        from tracekit.regression.samples import samples

        widgets._SOON_S = 0.0
        run = run_store.open_run(run_catalog.list_runs([path]).entries[0])
        with widgets.measuring():
            time.sleep(0.01)
            run.compute(lambda loaded: loaded.table(samples))

    from streamlit.delta_generator import DeltaGenerator

    texts = []
    monkeypatch.setattr(DeltaGenerator, "progress", lambda _, value, text: texts.append((value, text)))
    shown = testing.AppTest.from_function(script, args=(str(checked_runs / "a"),), default_timeout=240)
    began_s = widgets._SOON_S
    try:
        assert not shown.run().exception
    finally:
        widgets._SOON_S = began_s
    assert texts == [(0.5, "Measuring: 1 of 2 traces"), (1.0, "Measuring: 2 of 2 traces")]
