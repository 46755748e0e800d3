"""Sensitivity to injected delays: drawn trainings against their replay, logs by hand, random ones by brute force."""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.support.cli_runner import tracekit as run_command
from tests.unit.simulate.jobs import job, written
from tracekit import conventions
from tracekit.capture.perturbation import TrialSchedule
from tracekit.conventions import BLOCK_STEPS, PERTURBED_PLACES, TRIAL_STEPS
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.replay.graph import dependency_graph, savings, sensitivity

SAMPLES = Path(__file__).parents[4] / "sample_traces"
MS = 1_000_000
DELAY_NS = 2 * MS
_NAMES = (
    conventions.STEP_TIME_METRIC,
    conventions.INJECTED_METRIC,
    conventions.INJECTED_PLACE_METRIC,
    conventions.INJECTED_RANK_METRIC,
)
Row = tuple[int, float, float, float, float]
"""Step, its time, delay, place and delayed rank."""


def run_of(*logs: Sequence[Row]) -> Run:
    """A run without activities, of ranks with these logs."""
    traces = []
    for rank, rows in enumerate(logs):
        metrics = [(row[0], name, value) for row in rows for name, value in zip(_NAMES, row[1:], strict=True)]
        table = pl.DataFrame(metrics, schema={"step": pl.Int64, "name": pl.String, "value": pl.Float64}, orient="row")
        traces.append(Trace(rank, 0, f"rank{rank}", metrics=table))
    return Run("drawn", [Source(t.rank, t.window, t.path, 0, lambda t=t: t) for t in traces], manifest={})


# Drawn trainings ------------------------------------------------------------------------------------------------------


