"""Findings on late ranks and slow stages name what takes longer: extra calls, a slow device, or a late host."""

from pathlib import Path

import polars as pl
import pytest

from tracekit.analysis.compute.excess_time import LARGER
from tracekit.analysis.parallelism import late_ranks
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.pipeline import UnbalancedStages
from tracekit.rules.stragglers import LateGroup, OccasionalStraggler, Straggler, UnevenRanks

SAMPLES = Path(__file__).parents[3] / "sample_traces"
RECORDINGS = Path(__file__).parents[2] / "recordings"
CASES = Path(__file__).parents[3].parent / "shared" / "cases"
RULES = [Straggler(), LateGroup(), UnevenRanks(), OccasionalStraggler()]
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases, which is not part of the project")


@pytest.mark.parametrize(
    ("folder", "kernel", "count"),
    [("gpu/slow-rank", "spin_kernel", "3 times"), ("faults/slow-rank", "aten::matmul", "47 times")],
)
def test_the_claim_counts_the_calls_that_the_other_rank_never_runs(folder: str, kernel: str, count: str) -> None:
    (found,) = check(load(SAMPLES / folder), [Straggler()]).findings
    assert found.ranks == (1,)
    assert all(part in found.claim for part in (kernel, count, "never", "rank 0"))
    assert kernel in found.fix


def test_a_slow_stage_names_the_calls_that_the_others_do_not_have() -> None:
    (found,) = check(load(SAMPLES / "parallelism" / "pipeline-slow-stage"), [UnbalancedStages()]).findings
    assert "Stage 1" in found.claim
    assert "aten::matmul" in found.claim


@needs_cases
def test_unrelated_late_ranks_are_two_causes() -> None:
    found = {finding.ranks: finding for finding in check(load(CASES / "two_late_ranks"), RULES).findings}
    assert set(found) == {(0,), (1,)}
    assert "All kernels of rank 0" in found[0,].claim
    assert "host" in found[1,].claim
    # Together they save what a replay without both saves: 24% of the step.
    assert sum(finding.impact for finding in found.values()) == pytest.approx(0.24, abs=0.01)


@needs_cases
def test_a_rank_that_is_last_in_all_steps_by_a_varying_time_straggles() -> None:
    (found,) = check(load(CASES / "late_by_varying_time"), RULES).findings
    assert (found.code, found.ranks) == ("RANK001", (6,))
    assert found.cost_ns == pytest.approx(3_335_000, rel=0.15)


@needs_cases
def test_a_rank_whose_host_pauses_in_some_steps_recurs() -> None:
    (found,) = check(load(CASES / "gcstraggler"), RULES).findings
    assert (found.code, found.ranks, found.steps) == ("RANK005", (1,), (11, 13, 14))
    assert "host" in found.claim


def test_recorded_batches_of_another_size_are_larger_inputs() -> None:
    # Rank 1 has 512 samples in each batch, rank 0 has 32 (record_uneven_batches.py).
    run = load(RECORDINGS / "uneven_batches")
    (straggler,) = (finding for finding in check(run, RULES).findings if finding.code == "RANK001")
    excess = late_ranks.excess_time(run, late_ranks.of_steps([1], pl.DataFrame({"window": 0, "step": straggler.steps})))
    assert excess is not None
    assert (straggler.ranks, excess.largest) == ((1,), LARGER)
    assert excess.size_ratio == pytest.approx(16, rel=0.01)
    assert excess.kinds[LARGER] > 0.6 * excess.total_ns
    assert "16.0 times" in straggler.claim
    assert "if they were balanced" in straggler.message
