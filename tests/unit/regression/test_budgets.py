"""Budgets: strict parsing, comparison with measurements, and inconclusive verdicts."""

import polars as pl
import pytest

from tests.support import drawn_traces, sample_report
from tests.support.wording import Wording
from tracekit.errors import ConfigError
from tracekit.model.run import Run
from tracekit.regression import budgets
from tracekit.regression.budgets import BudgetOutcome, Budgets, parse
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Limit

MS = 1_000_000


def test_budgets_are_converted_to_the_units_of_their_metrics() -> None:
    table = {
        "step_time": "412ms",
        "exposed_communication_ratio": 0.15,
        "checkpoint_overhead_ratio": "5%",
        "peak_reserved": "70GiB",
        "tokens_per_second": 12_000,
        "strict": True,
        "where": [{"unit": "layers.*", "compute": "9 ms"}, {"rank": "0-3, 8", "peak_allocated": "1.5GB"}],
    }
    assert parse(table) == Budgets(
        (
            Limit("step_time_ns", 412e6),
            Limit("exposed_communication_ratio", 0.15),
            Limit("checkpoint_overhead_ratio", 0.05),
            Limit("peak_reserved_bytes", 70 * 2**30),
            Limit("tokens_per_second", 12_000),
            Limit("compute_ns", 9e6, units="layers.*"),
            Limit("peak_allocated_bytes", 1.5e9, ranks="0-3,8"),
        ),
        is_strict=True,
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("412ms", "expected a table"),
        ({"step_tim": "1ms"}, "step_tim is not a metric: did you mean step_time?"),
        ({"step_time": 412}, 'step_time: expected text of a number and a unit such as "412ms" (ns, us, µs, ms, s)'),
        ({"step_time": "412"}, "step_time: expected text of a number and a unit"),
        ({"step_time": "412 MiB"}, "step_time: expected text of a number and a unit"),
        ({"step_time": "-1ms"}, "step_time: expected text of a number and a unit"),
        ({"step_time": "1e3ms"}, "step_time: expected text of a number and a unit"),
        ({"step_time": True}, "step_time: expected text of a number and a unit"),
        ({"peak_reserved": "70G"}, 'peak_reserved: expected text of a number and a unit such as "70GiB"'),
        ({"overlap_ratio": 15}, "overlap_ratio: expected a share from 0 to 1"),
        ({"overlap_ratio": "150%"}, "overlap_ratio: expected a share from 0 to 1"),
        ({"overlap_ratio": float("nan")}, "overlap_ratio: expected a share from 0 to 1"),
        ({"tokens_per_second": "fast"}, "tokens_per_second: expected a number that is not negative"),
        ({"tokens_per_second": float("inf")}, "inf is not a finite number"),
        ({"strict": "yes"}, "strict: expected true or false"),
        ({"where": {}}, "where: expected [[budget.where]] tables"),
        ({"where": ["layers"]}, "where[0]: expected a table with unit or rank"),
        ({"where": [{"compute": "1ms"}]}, 'where[0]: expected either unit = "layers.*" or rank = "0-3"'),
        ({"where": [{"unit": "a", "rank": 0, "compute": "1ms"}]}, "expected either unit"),
        ({"where": [{"unit": "layers.*"}]}, "where[0]: it contains no budget"),
        ({"where": [{"unit": 3, "compute": "1ms"}]}, "where[0]: unit: expected a pattern"),
        ({"where": [{"unit": "a", "step_time": "1ms"}]}, "where[0]: step_time is not a metric"),
        ({"where": [{"rank": "0-", "step_time": "1ms"}]}, "where[0]: rank: expected a rank"),
        ({"where": [{"rank": -1, "step_time": "1ms"}]}, "where[0]: rank: expected a rank"),
        ({"where": [{"rank": 0, "checkpoint_overhead_ratio": 0.1}]}, "checkpoint_overhead_ratio is not a metric"),
    ],
)
def test_an_invalid_budget_is_refused_and_the_error_names_its_key(table: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(table)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("step_time_ns", "1.5 s", 1.5e9), ("step_time_ns", "7us", 7e3), ("sent_bytes", "2 MB", 2e6), ("flops", 3, 3.0)],
)
def test_amounts_are_read(metric: str, value: object, expected: float) -> None:
    assert metric_of(metric).unit.amount(value) == expected


def outcome(run: Run, **table: object) -> tuple[BudgetOutcome, float | None, str]:
    """Return outcome, measured value and message of one budget."""
    (result,) = budgets.check(run, parse(table).budgets)
    return result.outcome, result.measured, result.message


def test_budgets_limit_the_median_step_of_the_slowest_rank() -> None:
    # Five steps of 10 ms, of which 2 are exposed communication, on both ranks.
    run = sample_report.run()
    assert outcome(run, step_time="10ms") == (BudgetOutcome.MET, 10e6, "10 ms, at most 10 ms is allowed.")
    assert outcome(run, step_time="9ms") == (BudgetOutcome.BROKEN, 10e6, "10 ms, at most 9 ms is allowed.")
    assert outcome(run, exposed_communication_ratio=0.2)[0] is BudgetOutcome.MET
    assert outcome(run, exposed_communication_ratio=0.15)[:2] == (BudgetOutcome.BROKEN, pytest.approx(0.2))
    assert outcome(run, overlap_ratio=0.5)[0] is BudgetOutcome.MET
    assert outcome(run, overlap_ratio=0.6)[2] == "50.0%, at least 60.0% is allowed."


