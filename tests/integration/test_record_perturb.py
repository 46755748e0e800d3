"""Delays in a real training of two ranks, of which rank 1 waits for rank 0: what matters, and what hides."""

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tracekit
from tests.support import process_group
from tracekit import conventions
from tracekit.capture import Recorder, perturbation
from tracekit.capture.rank_info import this_rank
from tracekit.conventions import PERTURBED_PLACES, TRIAL_STEPS
from tracekit.replay.graph import sensitivity

WORK_S = (0.04, 0.005)
"""Work of each rank before it sends gradients: rank 1 then waits for 35 ms, in which delays of 16 ms hide."""
DELAY_RATIO = 0.4


@contextmanager
def long_delays() -> Iterator[None]:
    """Delays far above what a user may ask for: a busy machine adds milliseconds to a step."""
    limits = perturbation.MAX_DELAY_RATIO, perturbation.MAX_DELAY_NS, conventions.METRICS_WRITE_S
    perturbation.MAX_DELAY_RATIO, perturbation.MAX_DELAY_NS, conventions.METRICS_WRITE_S = 1.0, 10**9, 0.0
    try:
        yield
    finally:
        perturbation.MAX_DELAY_RATIO, perturbation.MAX_DELAY_NS, conventions.METRICS_WRITE_S = limits


def train(
    folder: Path,
    work_s: tuple[float, float],
    *,
    steps: int,
    places: tuple[str, ...],
    ratio: float,
    stop_at: int = -1,
    layers: tuple[int, int] = (0, 0),
) -> None:
    """Train on this rank, which sleeps for `work_s` in forward and computes so many `layers` of its own."""
    model = torch.nn.Linear(16, 16)
    own_layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(layers[this_rank()])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"perturb": places, "perturb_ratio": ratio, "memory": False}
    # The window is last: while its trace is written, steps have no delays.
    with Recorder(folder, steps=(steps - 10, steps - 1), warmup=1, **options) as recorder:
        for step in range(steps):
            with recorder.span(conventions.FORWARD):
                loss = model(torch.ones(4, 16)).mean()
                if len(own_layers):
                    loss = loss + own_layers(torch.ones(512, 256)).square().mean()
                time.sleep(work_s[this_rank()])
            with recorder.span(conventions.BACKWARD):
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            with recorder.span(conventions.OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()
            if step == stop_at:
                (folder / conventions.PERTURB_STOP_FILE).touch()
                dist.barrier()
            recorder.step()


def train_with_long_delays(folder: Path, work_s: tuple[float, float] = WORK_S, **options: Any) -> None:
    with long_delays():
        train(folder, work_s, ratio=DELAY_RATIO, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("perturbed")
    places = {"forward": ("forward",), "collective": ("collective",)}
    cases = {
        name: functools.partial(train_with_long_delays, folder / name, steps=70, places=places[name], stop_at=57)
        for name in places
    }
    for outcome in process_group.run_cases(2, cases).values():
        outcome.results()
    return {name: folder / name for name in cases}


def log(run: Path, rank: int) -> list[dict[str, Any]]:
    path = run / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("place", ["forward", "collective"])
def test_both_ranks_log_the_same_trials_and_only_one_is_delayed(place: str, runs: dict[str, Path]) -> None:
    trials: dict[int, list[int]] = {}
    for of_ranks in zip(log(runs[place], 0), log(runs[place], 1), strict=True):
        places = [row.get(conventions.INJECTED_PLACE_METRIC) for row in of_ranks]
        ranks = {row.get(conventions.INJECTED_RANK_METRIC) for row in of_ranks}
        if None in places or of_ranks[0]["step"] > 56:
            continue
        assert places == [PERTURBED_PLACES.index(place)] * 2
        assert len(ranks) == 1
        for rank, row in enumerate(of_ranks):
            if row[conventions.INJECTED_METRIC]:
                assert ranks == {rank}
                assert row["step_time_ns"] > row[conventions.INJECTED_METRIC] > 0
                trials.setdefault(row["step"] // TRIAL_STEPS, []).append(rank)
    assert len(trials) >= 4
    assert all(len(ranks) == 1 for ranks in trials.values())
    assert {rank for ranks in trials.values() for rank in ranks} == {0, 1}


@pytest.mark.parametrize("place", ["forward", "collective"])
def test_no_rank_is_delayed_once_the_stop_file_exists(place: str, runs: dict[str, Path]) -> None:
    rows = [row for rank in range(2) for row in log(runs[place], rank)]
    assert not any(row.get(conventions.INJECTED_METRIC) for row in rows if row["step"] > 57)


def test_the_replay_predicts_that_delays_of_the_waiting_rank_hide(runs: dict[str, Path]) -> None:
    rows = tracekit.load(str(runs["forward"]), cache=False).table("sensitivity")
    assert rows["rank"].to_list() == [0, 1]
    assert rows["replayed"][0] > sensitivity.LIMIT > rows["replayed"][1]
    waits = tracekit.load(str(runs["collective"]), cache=False).table("sensitivity")
    assert waits.filter(rank=1)["replayed"][0] < sensitivity.LIMIT


# For docs/lab/perturb.md ----------------------------------------------------------------------------------------------


@pytest.mark.accuracy
@pytest.mark.timeout(600)
def test_measured_sensitivities_with_planted_slack_are_those_of_the_replay(tmp_path: Path) -> None:
    places = ("forward", "collective", "optimizer")
    case = functools.partial(train_with_long_delays, tmp_path / "run", (0.08, 0.01), steps=1000, places=places)
    for outcome in process_group.run_cases(2, {"slack": case}, timeout_s=500).values():
        outcome.results()
    rows = tracekit.load(str(tmp_path / "run"), cache=False).table("sensitivity")
    print(rows.drop("effect").to_dicts())
    assert (rows["sensitivity"] - rows["replayed"]).abs().max() < 0.1
    assert rows.filter(rank=0, place="forward")["effect"].to_list() == [sensitivity.CRITICAL]
    assert rows.filter(rank=1)["effect"].to_list() == [sensitivity.HIDDEN] * 3


@pytest.mark.accuracy
@pytest.mark.timeout(600)
def test_measured_sensitivities_of_computing_ranks_are_those_of_the_replay(tmp_path: Path) -> None:
    places = ("forward", "backward", "optimizer")
    case = functools.partial(
        train_with_long_delays, tmp_path / "run", (0.0, 0.0), steps=900, places=places, layers=(24, 6)
    )
    for outcome in process_group.run_cases(2, {"slack": case}, timeout_s=500).values():
        outcome.results()
    rows = tracekit.load(str(tmp_path / "run"), cache=False).table("sensitivity")
    print(rows.drop("effect").to_dicts())
    # Other programs on the same processors decide how much is known: the interval is that of 1.96 standard errors.
    standard_error = (rows["high"] - rows["low"]) / (2 * 1.96)
    assert ((rows["sensitivity"] - rows["replayed"]).abs() <= 4 * standard_error).all()
    assert rows.filter(rank=0)["replayed"].min() > sensitivity.LIMIT > rows.filter(rank=1)["replayed"].max()
