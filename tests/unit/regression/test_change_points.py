"""Change points compared with a brute-force search, and on simulated series whose changes are known."""

import itertools

import numpy as np
import pytest

from tracekit.regression.history import change_points

NOISE = 0.03
SERIES = 200


def normal(random, count):
    return random.normal(0, NOISE, count)


def heavy(random, count):
    return random.standard_t(3, count) * NOISE / np.sqrt(3)


def spiky(random, count):
    return random.normal(0, NOISE, count) + (random.random(count) < 0.07) * random.exponential(0.3, count)


def wild(random, count):
    return random.standard_cauchy(count) * NOISE / 2


def found_in(values):
    return change_points.trend(100 * values, min_change=1.0)


def test_the_cheapest_split_equals_that_of_a_brute_force_search():
    random = np.random.default_rng(3)
    for count in (9, 11, 12):
        for _ in range(4):
            values = 100 + random.normal(0, 3, count) + 12 * (np.arange(count) >= random.integers(3, count - 2))
            series = change_points._Series.of(values, 1.0)

            def cost(edges, values=values, series=series):
                bounds = [0, *edges, len(values)]
                parts = [values[a:b] for a, b in itertools.pairwise(bounds)]
                if min(map(len, parts)) < change_points.MIN_RUNS:
                    return np.inf
                away = [np.minimum(((part - np.median(part)) / series.noise) ** 2, 9).sum() for part in parts]
                return sum(away) + change_points.price(len(values)) * len(edges)

            places = range(1, count)
            splits = [edges for number in range(4) for edges in itertools.combinations(places, number)]
            assert cost(series.cheapest()) == pytest.approx(min(map(cost, splits)))


@pytest.mark.parametrize("kind", [normal, heavy, spiky, wild], ids=lambda kind: kind.__name__)
def test_a_series_without_a_change_shows_one_at_most_once_in_twenty(kind):
    random = np.random.default_rng(11)
    found = [found_in(1 + kind(random, int(random.integers(8, 60)))) for _ in range(SERIES)]
    assert sum(bool(each.shifts) for each in found) <= SERIES * 0.05
    assert sum(bool(each.drifts) for each in found) <= SERIES * 0.02


def test_a_slow_drift_is_reported_as_drift():
    random = np.random.default_rng(12)
    found = []
    for _ in range(60):
        count = int(random.integers(40, 70))
        found.append(found_in(1 + normal(random, count) + np.linspace(0, 0.2, count)))
    assert sum(bool(each.shifts) for each in found) <= 3
    assert sum(bool(each.drifts) for each in found) >= 57
    rises = [each.drifts[0].after / each.drifts[0].before - 1 for each in found if each.drifts]
    assert np.median(rises) == pytest.approx(0.2, abs=0.02)


def test_a_change_by_10_percent_is_detected_within_five_runs_at_3_percent_noise():
    random = np.random.default_rng(13)
    near = close = 0
    for _ in range(SERIES):
        before = int(random.integers(20, 40))
        values = 1 + normal(random, before + int(random.integers(5, 15)))
        values[before:] *= 1.1
        steps = found_in(values).shifts
        near += any(abs(step.index - before) <= 2 for step in steps)
        close += any(abs(step.index - before) <= 1 for step in steps)
    assert near >= SERIES * 0.95
    assert close >= SERIES * 0.9


def test_a_single_outlier_is_no_change_and_hides_none():
    values = np.array([1.0, 1.01, 0.99, 1.0, 1.6, 1.0, 0.99, 1.01, 1.0, 1.0, 1.2, 1.21, 1.19, 1.2, 2.0, 1.2, 1.19])
    assert [step.index for step in found_in(values).shifts] == [10]


def test_a_regression_that_is_fixed_later_is_two_changes():
    random = np.random.default_rng(5)
    values = 1 + normal(random, 36)
    values[12:24] *= 1.15
    steps = found_in(values).shifts
    assert [step.index for step in steps] == [12, 24]
    assert [step.after > step.before for step in steps] == [True, False]


def test_exact_counts_change_at_once_and_never_by_less_than_the_least_change():
    assert [step.index for step in found_in(np.repeat([1.0, 1.05], [6, 4])).shifts] == [6]
    assert found_in(np.repeat([1.0, 1.005], [10, 10])) == change_points.Trend()


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size_and_all_zeros_raise_no_warning():
    assert change_points.trend(np.zeros(20), min_change=0.0) == change_points.Trend()
    grown = change_points.trend(np.repeat([0.0, 1e12], [12, 6]), min_change=0.0)
    assert [step.index for step in grown.shifts] == [12]
    tiny = np.repeat([0.0, 1e-12], [12, 6])
    assert change_points.trend(tiny, min_change=0.01) == change_points.Trend()


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_too_few_runs_show_no_change(count):
    assert found_in(np.linspace(1, 2, count)) == change_points.Trend()


def test_indexes_count_from_the_first_run_even_if_only_the_latest_runs_are_analyzed(monkeypatch):
    monkeypatch.setattr(change_points, "MOST_RUNS", 20)
    assert [step.index for step in found_in(np.repeat([1.0, 1.3], [40, 8])).shifts] == [40]