def test_a_budget_of_a_missing_metric_explains_why_it_is_missing() -> None:
    run = sample_report.run()
    for name, limit, why in (
        ("checkpoint_overhead_ratio", 0.05, "saves no checkpoint"),
        ("peak_reserved", "70GiB", "profile_memory=True"),
        ("tokens_per_second", 1, "no log records the tokens"),
    ):
        found, measured, message = outcome(run, **{name: limit})
        assert (found, measured) == (BudgetOutcome.INCONCLUSIVE, None)
        assert why in message


def wobbling(*lengths: int) -> Run:
    """Return a run of one rank whose steps take these times in ms."""
    steps = "".join(str(n) * length for n, length in enumerate(lengths))
    return drawn_traces.run(drawn_traces.trace(f"step {steps}\ncompute {'a' * len(steps)}", scale_ns=MS))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((20, 20, 21, 21, 20), BudgetOutcome.BROKEN),
        ((9, 11, 9, 11, 12, 8, 11), BudgetOutcome.INCONCLUSIVE),
        ((12, 12, 12), BudgetOutcome.BROKEN),  # all three past it
        ((9, 12, 12), BudgetOutcome.INCONCLUSIVE),  # three are few
        ((8, 9, 30), BudgetOutcome.MET),
    ],
)
def test_a_budget_is_broken_only_if_the_excess_is_significant(
    lengths: tuple[int, ...], expected: BudgetOutcome
) -> None:
    assert outcome(wobbling(*lengths), step_time="10ms")[0] is expected


def test_an_inconclusive_budget_shows_its_interval() -> None:
    assert "inconclusive, the interval of" in outcome(wobbling(9, 11, 9, 11, 12, 8, 11), step_time="10ms")[2]
    assert "with 3 samples that may be chance" in outcome(wobbling(9, 12, 12), step_time="10ms")[2]


def ranks_and_units() -> Run:
    """Return a run of two ranks whose unit layers.1 takes 4 of 8 ms on rank 1, and 2 on rank 0."""
    columns = {"a": {"unit": "layers.0"}, "b": {"unit": "layers.1"}, "x": {"unit": "layers.1"}}
    pictures = ("aabb....", "aabbbb..")
    return drawn_traces.run(
        *(
            drawn_traces.trace(
                f"step {''.join(str(n) * 8 for n in range(5))}\ncompute {picture * 5}\ncomm {'......xx' * 5}",
                rank=rank, scale_ns=MS, columns=columns,
            )
            for rank, picture in enumerate(pictures)
        )
    )  # fmt: skip


def test_each_unit_is_limited_by_itself(wording: Wording) -> None:
    run = ranks_and_units()
    assert outcome(run, where=[{"unit": "layers.*", "compute": "4ms"}])[0] is BudgetOutcome.MET
    found, measured, message = outcome(run, where=[{"unit": "layers.*", "compute": "1ms"}])
    assert (found, measured) == (BudgetOutcome.BROKEN, 4e6)
    wording(message)
    assert outcome(run, where=[{"unit": "layers.0", "compute": "2ms"}])[0] is BudgetOutcome.MET
    assert outcome(run, where=[{"unit": "layers.1", "exposed_communication": "1ms"}])[1] == 2e6
    assert "the run has no unit head" in outcome(run, where=[{"unit": "head", "compute": "1ms"}])[2]


def test_each_rank_is_limited_by_itself() -> None:
    run = ranks_and_units()
    assert outcome(run, where=[{"rank": 0, "compute": "4ms"}])[0] is BudgetOutcome.MET
    found, measured, message = outcome(run, where=[{"rank": "*", "compute": "4ms"}])
    assert (found, measured) == (BudgetOutcome.BROKEN, 6e6)
    assert "on rank 1" in message
    assert "the run has ranks 0–1, not 5-7" in outcome(run, where=[{"rank": "5-7", "compute": "4ms"}])[2]


def test_a_peak_is_the_highest_of_all_ranks_and_steps() -> None:
    events = pl.DataFrame(
        {"at_ns": [1, 2, 3], "device": [0] * 3, "delta_bytes": [100, 300, -100], "allocated_bytes": [100, 400, 300],
         "reserved_bytes": [512, 1024, 1024], "step": [0, 0, 0]}
    )  # fmt: skip
    run = drawn_traces.run(drawn_traces.trace("step 00\ncompute aa", allocations=events))
    assert outcome(run, peak_allocated="400B")[:2] == (BudgetOutcome.MET, 400.0)
    assert outcome(run, peak_reserved="1000B")[:2] == (BudgetOutcome.BROKEN, 1024.0)


def test_the_name_of_a_budget_identifies_it() -> None:
    table = {"step_time": "1ms", "where": [{"unit": "layers.*", "compute": "1ms"}, {"rank": 0, "step_time": "1ms"}]}
    assert [budget.name for budget in parse(table).budgets] == [
        "step_time",
        "compute of layers.*",
        "step_time of rank 0",
    ]
