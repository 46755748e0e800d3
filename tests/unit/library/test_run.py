"""A run of the library serves tables by name, and says what is wrong with a request."""

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.library.run import Run, Tables
from tracekit.model.fact import run_fact, trace_fact
from tracekit.sql import run_tables

PUBLIC = [
    "check", "compare", "data_quality", "manifest", "measure", "measured_tables", "name", "named_table", "of_ranks",
    "offsets", "parts", "path", "plot", "ranks", "read", "role", "roles", "scan", "sources", "table", "tables",
    "timeline", "trace", "traces", "use_cache", "cache_traces", "what_if",
]  # fmt: skip


@run_fact
def ranks(run):
    return pl.DataFrame({"rank": run.ranks})


@trace_fact
def work(trace):
    return trace.activities.select(pl.len())


def undecorated(run):
    return pl.DataFrame({"rank": run.ranks})


@pytest.fixture(scope="module")
def run() -> Run:
    pictures = {0: "step 000111\ncompute aab.cc\ncomm ..xxx.", 1: "step 000111\ncompute aa.bcc\ncomm ..xxx."}
    drawn = drawn_traces.run(*(drawn_traces.trace(picture, rank=rank) for rank, picture in pictures.items()))
    return Run(drawn.path, drawn.sources)


def test_the_public_names_are_these():
    assert set(tracekit.__all__) == {"RULES", "Finding", "Rule", "Run", "Trace", "check", "load", "query"}
    assert tracekit.Run is Run
    assert sorted(name for name in dir(Run("", [])) if not name.startswith("_")) == sorted(PUBLIC)


@pytest.mark.parametrize("fact", run_tables.FACTS, ids=lambda fact: fact.name)
def test_every_table_of_the_schema_is_served_by_name_with_its_columns(run, fact):
    table = run.table(fact.name)
    assert dict(table.schema) == dict(fact.published_table.schema)
    assert table.equals(run.table(fact))


def test_facts_of_traces_and_of_the_run_are_measured_by_one_method(run):
    assert run.table(work).columns == ["window", "rank", "len"]
    assert run.table(ranks)["rank"].to_list() == [0, 1]
    assert run.table("breakdown").equals(run.table(breakdown.by_step))


def test_a_wrong_name_lists_similar_ones_and_all_tables(run):
    with pytest.raises(InputError, match=r"^step: no such table, did you mean steps\?; the tables are lanes, steps, "):
        run.table("step")
    with pytest.raises(InputError, match="no such table"):
        run.tables["nothing"]
    with pytest.raises(AttributeError, match="no table nothing"):
        _ = run.tables.nothing


def test_what_is_no_fact_is_refused_with_the_reason(run, wording):
    with wording.raises(TypeError):
        run.table(3)
    for function in (undecorated, breakdown.slowest_device_in_steps):
        with pytest.raises(TypeError, match=f"^{function.__name__} was called with each trace .* decorate it with"):
            run.table(function)


def test_an_error_of_a_fact_stays_its_own(run):
    @trace_fact
    def broken(trace):
        return trace.nothing

    with pytest.raises(AttributeError, match="nothing"):
        run.table(broken)


def test_tables_are_listed_with_what_a_row_is_and_measured_only_on_request():
    served = []
    tables = Tables(lambda name: served.append(name) or pl.DataFrame())
    assert len(tables) == len(list(tables)) == len(run_tables.FACTS)
    assert "<td>breakdown</td>" in tables._repr_html_()
    assert "breakdown" in repr(tables)
    assert not hasattr(tables, "_repr_mimebundle_")
    assert served == []
    assert tables.steps.is_empty()
    assert tables["ops"].is_empty()
    assert served == ["steps", "ops"]


def test_a_notebook_completes_the_names_of_tables(run):
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    completer = pytest.importorskip("IPython.core.completer")
    shell = interactive.InteractiveShell(user_ns={"run": run})
    for text in ("run.tables.br", 'run.tables["br'):
        with completer.provisionalcompleter():
            names = [completion.text for completion in shell.Completer.completions(text, len(text))]
        assert "breakdown" in " ".join(names), text


def test_a_part_of_a_run_has_the_same_methods(run):
    part = run.of_ranks([1])
    assert isinstance(part, Run)
    assert part.table("breakdown")["rank"].unique().to_list() == [1]
