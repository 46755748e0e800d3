"""The analysis pages without a browser, and what plug-ins add to them."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dashboard import run_catalog, run_store
from dashboard.run_store import tables
from dashboard.sections import parallelism
from tests.browser import recorded
from tests.integration.test_cli_memory import run_on_a_device, simulated
from tests.support import dashboard_pages
from tests.support.cli_runner import tracekit
from tests.support.dashboard_pages import TIMEOUT_S, html_of, page, testing
from tracekit.errors import InputError

runs = dashboard_pages.runs
PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
import polars as pl
from tracekit.model.fact import run_fact
from tracekit.rules.rule import Finding, Rule, Severity
from tracekit.model import schema

@dataclass(frozen=True)
class TooManyRanks(Rule):
    '''Says how many ranks there are.'''
    code: ClassVar[str] = "ACME001"

    def check(self, run):
        yield Finding(self.code, Severity.INFO, f"There are {len(run.ranks)} ranks, says Acme.", "")

RANKS = schema.table("acme_ranks", "rank", schema.column("rank", "Rank, as Acme counts."))

@run_fact(table=RANKS)
def ranks(run):
    return pl.DataFrame({"rank": run.ranks})
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a rule and a table as another distribution would."""
    (tmp_path / "acme_rules.py").write_text(PLUGIN)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    points = "[tracekit.rules]\nranks = acme_rules:TooManyRanks\n[tracekit.tables]\nranks = acme_rules:ranks\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def _said(app):
    return " ".join(each.value for each in (*app.caption, *app.info, *app.subheader)).replace("\\", "")


