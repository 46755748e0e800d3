"""Windows open when steps are slow again and again or for long, and never in noise or after a single stall."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from tracekit.capture.slow_steps import (
    LASTING_NS,
    MIN_COST_RATIO,
    MIN_STALLS,
    REST_STEPS,
    Outlier,
    SlowSteps,
)
from tracekit.capture.window_schedule import _around_next_stall

MS = 10**6
STEP_NS = 60 * MS


def requests(times_ns: Sequence[float]) -> list[tuple[int, Outlier]]:
    """Return the steps at which a window is requested, and why."""
    slow_steps = SlowSteps(rank=3)
    reasons = [(step, slow_steps.add(step, step_ns, step_ns)) for step, step_ns in enumerate(times_ns)]
    return [(step, reason) for step, reason in reasons if reason is not None]


def outliers(times_ns: Sequence[float]) -> list[Outlier]:
    return [reason for _, reason in requests(times_ns)]


def healthy(draw: random.Random, steps: int, spread: float, median_ns: float = STEP_NS) -> list[float]:
    return [median_ns * math.exp(draw.gauss(0, spread)) for _ in range(steps)]


def test_a_stall_in_each_tenth_step_is_a_reason_with_its_step_rank_and_ratio() -> None:
    times_ns = [float(STEP_NS)] * 400
    times_ns[205::10] = [3.0 * STEP_NS] * len(times_ns[205::10])
    # From the end of step 205 on, 3 s are over with step 255: 45 steps of 60 ms and five of 180 ms.
    assert outliers(times_ns)[0] == Outlier(255, 3, pytest.approx(3.0), STEP_NS, gap_steps=10, is_regular=True)


def test_a_single_stall_is_over_before_a_window_could_open() -> None:
    times_ns = [float(STEP_NS)] * 1000
    times_ns[300] = 100.0 * STEP_NS
    assert outliers(times_ns) == []
    times_ns[300:320] = [2.0 * STEP_NS] * 20
    assert outliers(times_ns) == []  # 1.2 s longer


def test_a_large_stall_does_not_make_small_ones_expensive() -> None:
    times_ns = [float(STEP_NS)] * 1000
    for step, ratio in ((150, 1.3), (200, 1.3), (250, 40.0), (300, 1.3), (350, 1.3)):
        times_ns[step] = ratio * STEP_NS
    assert outliers(times_ns) == []


def test_stalls_that_cost_less_than_a_window_are_no_reason() -> None:
    times_ns = [float(STEP_NS)] * 3000
    times_ns[200::100] = [1.5 * STEP_NS] * len(times_ns[200::100])  # 0.5%
    assert outliers(times_ns) == []
    times_ns[200::100] = [5.0 * STEP_NS] * len(times_ns[200::100])  # 3.8%
    assert outliers(times_ns)[0].gap_steps == 100


def test_a_rank_that_becomes_slower_for_good_is_a_reason_once() -> None:
    draw = random.Random(1)
    times_ns = healthy(draw, 400, 0.05) + healthy(draw, 1200, 0.05, 1.4 * STEP_NS)
    reasons = outliers(times_ns)
    assert len(reasons) == 1
    assert 400 < reasons[0].step < 400 + 130
    assert 1.2 < reasons[0].ratio < 1.7


def test_a_small_lasting_rise_in_large_noise_is_a_reason() -> None:
    draw = random.Random(2)
    times_ns = healthy(draw, 600, 0.2) + healthy(draw, 600, 0.2, 1.5 * STEP_NS)  # below four spreads, step by step
    reasons = outliers(times_ns)
    assert len(reasons) == 1
    assert 600 < reasons[0].step < 800


def test_explained_steps_are_not_judged_and_do_not_count_for_the_median() -> None:
    slow_steps = SlowSteps(rank=0)
    for step in range(2000):
        is_saving = step % 20 == 0
        assert slow_steps.add(step, 10 * STEP_NS if is_saving else STEP_NS, None if is_saving else STEP_NS) is None
    assert slow_steps.step_ns == STEP_NS


def test_after_a_reason_slow_steps_rest() -> None:
    times_ns = [float(STEP_NS)] * 2000
    times_ns[205::10] = [3.0 * STEP_NS] * len(times_ns[205::10])
    steps = [reason.step for reason in outliers(times_ns)]
    assert len(steps) > 1
    assert all(later - earlier >= REST_STEPS for earlier, later in itertools.pairwise(steps))


# Drawn series ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("step_ns", [MS, 10 * MS, 300 * MS])
def test_no_window_opens_in_lognormal_noise(spread: float, step_ns: int) -> None:
    draw = random.Random(f"{spread} {step_ns}")
    for _ in range(12):
        assert outliers(healthy(draw, 1500, spread, step_ns)) == []


TAILS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda draw: 1 + 0.1 * draw.expovariate(1),
    "1% of steps take half as long again": lambda draw: 1.5 if draw.random() < 0.01 else 1 + 0.02 * draw.random(),
    "Student t, 3 degrees": lambda draw: math.exp(0.05 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 2) / 3)),
}


@pytest.mark.parametrize("name", TAILS)
def test_no_window_opens_in_noise_with_heavier_tails(name: str) -> None:
    draw = random.Random(name)
    for _ in range(12):
        assert outliers([10 * MS * TAILS[name](draw) for _ in range(1500)]) == []


def test_nearly_all_planted_stalls_are_in_the_window_that_they_open() -> None:
    """What a recorder of that rank would profile contains a stall, of regular distance or drawn for each step."""
    draw = random.Random(5)
    caught = 0
    for _ in range(200):
        step_ns, gap, ratio = draw.choice([20, 60, 300]) * MS, draw.randint(2, 60), draw.uniform(2.5, 6)
        slow = range(draw.randint(150, 300), 3000, gap)
        times_ns = healthy(draw, 3000, draw.uniform(0.0, 0.08), step_ns)
        for step in slow:
            times_ns[step] *= ratio
        requested_step, reason = requests(times_ns)[0]
        assert reason.step in slow
        earliest = requested_step + math.ceil(LASTING_NS / step_ns) + 3
        first, length = _around_next_stall(reason, earliest, 5)
        assert first >= earliest
        caught += any(step in slow for step in range(first, first + length))
    assert caught >= 0.95 * 200


def recurring_by_definition(times_ns: Sequence[float], spread_limit: Callable[[Sequence[float]], float]) -> int | None:
    """First step at which stalls recur, by the sentences of the documentation, over the whole history at each step."""
    ends_ns = [sum(times_ns[: step + 1]) for step in range(len(times_ns))]
    slow: dict[int, float] = {}
    for step in range(5, len(times_ns)):
        before = [math.log(time_ns) for time_ns in times_ns[5:step][-256:]]
        if len(before) < 64 or math.log(times_ns[step]) <= spread_limit(before):
            continue
        slow[step] = times_ns[step] - math.exp(statistics.median(before))
        recent = [s for s in slow if step - s <= 512 or ends_ns[step] - ends_ns[s] <= 8 * LASTING_NS]
        stalls = [s for s in recent if s - 1 not in slow]  # only single slow steps are drawn
        if not stalls:
            continue
        duration_ns = ends_ns[step] - ends_ns[stalls[0]]
        in_chain = sorted((slow[s] for s in recent if s >= stalls[0]), reverse=True)
        is_enough = len(in_chain) >= MIN_STALLS
        cost_ns = sum(min(excess_ns, in_chain[MIN_STALLS - 1]) for excess_ns in in_chain) if is_enough else 0.0
        if len(stalls) >= MIN_STALLS and duration_ns >= LASTING_NS and cost_ns >= MIN_COST_RATIO * duration_ns:
            return step
    return None


def test_recurrence_is_what_its_definition_says_by_brute_force() -> None:
    def limit(before: Sequence[float]) -> float:
        median = statistics.median(before)
        spread = 1.4826 * statistics.median([abs(value - median) for value in before])
        return median + max(4 * spread, math.log(1.2))

    draw, fired = random.Random(8), 0
    for _ in range(40):
        times_ns = healthy(draw, 420, 0.03, draw.choice([30, 60, 120]) * MS)
        step = draw.randint(80, 120)
        while step < len(times_ns):
            times_ns[step] *= draw.uniform(1.5, 4)
            step += draw.randint(2, 90)
        expected = recurring_by_definition(times_ns, limit)
        requested = requests(times_ns)
        assert (requested[0][0] if requested else None) == expected
        fired += expected is not None
    assert 10 < fired < 40


@pytest.mark.parametrize(
    "change", [{"ratio": "x"}, {"ratio": math.inf}, {"step": -1}, {"gap_steps": 0}, {"rank": True}]
)
def test_an_invalid_value_makes_a_reason_invalid(change: dict[str, object]) -> None:
    valid = Outlier(1, 2, 3.0, 4)._asdict()
    assert Outlier.parse(valid) is not None
    assert Outlier.parse({**valid, **change}) is None


@pytest.mark.parametrize("value", [None, [], {}, {"step": 1}])
def test_an_invalid_reason_in_a_file_is_none(value: object) -> None:
    assert Outlier.parse(value) is None


def test_a_reason_is_read_as_it_was_written() -> None:
    assert Outlier.parse(Outlier(1, 2, 3.0, 4, 5, is_regular=False)._asdict()) == Outlier(1, 2, 3.0, 4, 5, False)
