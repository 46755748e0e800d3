"""A step time of few steps is decided by the parts of the step: what is certain, and what stays inconclusive."""

import itertools
from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from tests.support.selection import others_in_accuracy
from tests.support.wording import Wording
from tracekit.regression.comparison import Comparison, compare_groups
from tracekit.regression.samples import SAMPLE_COLUMNS
from tracekit.regression.thresholds import Change, Verdict

Parts = dict[str, float]
PARTS: Parts = {
    "compute/gemm": 60.0,
    "compute/norm": 15.0,
    "launch/gemm": 10.0,
    "launch/norm": 5.0,
    "compute/loss": 10.0,
}
SPREAD = 0.02
STEPS = 3


def recording(
    parts: Callable[[int], Parts],
    *,
    seed: int,
    ranks: int = 4,
    device: str = "device",
    warm_up: float = 0.0,
    between: float = 0.0,
) -> pl.DataFrame:
    """Return samples of few steps, each part by its size in ms on a rank; the first step takes `warm_up` more."""
    random = np.random.default_rng(seed)
    factor = np.exp(random.normal(0, between)) if between else 1.0
    rows = []
    for rank in range(ranks):
        for step in range(STEPS):
            taken = {name: size * factor * np.exp(random.normal(0, SPREAD)) for name, size in parts(rank).items()}
            taken["launch/gemm"] += warm_up if step == 0 else 0.0
            rows += [(0, rank, step, f"part/{device}/{name}", value * 1e6) for name, value in taken.items()]
            rows.append((0, rank, step, "step_time_ns", sum(taken.values()) * 1e6))
    return pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")


def same(_rank: int) -> Parts:
    return PARTS


def with_stall(rank: int) -> Parts:
    """Return a step in which rank 2 stalls before the loss, and the others wait for it before the norm."""
    return PARTS | ({"launch/loss": 8.0} if rank == 2 else {"launch/norm": 13.0})


def compared(*sides: list[pl.DataFrame]) -> tuple[Change, Comparison]:
    comparison = compare_groups({"main": sides[0]}, {"today": sides[1]}, on_host=False)
    (change,) = comparison.changes
    return change, comparison


def test_a_stall_in_every_step_is_worse_for_certain_although_one_step_was_a_warm_up(wording: Wording) -> None:
    change, comparison = compared([recording(same, seed=1, warm_up=200)], [recording(with_stall, seed=2, warm_up=200)])
    assert (change.verdict, change.is_certain) == (Verdict.WORSE, True)
    assert 0 < (change.low or 0) < 0.08 < (change.high or 0)
    wording(comparison.notes[0])


def test_the_same_change_for_the_better_is_certain_too() -> None:
    change, _ = compared([recording(with_stall, seed=1, warm_up=200)], [recording(same, seed=2, warm_up=200)])
    assert (change.verdict, change.is_certain) == (Verdict.BETTER, True)
    assert (change.high or 0) < 0


def test_time_that_moves_from_one_part_to_another_decides_nothing() -> None:
    moved = PARTS | {"launch/gemm": 0.0, "launch/loss": 10.0}
    change, _ = compared([recording(same, seed=1, warm_up=200)], [recording(lambda _: moved, seed=2, warm_up=200)])
    assert change.verdict is Verdict.INCONCLUSIVE


def test_a_machine_on_which_all_parts_take_longer_decides_nothing() -> None:
    slower = {name: size * 1.1 for name, size in PARTS.items()}
    change, _ = compared([recording(same, seed=1, warm_up=200)], [recording(lambda _: slower, seed=2, warm_up=200)])
    assert change.verdict is Verdict.INCONCLUSIVE


def test_on_a_cpu_a_slower_operator_of_one_recording_decides_nothing_and_of_several_it_does() -> None:
    before = [recording(same, seed=seed, device="host", warm_up=200) for seed in range(3)]
    after = recording(lambda _: PARTS | {"compute/loss": 16.0}, seed=9, device="host", warm_up=200)
    verdicts = []
    for count in (1, 3):
        comparison = compare_groups({"main": before[:count]}, {"today": [after]}, on_host=True)
        verdicts.append(comparison.changes[0].verdict)
    assert verdicts == [Verdict.INCONCLUSIVE, Verdict.WORSE]


def test_recordings_without_parts_of_steps_are_compared_by_the_step_time_alone() -> None:
    bare, full = recording(same, seed=1, warm_up=200), recording(with_stall, seed=2, warm_up=200)
    bare = bare.filter(pl.col("metric") == "step_time_ns")
    assert compared([bare], [full])[0].verdict is Verdict.INCONCLUSIVE
    assert compared([bare], [bare])[0].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("ranks", "between"),
    others_in_accuracy(itertools.product((1, 8), (0.0, 0.015, 0.1)), [(1, 0.0), (1, 0.015), (1, 0.1), (8, 0.015)]),
)
def test_parts_find_no_change_between_recordings_of_the_same_training(ranks: int, between: float) -> None:
    for seed in range(40):
        warm_up = 200.0 * (seed % 2)
        sides = (
            [recording(same, seed=number, ranks=ranks, warm_up=warm_up, between=between)]
            for number in (seed, seed + 500)
        )
        change, comparison = compared(*sides)
        assert not comparison.notes
        # A machine that differs by 10% between recordings is not what is usual of a device.
        assert between == 0.1 or change.verdict not in (Verdict.WORSE, Verdict.BETTER)