def test_a_rule_and_a_table_of_a_plugin_are_shown_without_an_edit(plugin, tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    shown = page("diagnosis", tmp_path / "run", trust="True")
    assert not shown.exception
    assert "There are 2 ranks, says Acme" in html_of(shown)
    rules = next(each.value for each in shown.dataframe if "family" in each.value.columns)
    assert "ACME" in set(rules["family"])
    queried = page("sql", tmp_path / "run", sql="SELECT * FROM acme_ranks ORDER BY rank", table="acme_ranks")
    assert "Rank, as Acme counts." in html_of(queried)
    queried.button[0].click().run()
    assert queried.dataframe[0].value["rank"].tolist() == [0, 1]


def test_a_query_in_the_address_is_shown_and_runs_only_on_request(runs):
    shown = page("sql", runs / recorded.GOOD, sql="SELECT 42 AS answer")
    assert not shown.exception
    assert shown.text_area[0].value == "SELECT 42 AS answer"
    assert "is part of the link" in _said(shown)
    assert not shown.dataframe
    shown.button[0].click().run()
    assert shown.dataframe[0].value["answer"].tolist() == [42]
    assert "is part of the link" not in _said(shown)


def test_a_refused_or_wrong_query_shows_its_error_and_a_long_result_is_cut(runs, monkeypatch):
    from dashboard.pages import sql

    monkeypatch.setattr(sql, "MAX_ROWS", 3)
    shown = page("sql", runs / recorded.GOOD)
    for query, error in (
        ("DROP TABLE ops", "query:"),
        ("SELECT * FROM read_csv('/etc/passwd')", "query:"),
        ("SELECT nothing FROM ops", "nothing"),
    ):
        shown.text_area[0].set_value(query)
        shown.button[0].click().run()
        assert not shown.exception
        assert error in shown.error[0].value.replace("\\", "")
        assert not shown.dataframe
    shown.text_area[0].set_value("SELECT * FROM range(10) t(n)")
    shown.button[0].click().run()
    assert "the first 3 rows" in _said(shown)
    assert len(shown.dataframe[0].value) == 3


def test_kernels_are_added_up_as_the_address_says(runs):
    shown = page("kernels", runs / recorded.GOOD, by="phase", search="compute")
    assert not shown.exception
    table = next(each.value for each in shown.dataframe if "count" in each.value.columns)
    assert table["kind"].tolist() == ["compute"]
    assert table["count"].tolist() == [6]
    assert table["delay_p50_ns"].notna().all()


def test_the_roofline_is_drawn_where_shapes_and_device_are_known(runs, tmp_path):
    recorded.write_products(tmp_path / "products")
    shown = page("kernels", tmp_path / "products", what="roofline")
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 1
    (table,) = (each.value for each in shown.dataframe if "roofline_ratio" in each.value.columns)
    assert table["name"].tolist() == ["aten::mm", "aten::add"]
    assert table["roofline_ratio"].tolist() == pytest.approx([50.0, 50.0], abs=0.1)  # percent
    unknown = page("kernels", runs / recorded.GOOD, what="roofline")
    assert "There is no roofline" in _said(unknown)
    assert not unknown.get("plotly_chart")


def test_a_finding_is_shown_on_the_page_of_its_family(runs):
    shown = page("ranks", runs / recorded.GOOD, tab="exposed communication")
    assert not shown.exception
    assert "COMM001" in html_of(shown)
    assert len(shown.get("plotly_chart")) == 3


def test_a_replay_is_shown_next_to_the_record_as_a_prediction(tmp_path):
    run = run_on_a_device(tmp_path)
    simulated(run)
    shown = page("memory", run)
    source = next(box for box in shown.selectbox if box.label == "From")
    source.select(next(option for option in source.options if "snapshot of rank 0" in option)).run()
    shown.toggle[0].set_value(True).run()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in [code.value for code in shown.code]
    next(button for button in shown.button if button.label == "Replay").click().run()
    assert not shown.exception
    assert "prediction of the allocator model" in _said(shown)
    assert len(shown.get("plotly_chart")) == 2
    next(box for box in shown.selectbox if "garbage" in box.label).select(0.8).run()
    next(button for button in shown.button if button.label == "Replay").click().run()
    assert not shown.exception
    assert "device-memory-gib" in _said(shown)  # without it, the threshold has no limit to count from


class _Watched:
    """A lock that another waits for from when it is first taken, to note whether a query's process still runs then."""

    def __init__(self):
        self._lock = threading.RLock()
        self._other = threading.Thread(target=self._wait)
        self.is_asking = None

    def __enter__(self):
        self._lock.acquire()
        self._other.start()

    def __exit__(self, *_):
        self._lock.release()
        self._other.join()

    def _wait(self):
        with self._lock:
            children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
            pids = [pid for each in children for pid in each.read_text().split()]
            self.is_asking = any("sandbox.py" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def test_a_query_does_not_lock_the_run_while_it_executes(runs):
    def script(path):
        import dataclasses

        import streamlit as st

        from dashboard import run_catalog, run_store
        from dashboard.pages import sql

        entry = run_catalog.list_runs([path]).entries[0]
        run = dataclasses.replace(run_store.open_run(entry), lock=st.session_state["lock"])
        sql._run_query(run, "SELECT 42 AS n FROM ops LIMIT 1")
        st.text(st.session_state[sql._RESULT][2]["n"].to_list())

    lock = _Watched()
    shown = testing.AppTest.from_function(script, args=(str(runs / recorded.GOOD),), default_timeout=TIMEOUT_S)
    shown.session_state["lock"] = lock
    shown.run()
    assert not shown.exception
    assert shown.text[0].value == "[42]"
    assert lock.is_asking


def test_what_was_measured_is_shown_while_another_session_reads_the_run(runs):
    (entry,) = run_catalog.list_runs([str(runs / recorded.GOOD)]).entries
    run = run_store.open_run(entry)
    made = (
        run.table(tables.BREAKDOWN_BY_STEP),
        run.remember("a result", lambda of: of.name),
        run.result_of(tables.representative_step),
    )
    reads, ends = threading.Event(), threading.Event()

    def read(_):
        reads.set()
        ends.wait(TIMEOUT_S)

    with ThreadPoolExecutor(2) as sessions:
        reading = sessions.submit(run.compute, read)
        reads.wait(TIMEOUT_S)
        other = sessions.submit(
            lambda: (
                run.table(tables.BREAKDOWN_BY_STEP),
                run.remember("a result", pytest.fail),
                run.result_of(tables.representative_step),
            )
        )
        try:
            shown = other.result(TIMEOUT_S / 2)
        finally:
            ends.set()
        reading.result()
    assert all(one is other for one, other in zip(shown, made, strict=True))


def test_more_queries_than_may_run_at_a_time_are_refused(runs, wording):
    (entry,) = run_catalog.list_runs([str(runs / recorded.GOOD)]).entries
    run = run_store.open_run(entry)
    limits = {"memory_bytes": 1 << 30, "max_rows": 10}
    with contextlib.ExitStack() as stack:
        for _ in range(run_store.MAX_QUERIES):
            stack.enter_context(run_store._turn(0.0))
        with wording.raises(InputError):
            run.query("SELECT 1 AS n", timeout_s=0.0, **limits)
    assert run.query("SELECT 1 AS n", timeout_s=30.0, **limits)["n"].to_list() == [1]


def test_the_page_of_parallelism_shows_mesh_pipeline_and_axes(tmp_path):
    folder = tmp_path / "run"
    layout = ["--model", "125m", "--gpus", "4", "--pp", "2", "--tp", "2", "--micro-batches", "4", "--layers", "4"]
    assert tracekit("simulate", *layout, "--seq", "512", "--steps", "2", "--out", folder).returncode == 0
    shown = page("ranks", folder, tab="pipeline")
    assert not shown.exception
    assert "Pipeline, one step" in _said(shown)
    mesh = page("ranks", folder, tab="mesh")
    assert not mesh.exception
    assert "Communication by axis" in _said(mesh)


def test_a_tab_that_a_run_lacks_says_why_and_the_first_is_shown(tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    shown = page("ranks", tmp_path / "run", tab="pipeline")
    assert not shown.exception
    assert shown.session_state["tab"] == "waiting"
    assert parallelism.NO_PIPELINE in _said(shown)
