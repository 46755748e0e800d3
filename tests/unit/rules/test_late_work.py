"""Findings on late ranks and slow stages name what takes longer: extra calls, a slow device, or a late host."""

import random
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_traces, operator_traces
from tracekit.analysis.compute.excess_time import LARGER
from tracekit.analysis.parallelism import late_ranks
from tracekit.ingest.loader import load
from tracekit.model import schema, units
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.rules.engine import check
from tracekit.rules.pipeline import UnbalancedStages
from tracekit.rules.rule import Severity
from tracekit.rules.stragglers import LateGroup, OccasionalStraggler, Straggler, UnevenRanks

SAMPLES = Path(__file__).parents[3] / "sample_traces"
RECORDINGS = Path(__file__).parents[2] / "recordings"
CASES = Path(__file__).parents[3].parent / "shared" / "cases"
RULES = [Straggler(), LateGroup(), UnevenRanks(), OccasionalStraggler()]
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases, which is not part of the project")


@pytest.mark.parametrize(
    ("folder", "kernel", "count"),
    [("gpu/slow-rank", "spin_kernel", "3 calls"), ("faults/slow-rank", "aten::matmul", "47 calls")],
)
def test_the_claim_counts_the_calls_that_the_other_rank_never_runs(folder: str, kernel: str, count: str) -> None:
    (found,) = check(load(SAMPLES / folder), [Straggler()]).findings
    assert found.ranks == (1,)
    assert all(part in found.claim for part in (kernel, count, "not", "rank 0"))
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
    assert all(finding.evidence["late_rank"].unique().to_list() == list(ranks) for ranks, finding in found.items())
    # Together they save what a replay without both saves: 24% of the step.
    assert sum(finding.impact for finding in found.values()) == pytest.approx(0.24, abs=0.01)


@pytest.mark.accuracy  # analysis/test_excess_time draws such ranks
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


def uneven_run(*steps: Sequence[Sequence[int]], grows: bool = True) -> Run:
    """Return a run whose steps have these batches, of each rank, with an all-reduce after each; ranks end together."""
    ranks, traces = range(len(steps[0][0])), []
    for rank in ranks:
        calls: list[list[operator_traces.Call]] = [[] for _ in steps]
        for number, step in enumerate(steps):
            for batch in step:
                shapes = f"[[{batch[rank] if grows else 8}, 64]]"
                calls[number].append(("aten::mm", batch[rank] * _SAMPLE_NS, shapes))
                calls[number].append(("c10d::allreduce_", (max(batch) - batch[rank]) * _SAMPLE_NS + _REDUCE_NS))
        traces.append(with_reductions(operator_traces.trace(*calls, rank=rank), ranks=len(ranks)))
    return drawn_traces.run(*traces)


def with_reductions(trace: Trace, *, ranks: int) -> Trace:
    """Return the trace with its communication as all-reduces of one group of all ranks."""
    of_group = {"op": pl.lit("all_reduce"), "group": pl.lit("0"), "group_size": pl.lit(ranks)}
    collectives = trace.activities.filter(kind="communication").select(activity_id="id", **of_group)
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(ranks))]})
    return trace.replace(collectives=schema.COLLECTIVES.conform(collectives), groups=schema.GROUPS.conform(groups))


_SAMPLE_NS, _REDUCE_NS = 10_000, 20_000
_CALL = ("aten::mm", 100_000, "[[64, 64]]")


