"""Names of ops and activities that match a pattern."""

import polars as pl
import pytest

from tracekit.analysis.time import trace_columns
from tracekit.model import schema
from tracekit.model.trace import Trace


def _trace(names: list[str | None], kinds: list[str | None]) -> Trace:
    rows = pl.DataFrame({"id": range(len(names)), "name": names, "kind": kinds}, schema_overrides={"name": pl.String})
    return Trace(0, 0, "trace.json", ops=schema.OPS.conform(rows))


def test_ops_match_by_their_names_and_unknown_names_and_kinds_match_nothing() -> None:
    trace = _trace(["cudaMalloc", "aten::mm", None, "cudaMalloc"], ["runtime", "cpu_op", None, None])
    assert trace_columns.is_named(trace, "^cuda").tolist() == [True, False, False, True]
    assert trace_columns.is_kind(trace, "runtime").tolist() == [True, False, False, False]


def test_matches_are_those_of_polars_after_other_traces_with_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_columns, "_MAX_KNOWN_NAMES", 3)
    pattern = r"(?i)\bgc[._ ]?collect|garbage"
    for names in (["gc.collect", "a"], ["a", "b", "Garbage"], ["c", "d", "gc_collect", "gccollected"], []):
        found = trace_columns.matches(names, pattern).tolist()
        assert found == pl.Series(names, dtype=pl.String).str.contains(pattern).to_list()


def test_a_trace_without_ops_has_no_ops_that_match() -> None:
    trace = Trace(0, 0, "trace.json")
    assert trace_columns.is_named(trace, "x").tolist() == []
    assert trace_columns.launch_rows(trace).tolist() == []
