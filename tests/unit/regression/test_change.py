"""The statistics of a comparison: rarely a false alarm, real changes found, and honesty where steps are few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.regression.change import Change, Values, Verdict, compare_samples

STEP_NS = 100e6


def noisy(random: np.random.Generator, count: int, *, median: float = STEP_NS, spread: float = 0.05) -> Values:
    """Return simulated step times: log-normal, as steps of a shared machine are."""
    return np.asarray(median * np.exp(random.normal(0, spread, count)))


def test_two_recordings_of_the_same_rarely_look_worse() -> None:
    random = np.random.default_rng(1)
    pairs = 200
    for count in (5, 20):
        verdicts = [
            compare_samples("step_time_ns", noisy(random, count), noisy(random, count)).verdict for _ in range(pairs)
        ]
        # Of a 95% interval, 2.5% lie above; 6% is four standard errors more.
        assert verdicts.count(Verdict.WORSE) <= 0.06 * pairs
        assert verdicts.count(Verdict.BETTER) <= 0.06 * pairs


def test_a_shift_of_a_tenth_is_found_and_never_called_better() -> None:
    random = np.random.default_rng(2)
    verdicts = [
        compare_samples("step_time_ns", noisy(random, 30), noisy(random, 30, median=1.1 * STEP_NS)).verdict
        for _ in range(50)
    ]
    assert verdicts.count(Verdict.WORSE) >= 48
    assert Verdict.BETTER not in verdicts


def test_the_interval_holds_the_true_change_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        found = compare_samples("step_time_ns", noisy(random, 15), noisy(random, 15, median=1.2 * STEP_NS))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.2 <= found.high
    assert held >= 0.9 * 200


def test_the_same_samples_give_the_same_answer() -> None:
    random = np.random.default_rng(4)
    before, after = noisy(random, 12), noisy(random, 12)
    assert compare_samples("step_time_ns", before, after) == compare_samples("step_time_ns", before, after)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(1e3, 1e12), min_size=5, max_size=12),
    st.lists(st.floats(1e3, 1e12), min_size=5, max_size=12),
)
def test_what_is_worse_one_way_is_not_worse_the_other(before: list[float], after: list[float]) -> None:
    forth = compare_samples("step_time_ns", np.array(before), np.array(after))
    back = compare_samples("step_time_ns", np.array(after), np.array(before))
    assert {forth.verdict, back.verdict} != {Verdict.WORSE}
    assert {forth.verdict, back.verdict} != {Verdict.BETTER}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e3, 1e12), min_size=5, max_size=12), st.floats(1e-3, 1e3))
def test_the_unit_of_a_metric_does_not_matter(before: list[float], factor: float) -> None:
    random = np.random.default_rng(5)
    after = np.array(before) * random.uniform(0.8, 1.3, len(before))
    plain = compare_samples("allocated_bytes", np.array(before), after)
    scaled = compare_samples("allocated_bytes", np.array(before) * factor, after * factor)
    assert plain.change == pytest.approx(scaled.change, abs=1e-9)
    assert plain.low == pytest.approx(scaled.low, abs=1e-9)


def steady(value: float, count: int = 8) -> Values:
    return np.full(count, value)


CASES = {
    "equal": ("step_time_ns", steady(100.0), steady(100.0), Verdict.SAME),
    "below the least effect": ("step_time_ns", steady(1000.0), steady(1009.0), Verdict.SAME),
    "slower": ("step_time_ns", steady(1000.0), steady(1011.0), Verdict.WORSE),
    "faster": ("step_time_ns", steady(1000.0), steady(900.0), Verdict.BETTER),
    "more tokens": ("tokens_per_second", steady(100.0), steady(120.0), Verdict.BETTER),
    "fewer tokens": ("tokens_per_second", steady(120.0), steady(100.0), Verdict.WORSE),
    "less overlap": ("overlap_ratio", steady(0.5), steady(0.3), Verdict.WORSE),
    "a share that doubles within a point": ("overlap_ratio", steady(0.002), steady(0.004), Verdict.SAME),
    "from no share": ("overlap_ratio", steady(0.0), steady(0.3), Verdict.BETTER),
    "from no allocations": ("allocations", steady(0.0), steady(5.0), Verdict.WORSE),
    "none before and after": ("allocations", steady(0.0), steady(0.0), Verdict.SAME),
    "idle doubles, of nothing": ("idle_ns", steady(1000.0), steady(2000.0), Verdict.SAME),
    "idle doubles, of much": ("idle_ns", steady(10e6), steady(20e6), Verdict.WORSE),
    "idle from nothing to nothing much": ("idle_ns", steady(0.0), steady(1000.0), Verdict.SAME),
    "idle from nothing to much": ("idle_ns", steady(0.0), steady(10e6), Verdict.WORSE),
}


@pytest.mark.parametrize(("metric", "before", "after", "expected"), CASES.values(), ids=CASES)
def test_without_noise_the_verdict_is_plain(metric: str, before: Values, after: Values, expected: Verdict) -> None:
    assert compare_samples(metric, before, after, step_ns=STEP_NS).verdict is expected


def test_too_few_steps_cannot_tell_and_say_how_many_are_wanting() -> None:
    found = compare_samples("step_time_ns", steady(100.0, 2), steady(200.0, 50))
    assert (found.verdict, found.low, found.more_samples) == (Verdict.CANNOT_TELL, None, 3)
    assert found.change == 1.0


def test_the_number_of_steps_wanting_is_about_right() -> None:
    random = np.random.default_rng(6)
    before, after = noisy(random, 400, spread=0.3), noisy(random, 400, spread=0.3, median=1.1 * STEP_NS)
    few = compare_samples("step_time_ns", before[:20], after[:20])
    assert few.verdict is Verdict.CANNOT_TELL
    assert 20 <= few.more_samples <= 380
    assert compare_samples("step_time_ns", before, after).verdict is Verdict.WORSE


def test_one_wild_step_does_not_make_a_run_worse() -> None:
    before, after = steady(100.0, 10), steady(100.0, 10)
    after[3] = 10_000
    assert compare_samples("step_time_ns", before, after).verdict is Verdict.SAME


def test_thousands_of_steps_tell_a_change_of_two_percent() -> None:
    random = np.random.default_rng(7)
    before, after = noisy(random, 3000), noisy(random, 3000, median=1.02 * STEP_NS)
    found = compare_samples("step_time_ns", before, after)
    assert found.verdict is Verdict.WORSE
    assert found.low is not None
    assert found.low > 0.01


def test_a_change_knows_which_way_is_worse() -> None:
    def made(metric: str, after: float) -> Change:
        return compare_samples(metric, steady(100.0), steady(after))

    assert made("step_time_ns", 110.0).is_worsening
    assert not made("step_time_ns", 90.0).is_worsening
    assert made("tokens_per_second", 90.0).is_worsening
