"""A small version of the measurement of `compare`: planted changes of simulated jobs are decided and named."""

from pathlib import Path

import pytest

from benchmarks import compare_verdicts
from benchmarks.compare_verdicts import Outcome
from tests.support.selection import others_in_accuracy
from tracekit.analysis.host import step_parts
from tracekit.regression import comparison
from tracekit.regression.comparison import RunSamples
from tracekit.simulate import job as jobs

FAULTS = [("dataloader-stall", 0.1), ("dataloader-stall", 0.5), ("slow-rank:1", 0.2), ("late-launch", 0.2)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RunSamples:
    return compare_verdicts.simulate(compare_verdicts.simulated_job(jobs.DDP, 1), tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize(("fault", "size"), others_in_accuracy(FAULTS, [FAULTS[0], FAULTS[2]]))
def test_a_planted_change_is_decided_named_and_divided_exactly(
    healthy: RunSamples, fault: str, size: float, tmp_path: Path
) -> None:
    unit, largest, kind = compare_verdicts.SIMULATED[fault]
    job = compare_verdicts.with_growth(compare_verdicts.simulated_job(jobs.DDP, 501), fault, unit, largest, size)
    assert job is not None
    compared = comparison.compare(healthy, compare_verdicts.simulate(job, tmp_path))
    outcome = Outcome.of("simulated", fault, size, compared, compare_verdicts.names([kind]))
    assert (outcome.is_decided, outcome.is_named, outcome.off_ns) == (True, True, 0)
    assert compared.step is not None
    assert compared.step.change == pytest.approx(size, rel=0.4)


def test_two_seeds_of_one_job_are_neither_worse_nor_better(healthy: RunSamples, tmp_path: Path) -> None:
    other = compare_verdicts.simulate(compare_verdicts.simulated_job(jobs.DDP, 2), tmp_path)
    for before, after in ((healthy, other), (other, healthy)):
        outcome = Outcome.of("simulated", "", 0.0, comparison.compare(before, after))
        assert (outcome.is_decided, outcome.off_ns) == (False, 0)


def test_the_table_counts_planted_pairs_and_pairs_without_a_change() -> None:
    outcomes = [
        Outcome("simulated", "stall", 0.1, is_decided=True, is_named=True, off_ns=0, sentence=""),
        Outcome("simulated", "stall", 0.1, is_decided=False, is_named=True, off_ns=-2, sentence=""),
        Outcome("simulated", "", 0.0, is_decided=False, is_named=True, off_ns=0, sentence=""),
    ]
    lines = compare_verdicts.table(outcomes)
    assert "| **all** | 10% | 2 | 1 | 2 |" in lines
    assert "| **all** | 1 | 0 |" in lines
    assert "within 2 ns" in lines[-1]


def test_a_fault_that_makes_no_step_longer_has_no_size() -> None:
    job = compare_verdicts.simulated_job(jobs.DDP, 1)
    assert compare_verdicts.with_growth(job, "slow-network", "", 1.001, 5.0) is None
    assert step_parts.COMMUNICATION in compare_verdicts.SIMULATED["slow-network"]
