"""Axes of training by DTensor, recorded without shapes (tests/recordings/README.md)."""

import polars as pl
import pytest

import tracekit
from tests.support.python_path import REPOSITORY
from tracekit.analysis.parallelism import axis_communication, collective_purposes, group_axes
from tracekit.analysis.parallelism.collective_purposes import ACTIVATIONS, PARAMETERS
from tracekit.model.run import Run

LAYERS = 2


def recorded(path: str) -> Run:
    return tracekit.load(str(REPOSITORY / path), cache=False)


def counts(run: Run, *by: str) -> dict[tuple[object, ...], int]:
    """Return how many collectives rank 0 has for each combination of the columns."""
    calls = run.run_table(axis_communication.calls).filter(pl.col("rank") == 0)
    return {tuple(row[:-1]): row[-1] for row in calls.group_by(by).len().iter_rows()}


def test_all_reduces_in_forward_and_backward_of_layers_are_of_tensor_parallelism() -> None:
    run = recorded("tests/recordings/dtensor_tp")
    assert run.run_table(group_axes.group_axes)["axis"].to_list() == ["tp"]
    assert counts(run, "axis", "phase") == {("tp", None): LAYERS, ("tp", "backward"): LAYERS}


def test_each_collective_of_unnamed_groups_has_the_axis_of_what_it_transfers() -> None:
    run = recorded("tests/recordings/dtensor_tp_fsdp2")
    assert counts(run, "axis", "op", "purpose") == {
        ("tp", "all_reduce", ACTIVATIONS): 2 * LAYERS,
        ("dp", "all_gather", PARAMETERS): 2 * LAYERS,
        ("dp", "reduce_scatter", PARAMETERS): LAYERS,
    }


@pytest.mark.parametrize("sample", ["healthy-ddp", "healthy-fsdp2"])
def test_data_parallel_training_transfers_no_activations(sample: str) -> None:
    run = recorded(f"sample_traces/faults/{sample}")
    assert set(run.table(collective_purposes.purposes)["purpose"]) == {PARAMETERS}
    assert set(run.run_table(group_axes.group_axes)["axis"]) == {"dp"}
