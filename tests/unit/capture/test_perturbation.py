"""Delays of a live training: drawn trials that all ranks agree on, bounds, and their end for good."""

import functools
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit import conventions
from tracekit.capture import Recorder, collective_waits, perturbation
from tracekit.capture.launcher import command, exit_report
from tracekit.capture.perturbation import Perturbation, TrialSchedule
from tracekit.conventions import BLOCK_STEPS, PERTURBED_PLACES, TRIAL_STEPS

STEP_NS = 10_000_000
STEPS = range(40, 40 + 200 * TRIAL_STEPS)


@pytest.fixture
def waits_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The delays that would have been waited for."""
    lengths_ns: list[int] = []

    def note(delay_ns: int) -> int:
        lengths_ns.append(delay_ns)
        return delay_ns

    monkeypatch.setattr(perturbation, "_wait", note)
    return lengths_ns


def perturbed(folder: Path, *, rank: int = 0, ranks: tuple[int, ...] = (0, 1), **options: Any) -> Perturbation:
    places = options.pop("places", ("data", "forward"))
    return Perturbation(places, folder=folder, rank=rank, ranks=ranks, **options)


def train(of_rank: Perturbation, steps: range = STEPS, *, sensitivity: float = 1.0) -> list[dict[str, int]]:
    """Metrics of steps of STEP_NS that reach all places; each delay costs `sensitivity` times its length."""
    for step in range(steps.start):
        of_rank.add_row({"step": step, conventions.STEP_TIME_METRIC: STEP_NS})
    rows = []
    for step in steps:
        of_rank.begin_step(step, is_disturbed=False)
        for place in PERTURBED_PLACES:
            of_rank.reach(place)
        row = of_rank.end_step()
        step_ns = STEP_NS + round(sensitivity * row.get(conventions.INJECTED_METRIC, 0))
        rows.append({"step": step, conventions.STEP_TIME_METRIC: step_ns, **row})
        of_rank.add_row(rows[-1])
    return rows


def delayed_steps(rows: list[dict[str, int]]) -> list[int]:
    return [row["step"] for row in rows if row.get(conventions.INJECTED_METRIC)]


# The schedule ---------------------------------------------------------------------------------------------------------


@given(
    st.sets(st.integers(0, 4), min_size=1), st.sets(st.integers(0, 999), min_size=1, max_size=8), st.text(max_size=9)
)
def test_each_round_has_every_place_of_every_rank_once(places: set[int], ranks: set[int], seed: str) -> None:
    first, other = (TrialSchedule(places, sorted(ranks), seed=seed) for _ in range(2))
    pairs = len(places) * len(ranks)
    trials = [first.trial(number * TRIAL_STEPS) for number in range(3 * pairs)]
    assert set(Counter(trial[:2] for trial in trials).values()) == {3}
    for number, trial in enumerate(trials):
        steps = range(number * TRIAL_STEPS, (number + 1) * TRIAL_STEPS)
        assert {other.trial(step) for step in steps} == {trial}  # another rank draws the same
        assert trial.delayed_step in steps[::BLOCK_STEPS]


def test_both_blocks_are_delayed_about_equally_often() -> None:
    schedule = TrialSchedule([0, 1], [0, 1], seed="run")
    first = sum(schedule.trial(step).delayed_step == step for step in range(0, 400 * TRIAL_STEPS, TRIAL_STEPS))
    assert 160 < first < 240


def test_another_run_has_another_order() -> None:
    orders = [
        [TrialSchedule([0, 1, 2], [0, 1], seed=seed).trial(step) for step in range(0, 80, TRIAL_STEPS)]
        for seed in ("run", "run-2")
    ]
    assert orders[0] != orders[1]


# Delays ---------------------------------------------------------------------------------------------------------------


def test_only_the_rank_of_the_trial_is_delayed_and_all_ranks_log_it(tmp_path: Path, waits_ns: list[int]) -> None:
    rows = [train(perturbed(tmp_path, rank=rank)) for rank in range(3)]
    for steps in zip(*rows, strict=True):
        assert (
            len({(row[conventions.INJECTED_PLACE_METRIC], row[conventions.INJECTED_RANK_METRIC]) for row in steps}) == 1
        )
        delayed = [rank for rank, row in enumerate(steps) if row[conventions.INJECTED_METRIC]]
        assert delayed in ([], [steps[0][conventions.INJECTED_RANK_METRIC]])
    assert [len(delayed_steps(of_rank)) for of_rank in rows] == [100, 100, 0]
    assert set(waits_ns) == {STEP_NS * 2 // 100}


def test_a_place_is_delayed_once_in_a_step_however_often_it_is_reached(tmp_path: Path, waits_ns: list[int]) -> None:
    of_rank = perturbed(tmp_path, ranks=(0,), places=("forward",))
    train(of_rank, range(40, 40))
    for step in range(40, 40 + TRIAL_STEPS):
        of_rank.begin_step(step, is_disturbed=False)
        for _ in range(5):
            of_rank.reach("forward")
    assert len(waits_ns) == 1


@pytest.mark.parametrize(("step_ns", "ratio", "delay_ns"), [(10**7, 0.02, 200_000), (10**9, 0.05, 5_000_000)])
def test_a_delay_is_a_share_of_the_median_step_and_at_most_5_ms(
    tmp_path: Path, step_ns: int, ratio: float, delay_ns: int
) -> None:
    of_rank = perturbed(tmp_path, delay_ratio=ratio)
    for step in range(200):
        assert of_rank.delay_ns == 0 or step > perturbation.MIN_STEPS
        of_rank.add_row({"step": step, conventions.STEP_TIME_METRIC: step_ns * (50 if step % 9 == 0 else 1)})
    assert of_rank.delay_ns == delay_ns


def test_delays_end_with_the_budget(tmp_path: Path, waits_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturbation, "BUDGET_NS", 4_100_000)
    of_ranks = [perturbed(tmp_path, rank=rank) for rank in range(2)]
    for of_rank in of_ranks:
        train(of_rank)
    assert sum(waits_ns) == 4_000_000


def test_the_wait_is_as_long_as_asked(tmp_path: Path) -> None:
    for delay_ns in (50_000, 1_500_000):
        began_ns = time.perf_counter_ns()
        stated_ns = perturbation._wait(delay_ns)
        assert delay_ns <= stated_ns <= time.perf_counter_ns() - began_ns


@pytest.mark.parametrize(
    "options",
    [{"perturb": ["forwards"]}, {"perturb": "all", "perturb_ratio": 0.06}, {"perturb": "all", "perturb_ratio": 0.0},
     {"perturb": "all", "perturb_ratio": float("nan")}, {"perturb": "data", "perturb_ranks": []}],
)  # fmt: skip
def test_unknown_places_and_long_delays_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="delay"):
        Recorder(tmp_path, **options)


# The end for good -----------------------------------------------------------------------------------------------------


def test_nothing_is_injected_once_the_stop_file_exists(tmp_path: Path, waits_ns: list[int]) -> None:
    of_rank = perturbed(tmp_path)
    assert delayed_steps(train(of_rank))
    stop = tmp_path / conventions.PERTURB_STOP_FILE
    stop.touch()
    count = len(waits_ns)
    assert not delayed_steps(train(of_rank, range(STEPS.stop, STEPS.stop + 100)))
    stop.unlink()
    assert not delayed_steps(train(of_rank, range(STEPS.stop + 100, STEPS.stop + 200)))
    assert len(waits_ns) == count
    stop.touch()
    assert not delayed_steps(train(perturbed(tmp_path)))  # nor after a restart


def test_delays_that_cost_more_than_they_explain_end_on_all_ranks(tmp_path: Path, waits_ns: list[int]) -> None:
    rows = train(perturbed(tmp_path, ranks=(0,)), sensitivity=3.0)
    assert len(delayed_steps(rows)) == perturbation.GUARD_TRIALS
    assert (tmp_path / conventions.PERTURB_STOP_FILE).exists()
    assert not delayed_steps(train(perturbed(tmp_path, rank=1)))


@pytest.mark.parametrize("sensitivity", [0.0, 1.0])
def test_delays_that_cost_their_length_go_on(tmp_path: Path, waits_ns: list[int], sensitivity: float) -> None:
    assert len(delayed_steps(train(perturbed(tmp_path, ranks=(0,)), sensitivity=sensitivity))) == 200


def test_a_signal_to_the_launcher_ends_the_delays(tmp_path: Path) -> None:
    for words, is_ended in ((["--perturb", "all"], True), ([], False)):
        run, notes = tmp_path / f"run{is_ended}", tmp_path / f"notes{is_ended}"
        run.mkdir()
        notes.mkdir()
        note = {"folder": str(run), "rank": 0, "world_size": 1, "steps": 3, "ended": False}
        (notes / "1.json").write_text(json.dumps(note))
        parser = command._parser("tracekit record")
        settings = command._settings(parser, parser.parse_args([*words, "--out", str(run), "--", "python"]))
        exit_report.request_window(settings.__class__(**{**vars(settings), "notes": str(notes)}))
        assert (run / conventions.NOW_FILE).exists()
        assert (run / conventions.PERTURB_STOP_FILE).exists() == is_ended


def test_the_options_of_the_command_reach_the_recorder(tmp_path: Path) -> None:
    parser = command._parser("tracekit record")
    words = ["--perturb", "data,forward", "--perturb-ratio", "0.01"]
    options = parser.parse_args([*words, "--out", str(tmp_path / "run"), "--", "python", "train.py"])
    settings = command._settings(parser, options).recorder_options()
    assert (settings["perturb"], settings["perturb_ratio"]) == (("data", "forward"), 0.01)
    for wrong in (["--perturb", "x"], ["--perturb", ""], ["--perturb-ratio", "0.5"], ["--perturb-ratio", "nan"]):
        with pytest.raises(SystemExit):
            parser.parse_args([*wrong, "--", "python"])


# In a recorder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The metrics log passes each step's time on at once, so that delays begin early."""
    monkeypatch.setattr(conventions, "METRICS_WRITE_S", 0.0)
    yield
    collective_waits.call_before_waits(None)