def response_ns(run: Run, place: str, rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How much longer a delay makes its step and the next one on each rank, by the replay; shape (2, ranks).

    A step of the replay ends with the first work of the next one, which may start and then wait for a late rank. The
    log of a training ends a step with its last work: what the replay loses later is in the step after the delay.
    """
    (graph,) = savings.graphs_of(run)
    node = sensitivity.nodes_at(graph, place, rank)[1]
    delayed = sensitivity.with_delays(graph, place, np.array([node]), DELAY_NS)
    before = savings.step_durations(graph, graph.replay)
    after = savings.step_durations(graph, dependency_graph.replay(delayed))
    lost = before.select("rank", "step", lost_ns=after["replayed_ns"] - before["replayed_ns"])
    step = int(graph.frame["step"][int(node)])
    in_step = lost.group_by("rank").agg(
        first=pl.col("lost_ns").filter(pl.col("step") <= step).sum(),
        second=pl.col("lost_ns").filter(pl.col("step") > step).sum(),
    )
    return in_step.sort("rank").select("first", "second").to_numpy().T.astype(np.float64)


def write_logs(run: Run, folder: Path, places: Sequence[str], *, trials: int, seed: int) -> None:
    """Write the metrics of a training that responds as its replay, with noise, a trend and slow steps."""
    codes = [PERTURBED_PLACES.index(place) for place in places]
    schedule, draw = TrialSchedule(codes, run.ranks, seed="drawn"), np.random.default_rng(seed)
    responses = {(code, rank): response_ns(run, PERTURBED_PLACES[code], rank) for code in codes for rank in run.ranks}
    logs: dict[int, list[str]] = {rank: [] for rank in run.ranks}
    for step in range(trials * TRIAL_STEPS):
        trial = schedule.trial(step)
        job_ns = 80 * MS * (1 + 0.004 * draw.standard_normal() + 0.0002 * (step % 500)) + (
            40 * MS if draw.random() < 0.02 else 0
        )
        later = step - trial.delayed_step
        lost_ns = responses[trial.place, trial.rank][later] if 0 <= later < BLOCK_STEPS else np.zeros(len(run.ranks))
        for column, rank in enumerate(run.ranks):
            is_delayed = step == trial.delayed_step and rank == trial.rank
            values = (job_ns + lost_ns[column], DELAY_NS if is_delayed else 0, trial.place, trial.rank)
            logs[rank].append(json.dumps({"step": step, **dict(zip(_NAMES, values, strict=True))}))
    for rank, lines in logs.items():
        (folder / conventions.rank_file(rank, conventions.METRICS_SUFFIX)).write_text("\n".join(lines) + "\n")


DRAWN_PLACES = ("data", "forward", "backward", "optimizer")
DRAWN_JOBS = [
    ("ddp", ("slow-rank", "late-launch"), {1}),  # rank 0 waits for rank 1, whose host is late
    ("fsdp2", ("dataloader-stall",), {0, 1}),
    ("fsdp2", (), set[int]()),  # the host is ahead of the device
]
"""Strategy, faults, and the ranks on whose host the step depends."""


def measured(folder: Path, *, seed: int) -> pl.DataFrame:
    write_logs(tracekit.load(str(folder), cache=False), folder, DRAWN_PLACES, trials=8 * 100, seed=seed)
    return tracekit.load(str(folder), cache=False).table("sensitivity")


@pytest.mark.parametrize(("strategy", "faults", "critical_ranks"), DRAWN_JOBS)
def test_measured_sensitivities_are_those_of_the_replay(
    strategy: str, faults: tuple[str, ...], critical_ranks: set[int], tmp_path: Path
) -> None:
    written(job(strategy, layers=2, gpus=2, steps=6), tmp_path, *faults)
    rows = measured(tmp_path, seed=3)
    assert rows.select("place", "rank").rows() == [(place, rank) for place in DRAWN_PLACES for rank in (0, 1)]
    assert rows["trials"].to_list() == [100] * 8
    assert (rows["sensitivity"] - rows["replayed"]).abs().max() < 0.1
    effects = [sensitivity.CRITICAL if rank in critical_ranks else sensitivity.HIDDEN for rank in (0, 1)]
    assert rows["effect"].to_list() == effects * 4


@pytest.mark.accuracy
def test_sensitivities_of_thirty_drawn_trainings(tmp_path: Path) -> None:
    errors, covered, decided = list[float](), 0, 0
    for number, (strategy, faults, critical_ranks) in enumerate(DRAWN_JOBS):
        written(job(strategy, layers=2, gpus=2, steps=6), tmp_path / strategy / str(number), *faults)
        for seed in range(10):
            for row in measured(tmp_path / strategy / str(number), seed=10 * number + seed).to_dicts():
                errors.append(abs(row["sensitivity"] - row["replayed"]))
                covered += row["low"] - 1e-9 <= row["replayed"] <= row["high"] + 1e-9
                is_critical = row["rank"] in critical_ranks
                decided += row["effect"] == (sensitivity.CRITICAL if is_critical else sensitivity.HIDDEN)
    within = sum(error < 0.1 for error in errors)
    print(len(errors), within, covered, decided, statistics.median(errors), max(errors))
    assert within >= 0.95 * len(errors)
    assert decided == len(errors)


def test_the_command_shows_the_table_and_says_how_to_record_it(tmp_path: Path) -> None:
    written(job("ddp", layers=2, gpus=2, steps=6), tmp_path)
    out = tmp_path / "rows.json"
    shown = run_command("summary", tmp_path, "--no-cache", "--by", "place")
    assert "--perturb" in shown.stdout
    write_logs(tracekit.load(str(tmp_path), cache=False), tmp_path, ("data",), trials=20, seed=1)
    run_command("summary", tmp_path, "--no-cache", "--by", "place", "--format", "json", "--out", out)
    assert [(row["place"], row["rank"], row["trials"]) for row in json.loads(out.read_text())] == [
        ("data", 0, 10), ("data", 1, 10),
    ]  # fmt: skip


# A recorded run -------------------------------------------------------------------------------------------------------


def test_a_delay_follows_the_wait_of_a_cpu_rank_and_overlaps_it_before_a_collective() -> None:
    run = tracekit.load(str(SAMPLES / "demo-fsdp2"), cache=False)
    (graph,) = savings.graphs_of(run)
    waiting = np.unique(graph.edges.waiting[(graph.edges.kind == "sync") & (graph.edges.waiting < graph.count)])
    slack_ns = graph.replay.start_ns[waiting] - graph.replay.end_ns[graph.chain[waiting]] - graph.chain_ns[waiting]
    nodes = waiting[slack_ns > MS][:5]
    assert len(nodes) == 5
    for node in nodes:
        for place, later_ns in (("optimizer", MS // 2), ("collective", 0)):
            delayed = dependency_graph.replay(sensitivity.with_delays(graph, place, np.array([node]), MS // 2))
            assert delayed.end_ns[node] - graph.replay.end_ns[node] == later_ns


# Logs by hand ---------------------------------------------------------------------------------------------------------

#            step  time  delay  place  rank
TRIAL = [
    (0, 100.0, 0.0, 1.0, 0.0),
    (1, 101.0, 0.0, 1.0, 0.0),
    (2, 104.0, 5.0, 1.0, 0.0),
    (3, 101.0, 0.0, 1.0, 0.0),
]


def samples(*logs: Sequence[Row]) -> list[float]:
    return sensitivity.trial_samples(run_of(*logs))["sensitivity"].to_list()


def test_a_trial_is_the_delayed_block_less_the_other_one_over_the_delay() -> None:
    assert samples(TRIAL) == pytest.approx([4 / 5])


def test_a_delay_that_reaches_another_rank_a_step_later_counts_once() -> None:
    # The delay is late in step 2 of rank 0: rank 1 waits for it in step 3.
    first = [(step, {2: 15.0}.get(step, 10.0), 5.0 if step == 2 else 0.0, 4.0, 0.0) for step in range(4)]
    second = [(step, {3: 15.0}.get(step, 10.0), 0.0, 4.0, 0.0) for step in range(4)]
    assert samples(first, second) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (0, (0, math.nan, 0.0, 1.0, 0.0)),
        (0, (0, -1.0, 0.0, 1.0, 0.0)),
        (1, (1, 101.0, math.inf, 1.0, 0.0)),
        (2, (2, 104.0, 105.0, 1.0, 0.0)),  # a delay longer than its step
        (2, (2, 104.0, -5.0, 1.0, 0.0)),
        (2, (2, 104.0, 5.0, 7.0, 0.0)),  # no place has this code
        (2, (2, 104.0, 5.0, 0.5, 0.0)),
        (2, (2, 104.0, 5.0, 1.0, 1e300)),
        (2, (2, 104.0, 5.0, 1.0, 1.0)),  # the delay of another rank, which has no log
        (3, (3, 101.0, 5.0, 1.0, 0.0)),  # two delays
    ],
)
def test_a_trial_with_a_value_that_none_has_is_left_out(row: int, value: Row) -> None:
    rows: list[Row] = list(TRIAL)
    rows[row] = value
    later = [(step + TRIAL_STEPS, *rest) for step, *rest in TRIAL]
    assert samples([*rows, *later]) == pytest.approx([4 / 5])  # type: ignore[list-item]


def test_a_trial_whose_steps_a_rank_lacks_is_left_out() -> None:
    assert samples(TRIAL, [(step, 100.0, 0.0, 1.0, 0.0) for step in (0, 1, 2)]) == []
    assert samples(TRIAL[:3]) == []


@pytest.mark.parametrize("rows", [[], [(0, 100.0, 0.0, 1.0, 0.0)]])
def test_without_trials_there_are_no_rows(rows: Sequence[Row]) -> None:
    assert run_of(rows).table(sensitivity.sensitivity).is_empty()


def test_few_trials_have_no_interval_and_decide_nothing() -> None:
    rows = [(step + 4 * number, *rest) for number in range(sensitivity.MIN_TRIALS - 1) for step, *rest in TRIAL]
    (row,) = run_of(rows).table(sensitivity.sensitivity).to_dicts()  # type: ignore[arg-type]
    assert (row["sensitivity"], row["low"], row["effect"]) == (pytest.approx(0.8), None, sensitivity.UNDECIDED)
    assert row["replayed"] is None  # no window


# By brute force -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_center_is_the_median_of_the_means_of_all_pairs(values: list[float]) -> None:
    means = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    estimate, low, high = sensitivity.center(np.array(values))
    assert estimate == pytest.approx(statistics.median(means), abs=1e-6)
    assert (low is None) == (len(values) < sensitivity.MIN_TRIALS)
    if low is not None and high is not None:
        assert min(values) <= low <= estimate + 1e-6
        assert estimate - 1e-6 <= high <= max(values)


@pytest.mark.parametrize("count", [6, 12, 40, 3000])
def test_the_interval_has_the_center_in_19_of_20_samples(count: int) -> None:
    draw, inside = np.random.default_rng(count), 0
    draws = 20 if count > 1000 else 400
    for _ in range(draws):
        _, low, high = sensitivity.center(1 + draw.standard_t(2, count))
        assert low is not None
        assert high is not None
        inside += low <= 1 <= high
    assert inside / draws >= 0.9


ROWS = st.tuples(st.integers(0, 15), st.sampled_from([50.0, 60.0, math.nan]), st.sampled_from([0.0, 0.0, 0.0, 5.0]),
                 st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0]))  # fmt: skip


@given(st.lists(st.lists(ROWS, unique_by=lambda row: row[0]), min_size=1, max_size=2))
def test_samples_are_those_of_a_loop_over_trials(logs: list[list[Row]]) -> None:
    expected = []
    valid = [{row[0]: row for row in rows if not math.isnan(row[1])} for rows in logs]
    for first in range(0, 16, TRIAL_STEPS):
        steps = [[log[step] for log in valid if step in log] for step in range(first, first + TRIAL_STEPS)]
        delayed = [
            log[step] for rank, log in enumerate(valid) for step in range(first, first + TRIAL_STEPS)
            if step in log and log[step][2] > 0 and log[step][4] == rank
        ]  # fmt: skip
        is_whole = len({len(rows) for rows in steps}) == 1 and bool(steps[0])
        if is_whole and len(delayed) == 1 and delayed[0][0] % BLOCK_STEPS == 0:
            job_ns = [statistics.median(row[1] for row in rows) for rows in steps]
            other, at_delay = (sum(job_ns[i:j]) for i, j in ((0, 2), (2, 4)))
            if delayed[0][0] == first:
                other, at_delay = at_delay, other
            expected.append((at_delay - other) / delayed[0][2])
    assert sorted(samples(*logs)) == pytest.approx(sorted(expected))
