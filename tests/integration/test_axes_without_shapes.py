"""Axes of training by DTensor, recorded without shapes (tests/recordings/README.md)."""

import polars as pl
import pytest

import tracekit
from tests.support.python_path import REPOSITORY
from tracekit.analysis.parallelism import axis_communication, group_axes, tensor_parallel
from tracekit.analysis.parallelism.group_axes import ACTIVATIONS, PARAMETERS
from tracekit.model import intervals
from tracekit.model.run import Run
from tracekit.rules.engine import check
from tracekit.rules.model_parallel import ExposedTensorParallel

LAYERS = 2


def recorded(path: str) -> Run:
    return tracekit.load(str(REPOSITORY / path))


def counts(run: Run, *by: str) -> dict[tuple[object, ...], int]:
    """Return how many collectives rank 0 has for each combination of the columns."""
    calls = run.table(axis_communication.calls).filter(pl.col("rank") == 0)
    return {tuple(row[:-1]): row[-1] for row in calls.group_by(by).len().iter_rows()}


def test_all_reduces_in_forward_and_backward_of_layers_are_of_tensor_parallelism() -> None:
    run = recorded("tests/recordings/dtensor_tp")
    assert run.table(group_axes.group_axes)["axis"].to_list() == ["tp"]
    assert counts(run, "axis", "phase") == {("tp", None): LAYERS, ("tp", "backward"): LAYERS}


def test_each_collective_of_unnamed_groups_has_the_axis_of_what_it_transfers() -> None:
    run = recorded("tests/recordings/dtensor_tp_fsdp2")
    assert counts(run, "axis", "op", "purpose") == {
        ("tp", "all_reduce", ACTIVATIONS): 2 * LAYERS,
        ("dp", "all_gather", PARAMETERS): 2 * LAYERS,
        ("dp", "reduce_scatter", PARAMETERS): LAYERS,
    }


def test_exposed_tensor_parallel_time_is_that_of_its_collectives_where_no_group_is_named() -> None:
    run = recorded("tests/recordings/dtensor_tp_fsdp2")
    reduces = run.table(axis_communication.calls).filter(pl.col("op") == "all_reduce")
    compute = axis_communication.compute_spans(run)
    by_hand = {}
    for (window, rank), own in reduces.partition_by("window", "rank", as_dict=True).items():
        spans = intervals.union(own.select("start_ns", "end_ns").to_numpy())
        hidden = intervals.intersect(spans, compute[window, rank])
        by_hand[rank] = intervals.length(spans) - intervals.length(hidden)
    measured = run.table(tensor_parallel.exposed_by_step)
    assert dict(measured.select("rank", "exposed_ns").iter_rows()) == by_hand
    (found,) = check(run, [ExposedTensorParallel()]).findings
    assert "axis tp, inferred" in found.message
    assert by_hand[1] > 0.3 * measured["duration_ns"][1]


def test_every_collective_of_experts_and_data_parallelism_has_an_axis() -> None:
    rows = axis_communication.by_axis(recorded("sample_traces/parallelism/moe-ep2"))
    assert set(rows.select("axis", "source").iter_rows()) == {("ep", "inferred"), ("dp_shard", "manifest")}


@pytest.mark.parametrize("sample", ["healthy-ddp", "healthy-fsdp2"])
def test_data_parallel_training_transfers_no_activations(sample: str) -> None:
    run = recorded(f"sample_traces/faults/{sample}")
    assert set(run.table(group_axes.purposes)["purpose"]) == {PARAMETERS}
    assert set(run.table(group_axes.group_axes)["axis"]) == {"dp"}
