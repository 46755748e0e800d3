"""A recorder opens a deep window by itself when steps of a rank are slow again and again or for long, else never."""

import functools
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import process_group
from tracekit import conventions
from tracekit.capture import Recorder, slow_steps
from tracekit.capture.rank_info import this_rank, this_world_size
from tracekit.capture.window_schedule import peers

STEP_S = 0.008


@dataclass(frozen=True)
class Stall:
    """Time added to each `every`-th step of a rank from one step to another; `rank` -1 is none."""

    rank: int = -1
    first: int = 0
    end: int = 0
    every: int = 1
    added_s: float = 0.0
    phase: str = conventions.FORWARD

    def steps(self) -> range:
        return range(self.first, self.end, self.every)


def train(
    folder: Path,
    stall: Stall,
    *,
    steps: int,
    step_s: float = STEP_S,
    spread: float = 0.05,
    seed: int = 0,
    stops_early: bool = False,
) -> int:
    """Train with steps of about `step_s`, and record it, perhaps until a window is written; return the steps done."""
    rank, draw = this_rank(), random.Random(seed * 100 + this_rank())
    model: nn.Module = nn.Linear(16, 16)
    if this_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(folder, steps=None, on_outlier=3, memory=False) as recorder:
        for step in range(steps):
            added_s = stall.added_s if rank == stall.rank and step in stall.steps() else 0.0
            with recorder.span(conventions.DATA):
                time.sleep(added_s if stall.phase == conventions.DATA else 0.0)
            with recorder.span(conventions.FORWARD):
                loss = model(torch.ones(4, 16)).mean()
                time.sleep(step_s * draw.lognormvariate(0, spread))
                time.sleep(added_s if stall.phase == conventions.FORWARD else 0.0)
            with recorder.span(conventions.BACKWARD):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
            if stops_early and step % 50 == 49 and _agree(bool(windows(folder))):
                break
    return recorder.steps_done


def _agree(is_true: bool) -> bool:
    """Whether it is true on any rank, between two steps."""
    if not dist.is_initialized():
        return is_true
    flag = torch.tensor(float(is_true))
    dist.all_reduce(flag)
    return bool(flag)


def windows(run: Path) -> list[dict[str, Any]]:
    path = run / conventions.MANIFEST_FILE  # the leading rank writes it, perhaps not yet
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"windows": []}
    return list(manifest["windows"])


def recorded_steps(window: Mapping[str, Any]) -> range:
    return range(window["first_step"], window["first_step"] + window["steps"])


def is_caught(run: Path, stall: Stall, ranks: int) -> bool:
    """Whether the first window has a planted step, states the rank, and has a trace of each rank."""
    opened = windows(run)
    if not opened or not set(recorded_steps(opened[0])) & set(stall.steps()):
        return False
    traces = [run / conventions.rank_file(rank, conventions.TRACE_SUFFIX) for rank in range(ranks)]
    return opened[0]["outlier"]["rank"] == stall.rank and all(trace.is_file() for trace in traces)


# Every day: one process, with a shorter time between request and window ---------------------------------------------


@pytest.fixture
def short_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracekit.capture import window_schedule

    for module in (slow_steps, window_schedule):
        monkeypatch.setattr(module, "LASTING_NS", 200_000_000)
    monkeypatch.setattr(slow_steps, "_RECENT_NS", 800_000_000)
    monkeypatch.setattr(window_schedule, "_POLL_EVERY_S", 0.0)


def judged_by(monkeypatch: pytest.MonkeyPatch, stall: Stall, spread: float) -> None:
    """Let drawn times be judged: real ones of such short steps are mostly what other programs take."""
    draw = random.Random(0)

    def drawn_ns(_recorder: Recorder, row: Mapping[str, float], _step_ns: float) -> float:
        added_s = stall.added_s if int(row["step"]) in stall.steps() else 0.0
        return 1e9 * (0.002 * draw.lognormvariate(0, spread) + added_s)

    monkeypatch.setattr(Recorder, "_judged_ns", drawn_ns)


@pytest.mark.usefixtures("short_lead")
def test_a_window_opens_for_a_reason_and_states_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = slow_steps.Outlier(100, 0, 3.0, 2_000_000, gap_steps=13)
    monkeypatch.setattr(
        slow_steps.SlowSteps, "add", lambda _self, step, *_times: reason if step == reason.step else None
    )
    train(tmp_path, Stall(), steps=10_000, step_s=0.002, stops_early=True)  # a busy machine needs more steps
    (window,) = windows(tmp_path)
    assert window["outlier"] == {"step": 100, "rank": 0, "ratio": 3.0, "median_ns": 2_000_000}
    assert window["first_step"] > 100
    assert (tmp_path / conventions.rank_file(0, conventions.TRACE_SUFFIX)).is_file()


@pytest.mark.usefixtures("short_lead")
def test_a_training_without_stalls_opens_none_and_leaves_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, Stall(), 0.3)
    train(tmp_path, Stall(), steps=200, step_s=0.002, spread=0.3)
    assert windows(tmp_path) == []
    assert not (tmp_path / conventions.NOW_FILE).exists()


