"""Outliers are rare in noise of any distribution, always found if clear, and not reported again and again."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.cli.watch.steps import DownsampledCurve
from tracekit.conventions.outlier_detector import MIN_VALUES, WINDOW, OutlierDetector, Verdict

MIN_RISE = math.log(1.2)
STEPS = 6000
FULL_WINDOW_SHARE = 4 / (WINDOW + 1)

# Logarithms of step times, noise of one distribution each.
NOISES = {
    "lognormal, 2%": lambda r: r.gauss(0, 0.02),
    "lognormal, 10%": lambda r: r.gauss(0, 0.1),
    "lognormal, 50%": lambda r: r.gauss(0, 0.5),
    "exponential": lambda r: math.log(1 + 0.3 * r.expovariate(1)),
    "Pareto, no variance": lambda r: math.log(r.paretovariate(1.5)),
    "Pareto, no mean": lambda r: math.log(r.paretovariate(1)),
    "Cauchy": lambda r: 0.1 * math.tan(math.pi * (r.random() - 0.5)),
}


def alarms(values, seen=None):
    seen = seen or OutlierDetector()
    found = []
    for number, value in enumerate(values):
        if seen.judge(value, MIN_RISE) is Verdict.OUTLIER:
            found.append(number)
        seen.add(value)
    return found


@pytest.mark.parametrize("name", NOISES)
def test_noise_of_any_tail_has_no_more_outliers_than_the_docstring_says(name: str) -> None:
    noise = random.Random(7)
    found = [n for n in alarms(NOISES[name](noise) for _ in range(STEPS)) if n >= WINDOW]
    expected = FULL_WINDOW_SHARE * (STEPS - WINDOW)
    assert len(found) <= expected + 4 * math.sqrt(expected)  # of so many steps, chance adds no more than that


@pytest.mark.parametrize("name", [name for name in NOISES if name.startswith("lognormal")])
def test_lognormal_noise_has_less_than_one_outlier_in_a_thousand_steps(name: str) -> None:
    noise = random.Random(11)
    assert len(alarms(NOISES[name](noise) for _ in range(STEPS))) < STEPS / 1000


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.1])
def test_a_step_of_twice_the_median_time_is_found_among_steady_ones(jitter: float) -> None:
    noise = random.Random(3)
    values = [noise.gauss(0, jitter) for _ in range(1000)]
    slow = list(range(100, 1000, 120))
    for number in slow:
        values[number] = math.log(2) + noise.gauss(0, jitter)
    assert alarms(values) == slow


def test_steady_steps_may_differ_by_a_fifth() -> None:
    assert alarms([0.0] * 50 + [math.log(1.19)]) == []
    assert alarms([0.0] * 50 + [math.log(1.21)]) == [50]


def test_too_few_values_have_no_outlier() -> None:
    assert alarms([0.0] * (MIN_VALUES - 1) + [9.0]) == []
    assert alarms([0.0] * MIN_VALUES + [9.0]) == [MIN_VALUES]


def test_a_permanent_slowdown_is_reported_only_for_a_while() -> None:
    noise = random.Random(5)
    values = [noise.gauss(0, 0.02) for _ in range(400)] + [1 + noise.gauss(0, 0.02) for _ in range(1000)]
    found = alarms(values)
    assert found[0] == 400
    assert len(found) < 20


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_median_and_spread_are_those_of_the_last_values(values: list[float]) -> None:
    seen = OutlierDetector()
    for value in values:
        seen.add(value)
    last = sorted(values[-WINDOW:])
    middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
    assert len(seen) == len(last)
    assert seen.median == pytest.approx(middle)
    deviations = sorted(abs(value - middle) for value in last)
    mad = (deviations[(len(last) - 1) // 2] + deviations[len(last) // 2]) / 2
    assert seen.spread == pytest.approx(1.4826 * mad)


def test_a_curve_of_any_length_keeps_its_shape_in_a_few_points() -> None:
    curve = DownsampledCurve(max_points=100)
    for number in range(100_000):
        curve.add(number)
    assert 50 <= len(curve.values) <= 100
    assert all(a < b for a, b in itertools.pairwise(curve.values))
    assert curve.values[0] < 2000
    assert curve.values[-1] > 96_000
