"""Nodes in files: replays read only the columns that they need, and save the same."""

from pathlib import Path

import polars as pl
import pytest

from tracekit.ingest.loader import load
from tracekit.model.table_store import TableStore
from tracekit.replay.graph import causes, savings, trace_graph
from tracekit.replay.graph.nodes import NodeTable

SAMPLES = Path(__file__).parents[4] / "sample_traces"


@pytest.fixture(scope="module")
def runs():
    """Return a run with the tables of its facts in memory, and the same run with them in files."""
    in_memory, in_files = (load(SAMPLES / "faults" / "slow-rank") for _ in range(2))
    in_files._tables = TableStore(max_bytes=1)
    savings.graphs_of(in_files)
    assert in_files.parts(trace_graph.nodes)
    assert not in_memory.parts(trace_graph.nodes)
    return in_memory, in_files


@pytest.mark.parametrize("cause", [cause.name for cause in causes.run_causes()])
def test_savings_are_the_same_with_nodes_in_files(runs, cause):
    in_memory, in_files = (savings.saving(run, cause) for run in runs)
    assert in_files.steps.equals(in_memory.steps)
    assert in_files.unavailable_reason == in_memory.unavailable_reason
    assert in_files.confidence == in_memory.confidence


def test_some_rows_of_nodes_in_files_are_those_of_the_table(tmp_path):
    table = pl.DataFrame({"at": [0, 1, 2], "name": ["a", None, "c"]})
    table.write_parquet(tmp_path / "nodes.parquet")
    nodes = NodeTable(pl.scan_parquet(tmp_path / "nodes.parquet")).with_columns(own_ns=pl.Series([5, 6, 7]))
    assert len(nodes) == 3
    assert nodes.columns == ["at", "name", "own_ns"]
    assert nodes["own_ns"].to_list() == [5, 6, 7]
    assert nodes.rows(pl.Series([2, 0]).to_numpy()).rows() == [(2, "c", 7), (0, "a", 5)]
    assert nodes.slice(1, 2).select("at").to_series().to_list() == [1, 2]