@pytest.mark.usefixtures("short_lead")
def test_the_leading_rank_lists_a_window_that_it_does_not_record(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": None, "on_outlier": 1, "world_size": 8, "device": "cpu", "memory": False}
    with Recorder(tmp_path, rank=0, **options) as leading, Recorder(tmp_path, rank=5, **options) as slow:
        outlier = slow_steps.Outlier(3, 5, 2.0, 10**7)
        assert slow._requests is not None
        slow._requests.ask(outlier, peers(5, 8))
        for _ in range(80):
            time.sleep(0.004)
            leading.step()
            slow.step()
    (window,) = windows(tmp_path)
    assert window["outlier"] == {"step": 3, "rank": 5, "ratio": 2.0, "median_ns": 10**7}
    assert [path.name for path in tmp_path.rglob("*.trace.json.gz")] == ["rank00005.pt.trace.json.gz"]


# Ranks of a process group ---------------------------------------------------------------------------------------------


LATE_S = 0.03


def train_by_hand(folder: Path) -> None:
    """Train without DistributedDataParallel: each step averages a gradient itself. Rank 1 is late in each step."""
    with Recorder(folder, steps=None) as recorder:
        for _ in range(30):
            time.sleep(LATE_S if this_rank() == 1 else 0.001)
            dist.all_reduce(torch.ones(16))
            recorder.step()


@pytest.fixture(scope="module")
def late_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs in which rank 1 is late in each step, by how gradients are averaged."""
    folder = tmp_path_factory.mktemp("late")
    late = Stall(rank=1, end=30, added_s=LATE_S)
    cases = {
        "ddp": functools.partial(train, folder / "ddp", late, steps=30),
        "all_reduce": functools.partial(train_by_hand, folder / "all_reduce"),
    }
    for outcome in process_group.run_cases(2, cases).values():
        outcome.results()
    return {name: folder / name for name in cases}


@pytest.mark.parametrize("name", ["ddp", "all_reduce"])
def test_the_rank_that_waits_for_a_late_one_states_it_in_its_metrics(name: str, late_runs: dict[str, Path]) -> None:
    waits_ns = []
    for rank in range(2):
        path = late_runs[name] / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if name == "ddp":
            assert rows.pop()[conventions.COLLECTIVE_WAIT_METRIC] is None  # no forward has followed
        assert all(0 <= row[conventions.COLLECTIVE_WAIT_METRIC] <= row["step_time_ns"] for row in rows[5:])
        waits_ns.append(sorted(row[conventions.COLLECTIVE_WAIT_METRIC] for row in rows[5:])[12])
    # The rank that is late waits for the other one only where that has no processor.
    assert waits_ns[0] > 0.5e9 * LATE_S
    assert waits_ns[0] > waits_ns[1]


# Many, for docs/lab/always_on.md --------------------------------------------------------------------------------------


@pytest.mark.accuracy  # where the window falls depends on how busy the machine is
@pytest.mark.usefixtures("short_lead")
def test_a_window_opens_around_a_stall_that_recurs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall = Stall(rank=0, first=80, end=400, every=13, added_s=0.02)
    judged_by(monkeypatch, stall, 0.05)
    assert train(tmp_path, stall, steps=260, step_s=0.002) == 260
    assert is_caught(tmp_path, stall, 1)
    reason = windows(tmp_path)[0]["outlier"]
    assert reason["step"] in stall.steps()
    assert reason["ratio"] > 2
    assert len(windows(tmp_path)) == 1  # the next one would be 256 steps later


def planted(seed: int) -> Stall:
    draw = random.Random(seed)
    rank, first = draw.randrange(4), draw.randint(120, 200)
    match seed % 3:
        case 0:
            return Stall(rank, first, 5000, every=draw.randint(5, 60), added_s=draw.uniform(0.04, 0.08))
        case 1:
            return Stall(rank, first, 5000, added_s=draw.uniform(0.008, 0.02))
        case _:
            return Stall(rank, first, first + 700, added_s=draw.uniform(0.01, 0.03), phase=conventions.DATA)


@pytest.mark.accuracy
@pytest.mark.timeout(1800)
def test_the_window_has_the_planted_stall_in_nineteen_of_twenty_trainings(tmp_path: Path) -> None:
    cases = {
        str(seed): functools.partial(
            train, tmp_path / str(seed), planted(seed), steps=1200, seed=seed, stops_early=True
        )
        for seed in range(20)
    }
    for outcome in process_group.run_cases(4, cases, timeout_s=1700).values():
        outcome.results()
    caught = {seed: is_caught(tmp_path / seed, planted(int(seed)), 4) for seed in cases}
    for seed in cases:
        print(seed, caught[seed], planted(int(seed)), windows(tmp_path / seed)[:1])
    assert sum(caught.values()) >= 19


@pytest.mark.accuracy
@pytest.mark.timeout(1800)
def test_no_window_opens_in_twenty_healthy_trainings_of_more_than_a_thousand_steps(tmp_path: Path) -> None:
    cases = {
        str(seed): functools.partial(
            train, tmp_path / str(seed), Stall(), steps=1100, step_s=0.002 + 0.0005 * (seed % 4),
            spread=(0.0, 0.05, 0.2, 0.4)[seed % 4], seed=seed,
        )
        for seed in range(20)
    }  # fmt: skip
    for world_size, seeds in ((4, list(cases)[:5]), (2, list(cases)[5:])):
        some = {seed: cases[seed] for seed in seeds}
        for outcome in process_group.run_cases(world_size, some, timeout_s=1700).values():
            outcome.results()
    opened = {seed: windows(tmp_path / seed) for seed in cases}
    print({seed: found for seed, found in opened.items() if found})
    assert not any(opened.values())
