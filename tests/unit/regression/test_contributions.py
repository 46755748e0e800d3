"""The change of a step as contributions: they add up to it exactly, and the planted one is named with its place."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.analysis.host import step_parts
from tracekit.regression.comparison import Comparison, compare_groups
from tracekit.regression.contributions import REST, PartPlaces
from tracekit.regression.samples import SAMPLE_COLUMNS
from tracekit.regression.thresholds import Verdict
from tracekit.report import step_verdict
from tracekit.report.comparison import change_text

Parts = Mapping[str, float]
STEP: Parts = {"compute/gemm": 60, "compute/norm": 15, "communication/all_reduce": 10, "launch/gemm": 5, "data/": 1}
STEPS = 6


def recording(
    *ranks: Parts, seed: int, device: str = "device", spread: float = 0.01, steps: int = STEPS, cpu_ms: float = 0.0
) -> pl.DataFrame:
    """Return samples of steps whose parts take these ms on each rank, and vary by `spread`; all ranks end together."""
    random = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        taken = [
            {name: round(ms * 1e6 * np.exp(random.normal(0, spread))) for name, ms in parts.items()} for parts in ranks
        ]
        longest = max(sum(parts.values()) for parts in taken)
        for rank, parts in enumerate(taken):
            waits = parts | {"wait/": longest - sum(parts.values())}
            rows += [(0, rank, step, f"part/{device}/{name}", float(ns)) for name, ns in waits.items()]
            compute_ns = sum(ns for name, ns in parts.items() if name.startswith("compute"))
            logged = {"step_time_ns": longest, "compute_ns": compute_ns} | (
                {"cpu_time_ns": cpu_ms * 1e6} if cpu_ms else {}
            )
            rows += [(0, rank, step, metric, float(value)) for metric, value in logged.items()]
    return pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")


def compared(
    before: pl.DataFrame, after: pl.DataFrame, *, on_host: bool = False, places: PartPlaces | None = None
) -> Comparison:
    return compare_groups({"main": [before]}, {"today": [after]}, on_host=on_host, places=({}, places or {}))


def total(comparison: Comparison) -> int:
    assert comparison.step is not None
    for part in comparison.contributions:
        assert not part.parts or sum(piece.change_ns for piece in part.parts) == part.change_ns
    return sum(part.change_ns for part in comparison.contributions)


durations = st.dictionaries(
    st.sampled_from([f"{kind}/{name}" for kind in step_parts.KINDS[:2] + step_parts.KINDS[3:] for name in ("", "a")]),
    st.integers(0, 10**9),
    min_size=1,
)


@given(before=st.lists(durations, min_size=1, max_size=7), after=st.lists(durations, min_size=1, max_size=7))
def test_contributions_of_any_steps_add_up_to_the_change_to_the_nanosecond(
    before: list[dict[str, int]], after: list[dict[str, int]]
) -> None:
    sides = []
    for steps in (before, after):
        rows = [
            (0, 0, n, f"part/device/{name}", float(ns)) for n, parts in enumerate(steps) for name, ns in parts.items()
        ]
        rows += [(0, 0, n, "step_time_ns", float(sum(parts.values()))) for n, parts in enumerate(steps)]
        sides.append(pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row"))
    comparison = compared(*sides)
    assert comparison.step is not None
    assert total(comparison) == step_verdict.step_total(comparison.step)


PLANTED = {
    "data/": "waiting for data",
    "compute/gemm": "compute of gemm",
    "compute/new_op": "compute of new_op",
    "communication/all_reduce": "exposed communication in all_reduce",
    "launch/gemm": "launch gaps before gemm",
    "save/": "saves",
    "allocator/": "allocator calls",
}


@pytest.mark.parametrize("growth_ms", [20.0, 100.0])
@pytest.mark.parametrize("part", PLANTED)
def test_a_planted_change_is_worse_and_named_first_with_its_place(part: str, growth_ms: float) -> None:
    after = dict(STEP) | {part: STEP.get(part, 0.0) + growth_ms}
    places = {(0, part): "train.py:7"}
    comparison = compared(recording(STEP, seed=1), recording(after, seed=2), places=places)
    assert comparison.step is not None
    assert comparison.step.verdict is Verdict.WORSE
    first = step_verdict.reasons(comparison)[0]
    assert f"{first.kind}/" == part.partition("/")[0] + "/"
    assert first.change_ns == pytest.approx(growth_ms * 1e6, rel=0.2)
    sentence = step_verdict.headline(comparison)
    assert f"{PLANTED[part]} +" in sentence
    assert "at train.py:7 in all 6 steps" in sentence
    assert total(comparison) == step_verdict.step_total(comparison.step)


def test_a_change_for_the_better_is_named_too() -> None:
    comparison = compared(recording(dict(STEP) | {"data/": 40.0}, seed=1), recording(STEP, seed=2))
    assert comparison.step is not None
    assert comparison.step.verdict is Verdict.BETTER
    assert step_verdict.reasons(comparison)[0].kind == step_parts.DATA
    assert step_verdict.reasons(comparison)[0].change_ns < 0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_worse_or_better_where_nothing_changed(seed: int) -> None:
    comparison = compared(recording(STEP, STEP, seed=seed), recording(STEP, STEP, seed=seed + 100))
    assert comparison.step is not None
    assert comparison.step.verdict in (Verdict.SAME, Verdict.INCONCLUSIVE)


def test_the_rank_that_computes_longer_is_the_cause_and_not_the_waiting_of_the_others() -> None:
    slow = dict(STEP) | {"compute/gemm": 90.0}
    comparison = compared(recording(*[STEP] * 4, seed=1), recording(STEP, STEP, slow, STEP, seed=2))
    first = step_verdict.reasons(comparison)[0]
    assert (first.kind, first.rank, first.parts[0].name) == (step_parts.COMPUTE, 2, "gemm")
    assert first.change_ns == pytest.approx(30e6, rel=0.1)
    wait = next(part for part in comparison.contributions if part.kind == step_parts.WAIT)
    assert abs(wait.change_ns) < 3e6


@pytest.mark.parametrize(("compute_ms", "first"), [(20.0, step_parts.COMMUNICATION), (45.0, step_parts.COMPUTE)])
def test_what_hides_communication_explains_no_more_of_it_than_it_changes_by(compute_ms: float, first: str) -> None:
    exposed = STEP["communication/all_reduce"] + 40.0
    before = dict(STEP) | {"communication/all_reduce": exposed, "compute/gemm": STEP["compute/gemm"] + compute_ms}
    comparison = compared(recording(before, seed=1), recording(STEP, seed=2))
    # Communication takes as long as before.
    same = replace(comparison.changes[0], metric=step_verdict.COMMUNICATION_TIME, reference=9e7, candidate=9e7)
    comparison = replace(comparison, changes=(*comparison.changes, same))
    assert step_verdict.reasons(comparison)[0].kind == first


def test_recordings_without_parts_are_divided_by_their_breakdown() -> None:
    rows = [
        (0, 0, step, metric, value * 1e6)
        for step in range(STEPS)
        for metric, value in {
            "step_time_ns": 100.0, "compute_ns": 70.0, "exposed_communication_ns": 10.0, "idle_ns": 20.0,
            "data_wait_ns": 5.0,
        }.items()
    ]  # fmt: skip
    before = pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")
    comparison = compared(before, recording(dict(STEP) | {"data/": 60.0}, seed=2))
    assert {part.kind for part in comparison.contributions} == {"compute", "communication", "idle", "data", REST}
    before_ns = {part.kind: part.before_ns for part in comparison.contributions}
    assert (before_ns["data"], before_ns["idle"]) == (5_000_000, 15_000_000)


# Other programs on the processors ------------------------------------------------------------------------------------


def on_busy_cpu(parts: Parts, *, seed: int, stretch: float) -> pl.DataFrame:
    """Return a recording in which compute takes `stretch` times its CPU time, as other programs use the processors."""
    stretched = {name: ms * (stretch if name.startswith(("compute", "launch")) else 1.0) for name, ms in parts.items()}
    return pl.concat([recording(stretched, seed=seed, device="host", spread=0.2, cpu_ms=75.0), fastest(parts)])


def fastest(parts: Parts) -> pl.DataFrame:
    """Return samples of calls that take these ms where each is fastest."""
    rows = [
        (0, 0, None, f"{prefix}/{name}", ms * 1e6 * ratio)
        for name, ms in parts.items()
        for prefix, ratio in (("fastest", 1.0), ("fastest_spread", 0.05))
    ]
    return pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")


@pytest.mark.parametrize(("kind", "name"), [("compute", "gemm"), ("launch", "gemm"), ("communication", "all_reduce")])
@pytest.mark.parametrize("stretches", [(1.0, 4.0), (4.0, 1.2), (3.0, 3.0)])
def test_what_takes_longer_in_every_call_is_decided_whatever_the_load(
    kind: str, name: str, stretches: tuple[float, float]
) -> None:
    before = on_busy_cpu(STEP, seed=1, stretch=stretches[0])
    longer = dict(STEP) | {f"{kind}/{name}": STEP[f"{kind}/{name}"] + 70.0}
    after = on_busy_cpu(longer, seed=2, stretch=stretches[1])
    for sides, verdict, sign in (((before, after), Verdict.WORSE, 1), ((after, before), Verdict.BETTER, -1)):
        comparison = compared(*sides, on_host=True)
        assert comparison.step is not None
        assert comparison.step.verdict is verdict
        (reason,) = step_verdict.reasons(comparison)
        assert (reason.kind, reason.parts[0].name) == (kind, name)
        assert total(comparison) == step_verdict.step_total(comparison.step)
        low, change, high = comparison.step.low, comparison.step.change, comparison.step.high
        assert low is not None
        assert change is not None
        assert high is not None
        is_measured = low <= change <= high
        assert is_measured or comparison.fastest_ns is not None  # the interval is of the fastest calls
        assert change_text(comparison.step).endswith("without other programs)") is not is_measured
        if comparison.fastest_ns is not None:
            assert reason.change_ns == sign * 70_000_000
            assert reason.low_ns is not None
            assert reason.high_ns is not None
            assert reason.low_ns <= reason.change_ns <= reason.high_ns


@pytest.mark.parametrize("ratio", [0.85, 1.0, 1.15])
def test_calls_that_differ_as_those_of_recordings_beside_other_programs_decide_nothing(ratio: float) -> None:
    before = on_busy_cpu(STEP, seed=1, stretch=2.0)
    after = on_busy_cpu({name: ms * ratio for name, ms in STEP.items()}, seed=2, stretch=5.0)
    comparison = compared(before, after, on_host=True)
    assert comparison.fastest_ns is not None
    assert comparison.step is not None
    assert comparison.step.verdict is Verdict.INCONCLUSIVE
    assert "without other programs today is between" in step_verdict.headline(comparison)


@pytest.mark.parametrize("stretches", [(1.0, 3.0), (3.0, 1.0), (3.0, 3.0)])
def test_a_wait_for_data_is_decided_although_other_programs_use_the_processors(stretches: tuple[float, float]) -> None:
    before = on_busy_cpu(STEP, seed=1, stretch=stretches[0])
    after = on_busy_cpu(dict(STEP) | {"data/": 80.0}, seed=2, stretch=stretches[1])
    comparison = compared(before, after, on_host=True)
    assert comparison.disturbance.is_disturbed
    assert comparison.step is not None
    assert comparison.step.verdict is Verdict.WORSE
    assert step_verdict.reasons(comparison)[0].kind == step_parts.DATA
    assert comparison.step.low is not None
    reference_ns = comparison.step.reference if comparison.fastest_ns is None else comparison.fastest_ns[0]
    assert 0 < comparison.step.low < 80 / reference_ns * 1e6


def test_compute_that_other_programs_can_explain_is_not_decided_and_the_doubt_says_how_much_that_is() -> None:
    before, after = (on_busy_cpu(STEP, seed=seed, stretch=stretch) for seed, stretch in ((1, 1.0), (2, 2.0)))
    comparison = compared(before, after, on_host=True)
    assert comparison.step is not None
    assert comparison.step.verdict is Verdict.INCONCLUSIVE
    assert comparison.disturbance.candidate_ratio == pytest.approx(0.5, abs=0.1)
    assert comparison.explained_ns[1] > comparison.step.difference * 0.8
    assert "no other program uses the processors" in step_verdict.advice(comparison)
    assert "can explain" in step_verdict.doubt(comparison)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.014, 0.12, "between 1.4% faster and 12% slower"),
        (0.004, 0.3, "between 0.4% slower and 30% slower"),
        (-0.75, 3.0, "between 4.0 times faster and 4.0 times slower"),
    ],
)
def test_what_is_not_decided_is_said_by_its_bounds(low: float, high: float, text: str) -> None:
    comparison = compared(recording(STEP, seed=1), recording(STEP, seed=2))
    assert comparison.step is not None
    step = replace(comparison.step, low=low, high=high, verdict=Verdict.INCONCLUSIVE)
    changes = tuple(step if change.metric == step.metric else change for change in comparison.changes)
    undecided = replace(comparison, changes=changes, contributions=())
    assert step_verdict.headline(undecided).endswith(f": today is {text}")
    assert step_verdict.advice(undecided)


def test_an_interval_that_excludes_the_least_effect_is_never_inconclusive() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        factor, stretch = float(np.exp(random.normal(0, 0.7))), float(random.choice([1.0, 1.5, 4.0]))
        after = {name: ms * factor for name, ms in STEP.items()} | {"data/": float(random.choice([1.0, 60.0]))}
        comparison = compared(
            on_busy_cpu(STEP, seed=seed, stretch=1.0), on_busy_cpu(after, seed=seed + 50, stretch=stretch), on_host=True
        )
        for change in comparison.changes:
            if change.low is None or change.high is None:
                continue
            if change.low >= change.least_change or change.high <= -change.least_change:
                assert change.verdict in (Verdict.WORSE, Verdict.BETTER)