def record(folder: Path, step_count: int, **options: Any) -> list[dict[str, Any]]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(folder, rank=0, world_size=1, device="cpu", memory=False, **options) as recorder:
        for _ in range(step_count):
            with recorder.span(conventions.DATA):
                time.sleep(0.001)
            loss = model(torch.ones(2, 4)).mean()
            with recorder.span(conventions.BACKWARD):
                loss.backward()
            optimizer.step()
            recorder.step()
    log = folder / conventions.rank_file(0, conventions.METRICS_SUFFIX)
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.usefixtures("at_once")
def test_places_are_reached_by_spans_and_hooks(tmp_path: Path) -> None:
    places = ("data", "forward", "backward", "optimizer")
    rows = record(tmp_path, 160, steps=None, perturb=places)
    delayed = [row for row in rows if row.get(conventions.INJECTED_METRIC)]
    assert {PERTURBED_PLACES[row[conventions.INJECTED_PLACE_METRIC]] for row in delayed} == set(places)
    assert all(row[conventions.INJECTED_METRIC] <= row[conventions.STEP_TIME_METRIC] for row in delayed)
    trials = itertools.groupby(rows[40:], key=lambda row: row["step"] // TRIAL_STEPS)
    assert all(sum(row[conventions.INJECTED_METRIC] > 0 for row in trial) == 1 for _, trial in trials)


@pytest.mark.usefixtures("at_once")
def test_profiled_steps_have_no_delays(tmp_path: Path) -> None:
    rows = record(tmp_path, 60, steps="40:44", warmup=2, perturb="all")
    assert all(conventions.INJECTED_METRIC not in row for row in rows[38:44])
    assert any(row.get(conventions.INJECTED_METRIC) for row in rows[:38])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("on_outlier", [0, 1])
def test_without_the_option_nothing_is_hooked_and_nothing_is_logged(
    tmp_path: Path, on_outlier: int, capsys: pytest.CaptureFixture[str]
) -> None:
    forward_hooks = torch.nn.modules.module._global_forward_pre_hooks
    rows = record(tmp_path, 20, steps=None, on_outlier=on_outlier)
    assert len(rows) == 20
    assert capsys.readouterr().err == ""
    assert not any(name.startswith("injected") for row in rows for name in row)
    with Recorder(tmp_path / "off", steps=None, rank=0, world_size=1, device="cpu") as off:
        assert not off._perturbation.is_on
        assert not forward_hooks
    with Recorder(tmp_path / "on", steps=None, rank=0, world_size=1, device="cpu", perturb="all"):
        assert len(forward_hooks) == 1
        assert collective_waits._observer.before_wait is not None
    assert not forward_hooks
    assert collective_waits._observer.before_wait is None


def test_a_call_before_waits_comes_before_each_wait() -> None:
    order: list[str] = []
    collective_waits.call_before_waits(functools.partial(order.append, "before"))
    with pytest.raises(TypeError):
        torch.distributed.Work.wait(None)
    collective_waits.call_before_waits(None)
    with pytest.raises(TypeError):
        torch.distributed.Work.wait(None)
    assert order == ["before"]