def test_the_share_and_the_saving_of_larger_inputs_of_ranks_in_turn() -> None:
    # In each step one of four ranks, or another, has larger batches, as with sequences of different length.
    draw = random.Random(1)
    batches = [[draw.randint(6, 16) for _ in range(4)] for _ in range(12)]
    (uneven,) = check(uneven_run(*([batch] * 3 for batch in batches)), [UnevenRanks()]).findings
    assert uneven.severity is Severity.WARNING
    assert "inputs are" in uneven.claim
    assert "explain 100.0% of the wait" in uneven.message
    # What balanced batches save is what the ranks wait for in the mean: the finding's own number.
    assert f"a step would be {units.duration(uneven.cost_ns)} shorter" in uneven.message
    savings = {3 * round((max(batch) - sum(batch) / 4) * _SAMPLE_NS) for batch in batches}
    assert any(uneven.cost_ns == pytest.approx(saving_ns, rel=0.02) for saving_ns in savings)


def test_single_pauses_of_ranks_in_turn_with_the_same_inputs_are_information() -> None:
    even = [[8, 8]] * 3
    pauses = [[[24, 8], *even], [*even, [8, 24]]]
    runs = {
        "pauses": uneven_run(*pauses, grows=False),
        "often": uneven_run(*[[[24, 8], *even, [8, 24]]] * 6, grows=False),
        "larger": uneven_run(*pauses),
    }
    severities = {}
    for name, run in runs.items():
        (uneven,) = check(run, [UnevenRanks()]).findings
        severities[name] = uneven.severity
    assert severities == {"pauses": Severity.INFO, "often": Severity.WARNING, "larger": Severity.WARNING}


def test_the_first_finding_of_the_sample_without_prefetch_is_the_gather() -> None:
    report = check(load(SAMPLES / "faults" / "no-prefetch"))
    assert [finding.code for finding in report.findings if finding.severity > Severity.INFO] == ["COMM001"]
    assert "RANK003" in {finding.code for finding in report.findings}


_TURN = {
    "larger": ([("aten::mm", 200_000, "[[128, 64]]")], "inputs are 2.0 times", "tokens"),
    "slower": ([("aten::mm", 200_000, "[[64, 64]]")], "aten::mm takes 2.0 times", "clocks"),
    "extra": ([_CALL, ("aten::sort", 100_000, "[[64, 64]]")], "18 calls of", "aten::sort"),
}
"""What a rank runs before the collective at which it is last, and parts of the claim and of the fix."""


@pytest.mark.parametrize(("turn", "in_claim", "in_fix"), _TURN.values(), ids=_TURN)
def test_ranks_that_take_turns_within_a_step_say_for_what(
    turn: list[operator_traces.Call], in_claim: str, in_fix: str
) -> None:
    # In each of six steps rank 0 is last at the first all-reduce, rank 1 at the second, rank 2 at the third.
    traces = []
    for rank in range(3):
        calls: list[operator_traces.Call] = []
        for layer in range(3):
            is_last = layer == rank
            calls += turn if is_last else [_CALL]
            calls.append(("c10d::allreduce_", _REDUCE_NS if is_last else _REDUCE_NS + 100_000))
        traces.append(with_reductions(operator_traces.trace(*[calls] * 6, rank=rank), ranks=3))
    (uneven,) = check(drawn_traces.run(*traces), [Straggler(), UnevenRanks()]).findings
    assert (uneven.code, uneven.ranks) == ("RANK003", (0, 1, 2))
    assert in_claim in uneven.claim
    assert in_fix in uneven.fix
    assert uneven.message.count("is last at 6") == 3
    assert uneven.message.count("100 µs for") == 3
    assert uneven.impact == pytest.approx(0.3, abs=0.01)


@needs_cases
def test_late_ranks_of_a_cpu_run_have_operators_and_no_kernels() -> None:
    (late_rank, *_) = check(load(CASES / "oversub"), [Straggler(), OccasionalStraggler(), UnevenRanks()]).findings
    assert "operators" in late_rank.claim
    assert "kernels" not in late_rank.claim


def test_the_host_of_a_cpu_run_calls_operators_late() -> None:
    claims = [finding.claim for finding in check(load(RECORDINGS / "host_phases"), RULES).findings]
    assert any("calls operators late" in claim for claim in claims)
    assert not any("kernels" in claim for claim in claims)
