"""Comparison of recordings: few false alarms, real changes are found, and doubt is reported."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sample_baselines
from tracekit.regression.metrics import metric_of
from tracekit.regression.samples import Values
from tracekit.regression.significance import compare_recordings, student_t, variance_of_median
from tracekit.regression.thresholds import Change, Verdict

STEP_NS = 100e6


def recordings(
    random: np.random.Generator, count: int, *, median: float = STEP_NS, between: float, within: float = 0.03
) -> list[Values]:
    """Return simulated recordings whose medians differ by `between`, each with 40 steps that differ by `within`."""
    places = median * np.exp(random.normal(0, between, count))
    return [np.asarray(place * np.exp(random.normal(0, within, 40))) for place in places]


def verdicts(metric: str, pairs: int, *, seed: int, before: int, after: int, between: float, grown: float) -> list[str]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(pairs):
        a = recordings(random, before, between=between)
        b = recordings(random, after, median=STEP_NS * (1 + grown), between=between)
        found.append(compare_recordings(metric_of(metric), a, b).verdict.value)
    return found


@pytest.mark.parametrize(("before", "after", "between"), [(1, 1, 0.04), (5, 1, 0.02), (5, 1, 0.08), (5, 3, 0.04)])
def test_recordings_of_the_same_training_raise_few_false_alarms(before: int, after: int, between: float) -> None:
    found = verdicts("step_time_ns", 80, seed=1, before=before, after=after, between=between, grown=0.0)
    assert found.count("worse") <= 0.03 * 80
    assert found.count("better") <= 0.03 * 80


def test_a_shift_of_10_percent_is_found_if_recordings_vary_little() -> None:
    found = verdicts("cpu_time_ns", 40, seed=2, before=5, after=1, between=0.01, grown=0.1)
    assert found.count("worse") >= 0.95 * 40
    assert "better" not in found


def test_more_recordings_find_what_one_cannot() -> None:
    one, three = (
        verdicts("cpu_time_ns", 50, seed=3, before=5, after=after, between=0.025, grown=0.1).count("worse")
        for after in (1, 3)
    )
    assert three > one + 10


def test_a_shift_of_10_percent_from_a_single_recording_is_inconclusive() -> None:
    found = compare_recordings(
        metric_of("step_time_ns"), [sample_baselines.steps(100e6)], [sample_baselines.steps(110e6, seed=1)]
    )
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.more_recordings > 0
    assert found.more_samples == 0


def test_noisy_steps_of_a_single_recording_widen_the_interval() -> None:
    random = np.random.default_rng(7)
    wild = 0
    for _ in range(40):
        # Recordings differ by 20%, and so do the steps within one.
        a, b = (recordings(random, 1, between=0.2, within=0.3) for _ in range(2))
        wild += compare_recordings(metric_of("step_time_ns"), a, b).verdict in (Verdict.WORSE, Verdict.BETTER)
    assert wild <= 3


def test_few_noisy_steps_ask_for_more_samples_not_recordings() -> None:
    wild = [np.array([60e6, 80e6, 100e6, 120e6, 140e6]), np.array([65e6, 85e6, 105e6, 125e6, 145e6])]
    found = compare_recordings(metric_of("cpu_time_ns"), wild[:1], wild[1:])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.more_samples > 0
    assert found.more_recordings == 0


@pytest.mark.parametrize(
    ("metric", "before", "after", "verdict"),
    [
        ("allocated_bytes", 100.0, 100.0, "same"),
        ("allocated_bytes", 100.0, 102.0, "same"),
        ("allocated_bytes", 100.0, 104.0, "worse"),
        ("allocated_bytes", 100.0, 90.0, "better"),
        ("sent_bytes", 0.0, 5.0, "worse"),
        ("sent_bytes", 0.0, 0.0, "same"),
        ("flops", 1e9, 1.1e9, "worse"),
    ],
)
def test_counts_need_no_repetition(metric: str, before: float, after: float, verdict: str) -> None:
    found = compare_recordings(metric_of(metric), [np.full(5, before)], [np.full(5, after)])
    assert found.verdict.value == verdict


def test_a_part_of_the_step_must_be_relevant_to_the_step() -> None:
    small, large = [sample_baselines.steps(1e6)] * 5, [sample_baselines.steps(1.5e6)]
    assert compare_recordings(metric_of("transfer_ns"), small, large, total=10e6).verdict is Verdict.WORSE
    assert compare_recordings(metric_of("transfer_ns"), small, large, total=100e6).verdict is not Verdict.WORSE


def test_few_saves_are_compared() -> None:
    before = [np.array([200e6 + n * 1e6, 210e6]) for n in range(5)]
    found = compare_recordings(metric_of("checkpoint_cpu_ns"), before, [np.array([300e6, 310e6])])
    assert (found.verdict, found.candidate_samples) == (Verdict.WORSE, 2)
    one = compare_recordings(metric_of("checkpoint_cpu_ns"), before[:1], [np.array([300e6, 310e6])])
    assert (one.verdict, one.more_samples) == (Verdict.INCONCLUSIVE, 1)


def test_fewer_tokens_a_second_are_worse_and_more_are_better() -> None:
    before = [sample_baselines.steps(1000.0, seed=n, spread=0.01) for n in range(5)]
    for factor, verdict in ((0.5, Verdict.WORSE), (2.0, Verdict.BETTER)):
        assert (
            compare_recordings(
                metric_of("tokens_per_second"), before, [sample_baselines.steps(1000.0 * factor)]
            ).verdict
            is verdict
        )


@given(
    st.lists(st.floats(1, 1e6), min_size=5, max_size=30),
    st.lists(st.floats(1, 1e6), min_size=5, max_size=30),
    st.floats(0.1, 1e6),
)
@settings(max_examples=40, deadline=None)
def test_the_unit_of_a_metric_changes_no_verdict(before: list[float], after: list[float], factor: float) -> None:
    def verdict(scale: float) -> Change:
        return compare_recordings(metric_of("step_time_ns"), [np.array(before) * scale], [np.array(after) * scale])

    plain, scaled = verdict(1.0), verdict(factor)
    assert plain.verdict == scaled.verdict
    assert scaled.change == pytest.approx(plain.change, rel=1e-6, abs=1e-9)


def test_students_quantiles_are_those_of_tables() -> None:
    tables = {(0.995, 3): 5.841, (0.995, 4): 4.604, (0.975, 3): 3.182, (0.975, 8): 2.306, (0.995, 30): 2.750}
    for (probability, degrees), expected in tables.items():
        assert student_t(probability, degrees) == pytest.approx(expected, rel=0.012)


def test_the_variance_of_a_median_is_that_of_resampled_medians() -> None:
    random = np.random.default_rng(5)
    true = np.var([np.median(random.normal(0, 1, 60)) for _ in range(1000)])
    estimate = np.mean([variance_of_median(random.normal(0, 1, 60)) for _ in range(60)])
    assert 0.75 * true < estimate < 1.5 * true  # a bootstrap of a median is a little wide


def test_correlated_steps_count_less_than_independent_ones() -> None:
    random = np.random.default_rng(6)
    alike = np.repeat(random.normal(0, 1, 20), 4)
    shuffled = random.permutation(alike)
    assert variance_of_median(alike) > 1.5 * variance_of_median(shuffled)


def test_a_warm_up_that_both_recordings_have_hides_no_change() -> None:
    before, after = np.array([359e6, 157e6, 153e6]), np.array([419e6, 217e6, 213e6])
    assert compare_recordings(metric_of("step_time_ns"), [before], [after]).verdict is Verdict.INCONCLUSIVE
    assert compare_recordings(metric_of("step_time_ns"), [before], [after], is_paired=True).verdict is Verdict.WORSE


@pytest.mark.parametrize("steps", [3, 12])
def test_paired_recordings_of_the_same_training_raise_few_false_alarms(steps: int) -> None:
    random = np.random.default_rng(11)
    wrong = 0
    for _ in range(300):
        common = np.where(np.arange(steps) == 0, 3.0, 1.0)
        a, b = (
            [STEP_NS * common * np.exp(random.normal(0, 0.015) + random.normal(0, 0.03, steps)) for _ in range(count)]
            for count in (int(random.choice((1, 3))), 1)
        )
        found = compare_recordings(metric_of("step_time_ns"), a, b, is_paired=True)
        wrong += found.verdict in (Verdict.WORSE, Verdict.BETTER)
    assert wrong <= 3


def test_pairing_needs_no_less_evidence_where_steps_have_nothing_in_common() -> None:
    random = np.random.default_rng(12)
    margins: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(60):
        a, b = (np.exp(random.normal(0, 0.2, 12)) for _ in range(2))
        for is_paired, found in margins.items():
            change = compare_recordings(metric_of("step_time_ns"), [a], [b], is_paired=is_paired)
            found.append(float(np.log1p(change.high or 0) - np.log1p(change.low or 0)))
    assert np.median(margins[True]) == pytest.approx(np.median(margins[False]), rel=0.25)
