"""Numeric faults of two ranks: a comparison names the step, the ranks and the module."""

from pathlib import Path

import pytest

import tracekit
from benchmarks import numeric_faults
from benchmarks.numeric_faults import FAULTS, Outcome, Place
from tracekit.regression import numbers


@pytest.mark.timeout(300)
def test_a_gradient_that_is_not_reduced_is_named(tmp_path: Path) -> None:
    place = Place(step=4, rank=1, module="blocks.1.up")
    recorded = []
    for name in ("none", "reduction"):
        numeric_faults.record(name, place, tmp_path / name)
        recorded.append(numbers.run_numbers(tracekit.load(str(tmp_path / name), cache=False)))
    agreement = numbers.agreement(*recorded)
    assert agreement is not None
    fault = next(fault for fault in FAULTS if fault.name == "reduction")
    result = Outcome(fault, place, agreement)
    assert (result.has_step, result.has_rank, result.has_module) == (True, True, True)


@pytest.mark.accuracy  # measures truth
@pytest.mark.timeout(1800)
def test_every_fault_is_named(tmp_path: Path) -> None:
    for result in numeric_faults.outcomes([3], tmp_path):
        assert (result.has_step, result.has_rank, result.has_module) == (True, True, True), result
