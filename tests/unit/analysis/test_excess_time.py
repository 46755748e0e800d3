"""The excess of some steps over others is split exactly into extra, larger, slower and late calls."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces, operator_traces
from tracekit.analysis.communication import communication_gap_causes as gap_causes
from tracekit.analysis.compute import excess_time, step_charges
from tracekit.analysis.compute.excess_time import EXTRA, LARGER, LATE, LONGER, SLOWER, ExcessTime
from tracekit.ingest.loader import load
from tracekit.model import schema
from tracekit.model.trace import Trace

SAMPLES = Path(__file__).parents[3] / "sample_traces"
CASES = Path(__file__).parents[3].parent / "shared" / "cases"
KERNELS = "abcdefgh"


class Called(NamedTuple):
    """A kernel of a drawn program: how often a step calls it, at which sizes, and how long one of size 1 takes."""

    name: str
    ns: int
    sizes: Sequence[int]


def charges(
    programs: dict[tuple[int, int], Sequence[Called]],
    *,
    factor: dict[tuple[int, int], float] | None = None,
    idle_ns: dict[tuple[int, int], int] | None = None,
    sized: bool = True,
) -> pl.DataFrame:
    """Return charges of programs by rank and step; time grows with the size of a call, and with the `factor`."""
    rows = []
    for (rank, step), program in programs.items():
        place = {"window": 0, "rank": rank, "step": step, "device": 0}
        for called in program:
            for size in called.sizes:
                dur_ns = round(called.ns * size * (factor or {}).get((rank, step), 1.0))
                row = place | {"part": "compute", "operator": f"aten::{called.name}", "kernel": called.name}
                row |= {"shapes": f"[[{size}, 64]]" if sized else None, "calls": 1, "count": 1}
                rows.append(row | {"chain": f"aten::{called.name}", "work_ns": dur_ns, "dur_ns": dur_ns})
        first = {"operator": f"aten::{program[0].name}", "kernel": program[0].name}
        first |= {"chain": f"aten::{program[0].name}"}
        idle = {"part": "idle", "cause": gap_causes.HOST, "calls": 0, "count": 0, "work_ns": 0}
        rows.append(place | first | idle | {"dur_ns": (idle_ns or {}).get((rank, step), 0)})
    columns = {"window": pl.Int64, "rank": pl.Int64, **step_charges.COLUMNS}
    return schema.conform(pl.DataFrame(rows, infer_schema_length=None), columns)


def split(table: pl.DataFrame, *late: int) -> ExcessTime:
    is_late = pl.col("rank").is_in(list(late))
    own = excess_time.own_time(table)
    excess = excess_time.split(own.filter(is_late), own.filter(~is_late))
    assert int(excess.rows["excess_ns"].sum()) == excess.total_ns == sum(excess.kinds.values())
    return excess


def program(*sizes: int, extra: Sequence[Called] = ()) -> list[Called]:
    return [*(Called(name, 1_000 + 100 * number, sizes or (4, 4)) for number, name in enumerate(KERNELS)), *extra]


def of_run(run_traces: Sequence[Trace], *late: int) -> ExcessTime:
    return split(drawn_traces.run(*run_traces).table(step_charges.step_charges), *late)


def test_calls_that_the_others_never_run_are_extra() -> None:
    table = charges({(0, 1): program(), (1, 1): program(extra=[Called("spin", 9_000, (1, 1, 1))])})
    excess = split(table, 1)
    assert excess.kinds[EXTRA] == excess.total_ns == 27_000
    (row,) = excess.rows.rows(named=True)
    assert (row["kernel"], row["count_change"], row["is_new"]) == ("spin", 3, True)


def test_more_calls_of_a_kernel_that_the_others_run_too_are_extra() -> None:
    table = charges({(0, 1): program(), (1, 1): program(extra=[Called("a", 1_000, (4, 4))])})
    excess = split(table, 1)
    assert excess.kinds[EXTRA] == 8_000
    assert excess.rows.select("kernel", "count_change", "is_new").row(0) == ("a", 2, False)


def test_the_same_calls_with_larger_shapes_are_larger() -> None:
    excess = split(charges({(0, 1): program(4, 4), (1, 1): program(6, 5)}), 1)
    assert excess.kinds[LARGER] == excess.total_ns > 0
    assert excess.size_ratio == pytest.approx(11 / 8)


def test_calls_that_are_slower_alike_are_a_slow_device() -> None:
    excess = split(charges({(0, 1): program(), (1, 1): program()}, factor={(1, 1): 1.25}), 1)
    assert (excess.largest, excess.is_uniform, excess.slowdown) == (SLOWER, True, pytest.approx(1.25))


def test_one_slow_kernel_is_no_slow_device() -> None:
    slow = [called._replace(ns=called.ns * (3 if called.name == "c" else 1)) for called in program()]
    excess = split(charges({(0, 1): program(), (1, 1): slow}), 1)
    assert (excess.largest, excess.is_uniform) == (SLOWER, False)
    assert excess.rows.select("kernel", "time_ratio").row(0) == ("c", pytest.approx(3.0))


def test_a_slow_device_with_larger_shapes_is_split_into_both() -> None:
    # Half of the calls have sizes that both ranks have: they show the slowdown of the others.
    table = charges({(0, 1): program(4, 4), (1, 1): program(4, 8)}, factor={(1, 1): 1.5})
    excess, base_ns = split(table, 1), sum(called.ns for called in program())
    assert excess.kinds[LARGER] == pytest.approx(4 * base_ns, abs=2)
    assert excess.kinds[SLOWER] == pytest.approx(0.5 * 12 * base_ns, abs=2)


def test_longer_calls_of_unknown_size_are_neither_larger_nor_slower() -> None:
    batch = [called._replace(ns=called.ns * (2 if called.name in "abcd" else 1)) for called in program()]
    excess = split(charges({(0, 1): program(), (1, 1): batch}, sized=False), 1)
    assert (excess.largest, excess.kinds[LARGER], excess.kinds[SLOWER]) == (LONGER, 0, 0)


def test_idle_time_before_the_same_calls_is_a_late_host() -> None:
    excess = split(charges({(0, 1): program(), (1, 1): program()}, idle_ns={(1, 1): 5_000}), 1)
    assert excess.kinds[LATE] == excess.total_ns == 5_000


def test_waits_in_collectives_do_not_count() -> None:
    waiting = drawn_traces.trace("step 0000000000\ncompute aaaa....bb\ncomm ....xxxx..", rank=0)
    late = drawn_traces.trace("step 0000000000\ncompute aaaaaaa.bb\ncomm .......x..", rank=1)
    assert of_run([waiting, late], 1).total_ns == 3


def test_annotations_that_differ_by_rank_do_not_make_calls_extra() -> None:
    def step(rank: int, ns: int) -> list[operator_traces.Call]:
        return [(f"graph {rank}", [("aten::linear", [("aten::mm", ns, "[[8, 8]]")])])]

    ranks = [operator_traces.trace(step(rank, 90 if rank == 2 else 40), rank=rank) for rank in range(3)]
    excess = of_run(ranks, 2)
    assert excess.kinds[SLOWER] == excess.total_ns == 50


def test_a_real_rank_that_runs_a_kernel_that_the_other_does_not() -> None:
    excess = split(load(SAMPLES / "gpu" / "slow-rank").table(step_charges.step_charges), 1)
    row = excess.rows.row(0, named=True)
    assert (excess.largest, row["is_new"], row["count_change"]) == (EXTRA, True, 1)
    assert "spin_kernel" in row["kernel"]
    assert excess.steps * excess.kinds[EXTRA] == pytest.approx(66e6, rel=0.01)


def test_a_real_rank_that_computes_more_on_a_cpu() -> None:
    excess = split(load(SAMPLES / "faults" / "slow-rank").table(step_charges.step_charges), 1)
    assert (excess.largest, excess.rows["kernel"][0]) == (EXTRA, "aten::matmul")
    assert excess.kinds[EXTRA] == pytest.approx(20e6, rel=0.2)


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases, which is not part of the project")
@pytest.mark.parametrize(
    ("case", "late", "left_out", "kind"),
    [
        ("late_by_varying_time", 6, -1, SLOWER),
        pytest.param("two_late_ranks", 0, 1, SLOWER, marks=pytest.mark.accuracy),
        pytest.param("two_late_ranks", 1, 0, LATE, marks=pytest.mark.accuracy),
    ],
)
def test_planted_delays_of_a_recorded_job(case: str, late: int, left_out: int, kind: str) -> None:
    table = load(CASES / case).table(step_charges.step_charges).filter(pl.col("rank") != left_out)
    excess = split(table, late)
    assert excess.largest == kind
    assert excess.kinds[kind] >= 0.85 * excess.total_ns


LETTERS = st.sampled_from(KERNELS)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=8, max_size=8),
    ranks=st.integers(2, 4),
    steps=st.integers(1, 3),
    extra=st.lists(st.tuples(st.sampled_from("xyza"), st.integers(1, 9_000)), max_size=3),
    slowdown=st.sampled_from([1.0, 1.1, 1.5]),
    late_ns=st.integers(0, 40_000),
)
def test_planted_parts_are_found_and_add_up(
    sizes: list[list[int]],
    ranks: int,
    steps: int,
    extra: list[tuple[str, int]],
    slowdown: float,
    late_ns: int,
) -> None:
    base = [Called(name, 1_000 + 100 * number, sizes[number]) for number, name in enumerate(KERNELS)]
    planted = [Called(name if name != "a" else "extra_a", ns, (1,)) for name, ns in extra]
    cells = [(rank, step) for rank in range(ranks) for step in range(steps)]
    late = [(rank, step) for rank, step in cells if rank == 0]
    table = charges(
        {cell: [*base, *(planted if cell in late else [])] for cell in cells},
        factor=dict.fromkeys(late, slowdown),
        idle_ns=dict.fromkeys(late, late_ns),
    )
    excess = split(table, 0)
    base_ns = sum(called.ns * size for called in base for size in called.sizes)
    assert excess.kinds[LATE] == late_ns
    assert excess.kinds[LARGER] == excess.kinds[LONGER] == 0
    rounding_ns = sum(len(called.sizes) for called in base) + len(planted)
    assert excess.kinds[SLOWER] == pytest.approx((slowdown - 1) * base_ns, abs=rounding_ns)
    assert excess.kinds[EXTRA] == pytest.approx(slowdown * sum(ns for _, ns in extra), abs=rounding_ns)


@settings(max_examples=60, deadline=None)
@given(
    programs=st.lists(
        st.lists(st.tuples(LETTERS, st.integers(0, 999), SIZES), min_size=1, max_size=6), min_size=2, max_size=5
    ),
    sized=st.booleans(),
    data=st.data(),
)
def test_parts_of_any_two_groups_of_steps_add_up(
    programs: list[list[tuple[str, int, list[int]]]], sized: bool, data: st.DataObject
) -> None:
    drawn = {(rank, rank % 2): [Called(*called) for called in rows] for rank, rows in enumerate(programs)}
    late = data.draw(st.sets(st.sampled_from(range(len(programs))), max_size=len(programs)))
    split(charges(drawn, sized=sized, idle_ns=dict.fromkeys(drawn, 7)), *late)
