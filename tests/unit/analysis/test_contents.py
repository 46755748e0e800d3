"""Contents of traces, and what was not recorded."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tracekit.analysis.quality import contents
from tracekit.model import environment
from tracekit.model.trace import Trace


def test_contents_count_the_rows_with_each_attribute():
    columns = {"a": {"phase": "forward"}, "b": {"launch_id": None}}
    # Counted by hand: a, b, x and y; a alone is of a known phase, b alone has no launch.
    trace = drawn_traces.trace(
        "step 0011\ncompute ab..\ncomm ..xy", columns=columns, metrics=rule_examples.metrics("loss", 1.0)
    )
    row = contents.contents(trace).row(0, named=True)
    assert (row["steps"], row["first_step"], row["last_step"], row["span_ns"]) == (2, 0, 1, 4)
    assert (row["activities"], row["linked"], row["phased"]) == (4, 3, 1)
    assert (row["collectives"], row["metrics"], row["syncs"]) == (0, 1, 0)


def test_missing_data_is_listed_with_how_to_record_it():
    full = drawn_hosts.trace("step 00\ncompute aa", columns={"a": {"phase": "forward"}})
    bare = drawn_traces.trace("compute aa", rank=1)
    table = drawn_traces.run(full, bare).table(contents.missing)
    ranks = dict(table.select("missing", "ranks").iter_rows())
    assert ranks["steps"] == ranks["phases"] == [1]
    assert ranks["memory events"] == [0, 1]
    assert "message sizes" not in ranks  # there are no collectives
    assert table.filter(pl.col("missing") == "memory events")["how_to_record"].to_list() == ["profile_memory=True"]


def test_missing_data_is_listed_only_where_it_applies():
    table = drawn_traces.run(drawn_traces.trace("compute aa", on_device=False)).table(contents.missing)
    assert not {"synchronization events", "memory snapshot"} & set(table["missing"])


def test_contents_of_a_trace_without_work():
    row = contents.contents(Trace(0, 0, "empty")).row(0, named=True)
    assert (row["on_device"], row["activities"], row["span_ns"], row["first_step"]) == (False, 0, None, None)


@pytest.mark.parametrize(("size", "count"), [("4", 4), ("²", None), ("9" * 5000, None), ("-1", None), ("4.0", None)])
def test_a_number_of_ranks_that_a_header_states_oddly_is_not_known(size, count, monkeypatch):
    run = drawn_traces.run(drawn_traces.trace("compute aa"))
    stated = pl.DataFrame({"name": ["world_size"], "value": [size]})
    monkeypatch.setattr(type(run), "table", lambda *_: stated)
    assert environment.stated_rank_count(run) == count
