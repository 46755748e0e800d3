"""The pages made of the analyses, without a browser: what they say of a run, and what comes in by a plugin."""

import sys

import pytest

from tests.browser import recorded
from tests.integration.test_cli_memory import run_on_a_device, simulated

testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra [dashboard]")
TIMEOUT_S = 60
PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
import polars as pl
from tracekit.querying import Measured
from tracekit.rule import Finding, Rule, Severity
from tracekit.schema import Column, Table

@dataclass(frozen=True)
class TooManyRanks(Rule):
    '''Says how many ranks there are.'''
    code: ClassVar[str] = "ACME001"

    def check(self, run):
        yield Finding(self.code, Severity.INFO, f"There are {len(run.ranks)} ranks, says Acme.", "")

table = Measured(
    Table("acme_ranks", "rank", (Column("rank", pl.Int64(), "", "Rank, as Acme counts."),)),
    lambda run: pl.DataFrame({"rank": run.ranks}),
)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recorded.write_runs(folder)
    return folder


@pytest.fixture(autouse=True)
def _keep_main(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a rule and a table as another distribution would."""
    (tmp_path / "acme_rules.py").write_text(PLUGIN)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    points = "[tracekit.rules]\nranks = acme_rules:TooManyRanks\n[tracekit.tables]\nranks = acme_rules:table\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def _page(view, path, **address):
    def script(view, path):
        from importlib import import_module

        from dashboard import catalog

        import_module(f"dashboard.views.{view}").page(catalog.entries([path])[0])

    app = testing.AppTest.from_function(script, args=(view, str(path)), default_timeout=TIMEOUT_S)
    for name, value in address.items():
        app.query_params[name] = value
    return app.run()


def _html(app):
    return "".join(element.proto.body for element in app.get("html"))


def _said(app):
    return " ".join(each.value for each in (*app.caption, *app.info, *app.subheader)).replace("\\", "")


def test_a_rule_and_a_table_of_a_plugin_are_shown_without_an_edit(plugin, tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    shown = _page("quality", tmp_path / "run")
    assert not shown.exception
    assert "There are 2 ranks, says Acme." in _html(shown)
    rules = next(each.value for each in shown.dataframe if "family" in each.value.columns)
    assert "ACME" in set(rules["family"])
    asked = _page("sql", tmp_path / "run", sql="SELECT * FROM acme_ranks ORDER BY rank", table="acme_ranks")
    assert "Rank, as Acme counts." in _html(asked)
    asked.button[0].click().run()
    assert asked.dataframe[0].value["rank"].tolist() == [0, 1]


def test_a_query_in_the_address_is_shown_and_runs_only_when_told_to(runs):
    shown = _page("sql", runs / recorded.GOOD, sql="SELECT 42 AS answer")
    assert not shown.exception
    assert shown.text_area[0].value == "SELECT 42 AS answer"
    assert "came with the address" in _said(shown)
    assert not shown.dataframe
    shown.button[0].click().run()
    assert shown.dataframe[0].value["answer"].tolist() == [42]
    assert "came with the address" not in _said(shown)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("DROP TABLE ops", "query:"),
        ("SELECT * FROM read_csv('/etc/passwd')", "query:"),
        ("SELECT nothing FROM ops", "nothing"),
    ],
)
def test_what_a_query_must_not_do_or_gets_wrong_is_said_as_text(runs, query, told):
    shown = _page("sql", runs / recorded.GOOD, sql=query)
    shown.button[0].click().run()
    assert not shown.exception
    assert told in shown.error[0].value.replace("\\", "")
    assert not shown.dataframe


def test_a_long_answer_is_cut_and_says_so(runs, monkeypatch):
    from dashboard.views import sql

    monkeypatch.setattr(sql, "MAX_ROWS", 3)
    shown = _page("sql", runs / recorded.GOOD, sql="SELECT * FROM range(10) t(n)")
    shown.button[0].click().run()
    assert "the first 3 rows" in _said(shown)
    assert len(shown.dataframe[0].value) == 3


def test_kernels_are_added_up_as_the_address_says(runs):
    shown = _page("kernels", runs / recorded.GOOD, by="phase", search="compute")
    assert not shown.exception
    table = next(each.value for each in shown.dataframe if "count" in each.value.columns)
    assert table["kind"].tolist() == ["compute"]
    assert table["count"].tolist() == [6]
    assert table["delay_p50_ns"].notna().all()


def test_a_finding_of_a_family_stands_on_its_page(runs):
    shown = _page("communication", runs / recorded.GOOD)
    assert not shown.exception
    assert "COMM001" in _html(shown)
    assert len(shown.get("plotly_chart")) == 3


def test_a_replay_is_shown_beside_the_record_as_a_prediction(tmp_path):
    run = run_on_a_device(tmp_path)
    simulated(run)
    shown = _page("memory", run)
    source = next(box for box in shown.selectbox if box.label == "From")
    source.select(next(option for option in source.options if "snapshot of rank 0" in option)).run()
    shown.toggle[0].set_value(True).run()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in [code.value for code in shown.code]
    next(button for button in shown.button if button.label == "Replay").click().run()
    assert not shown.exception
    assert "prediction of a model" in _said(shown)
    assert len(shown.get("plotly_chart")) == 2


def test_what_cannot_be_replayed_is_said(tmp_path):
    run = run_on_a_device(tmp_path)
    simulated(run)
    shown = _page("memory", run)
    next(box for box in shown.selectbox if "garbage" in box.label).select(0.8).run()
    next(button for button in shown.button if button.label == "Replay").click().run()
    assert not shown.exception
    assert "device-memory-gib" in _said(shown)
