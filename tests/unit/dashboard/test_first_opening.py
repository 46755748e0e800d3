"""The first opening of a run: in a thread that all sessions share, with its progress and what is known so far."""

import dataclasses
import os
import shutil
import threading
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import opening as page_opening
from dashboard.run_entry import RunEntry
from dashboard.run_store import first_opening
from dashboard.run_store.first_opening import FirstOpening
from tests.support.kineto_files import trace, write
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.ingest import loader
from tracekit.rules import cost_attribution, engine
from tracekit.rules.rule import Severity

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"
ENTRY = RunEntry("demo", str(SAMPLE), files=2, size_bytes=3 << 20)
FACTS = (breakdown.by_step, breakdown.by_rank)


def measured(folder):
    """Return what a run reports after each of its traces, and the run."""
    run, progress = loader.load(folder, cache=False), []
    run.measure(FACTS, progress.append)
    return progress, run


def with_sizes(measured, *sizes):
    """Return the same progress, the files of whose ranks have these sizes in bytes."""
    sources = [dataclasses.replace(source, size_bytes=sizes[source.rank]) for source in measured.sources]
    source = next(source for source in sources if source.rank == measured.source.rank)
    return dataclasses.replace(measured, source=source, sources=sources)


def without_steps(document):
    events = [event for event in document["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    return document | {"traceEvents": events}


def test_the_breakdown_of_the_ranks_read_so_far_is_that_of_the_run():
    progress, run = measured(SAMPLE)
    opening = FirstOpening()
    assert opening.steps_by_rank is None
    opening.on_progress(progress[0])
    expected = breakdown.steps_by_rank(run)
    assert opening.steps_by_rank.equals(expected.filter(expected["rank"] == 0))
    opening.on_progress(progress[1])
    assert opening.steps_by_rank.sort("rank").equals(expected)


def test_without_marked_steps_the_breakdown_is_of_the_windows(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", without_steps(trace(rank)))
    progress, run = measured(tmp_path)
    opening = FirstOpening()
    for each in progress:
        opening.on_progress(each)
    assert opening.steps_by_rank.equals(run.table(breakdown.by_rank))


def test_progress_counts_the_first_pass_and_estimates_the_rest_by_bytes():
    progress, _ = measured(SAMPLE)
    first, second = (with_sizes(each, 30, 10) for each in progress)
    opening = FirstOpening()
    assert opening.remaining_s is None
    assert page_opening._progress(ENTRY, opening) == "Reading 2 files, 3 MiB"
    opening.began_s -= 30
    opening.on_progress(first)
    assert 9 < opening.remaining_s < 10.1
    assert page_opening._progress(ENTRY, opening) == "1 of 2 traces read, about 10 s left"
    opening.on_progress(second)
    assert opening.remaining_s == 0
    opening.on_progress(first)  # a replay reads traces again
    assert opening.read_traces == 2
    assert page_opening._progress(ENTRY, opening) == "2 of 2 traces read; comparing the ranks"


def test_findings_of_rules_are_there_before_the_last_rule_has_judged():
    run, opening, shown = loader.load(SAMPLE, cache=False), FirstOpening(), []

    def on_rule(*progress):
        opening.on_rule(*progress)
        shown.append((page_opening._progress(ENTRY, opening), len(opening.first_claims)))

    report = engine.check(run, facts=FACTS, on_progress=opening.on_progress, on_rule=on_rule)
    (first, *_, last), counts = (text for text, _ in shown), [count for _, count in shown]
    assert first.endswith(f"; 1 of {len(shown)} rules applied")
    assert last.endswith("; pricing the findings by replays")
    assert 0 < counts[len(shown) // 2] <= counts[-1]
    priced = {finding.claim for finding in report.findings if finding.severity > Severity.INFO}
    assert priced & set(opening.first_claims)


def test_a_trace_that_cannot_be_read_counts_as_read(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(rank))
    run, opening = loader.load(tmp_path, cache=False), FirstOpening()
    (tmp_path / "rank1.json").write_bytes(b"gone")
    run.measure(FACTS, opening.on_progress)
    assert (opening.read_traces, opening.traces) == (2, 2)
    assert opening.steps_by_rank["rank"].to_list() == [0]


def test_sessions_share_the_opening_that_is_under_way():
    may_end, threads = threading.Event(), []

    def work():
        threads.append(threading.current_thread())
        assert may_end.wait(120)
        return "open"

    opening = first_opening.start("key", work)
    assert first_opening.start("key", work) is opening
    assert first_opening.under_way("key") is opening
    assert first_opening.under_way("other") is None
    assert not opening.has_ended(0)
    may_end.set()
    assert opening.result() == "open"
    threads[0].join(120)
    assert len(threads) == 1
    assert first_opening.under_way("key") is None


@pytest.mark.parametrize("error", [InputError("changed"), ZeroDivisionError("a bug")])
def test_the_error_of_the_work_is_raised_where_its_result_is_used(error):
    def work():
        raise error

    opening = first_opening.start(str(error), work)
    with pytest.raises(type(error), match=str(error)):
        opening.result()
    assert opening.has_ended(0)


def test_a_page_shows_no_progress_once_the_run_is_open(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(page_opening, "_SOON_S", 0)
    monkeypatch.setattr(page_opening, "_POLL_S", 0.01)
    st.cache_resource.clear()  # an earlier test of this process may have opened the run

    def script(path):
        import streamlit as st

        from dashboard import opening
        from dashboard.run_catalog import Catalog

        entry = Catalog((path,)).listing().entries[0]
        run = opening.open_run(entry)
        st.session_state["opened"] = run is not None and len(run.report.findings)

    drawn, is_compared = [], threading.Event()
    show, attribute_costs = page_opening._progress, cost_attribution.attribute_costs

    def progress(*of):
        drawn.append(show(*of))
        if drawn[-1] == "2 of 2 traces read; pricing the findings by replays":
            is_compared.set()
        return drawn[-1]

    def attribute_after_that(report):
        assert is_compared.wait(300)
        return attribute_costs(report)

    monkeypatch.setattr(page_opening, "_progress", progress)
    monkeypatch.setattr(cost_attribution, "attribute_costs", attribute_after_that)
    app = AppTest.from_function(script, args=(str(SAMPLE),), default_timeout=300).run()
    assert not app.exception
    assert app.session_state["opened"]
    assert is_compared.is_set()
    assert not app.get("progress")
    assert not app.get("plotly_chart")
    drawn.clear()
    again = AppTest.from_function(script, args=(str(SAMPLE),), default_timeout=300).run()
    assert again.session_state["opened"] == app.session_state["opened"]
    assert drawn == []  # the report is cached


def test_a_live_run_shows_progress_only_until_the_session_has_opened_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(page_opening, "_SOON_S", 0)
    monkeypatch.setattr(page_opening, "_POLL_S", 0.01)
    folder = shutil.copytree(SAMPLE, tmp_path / "live")

    def script(path):
        import dataclasses

        import streamlit as st

        from dashboard import opening, run_store
        from dashboard.run_catalog import Catalog

        entry = dataclasses.replace(Catalog((path,)).listing().entries[0], is_live=True)
        run_store.read_again(entry)
        st.session_state["opened"] = opening.open_run(entry) is not None

    drawn, is_shown = [], threading.Event()
    show, attribute_costs = page_opening._progress, cost_attribution.attribute_costs

    def progress(*of):
        drawn.append(show(*of))
        is_shown.set()
        return drawn[-1]

    def attribute_after_that(report):
        assert is_shown.wait(300)
        return attribute_costs(report)

    monkeypatch.setattr(page_opening, "_progress", progress)
    monkeypatch.setattr(cost_attribution, "attribute_costs", attribute_after_that)
    app = AppTest.from_function(script, args=(str(folder),), default_timeout=300).run()
    assert app.session_state["opened"]
    assert drawn
    drawn.clear()
    checks = []
    monkeypatch.setattr(
        cost_attribution, "attribute_costs", lambda report: checks.append(report) or attribute_costs(report)
    )
    for file in folder.iterdir():
        os.utime(file)  # as if another trace was complete: the run is read again
    app.run()
    assert app.session_state["opened"]
    assert len(checks) == 1
    assert drawn == []
