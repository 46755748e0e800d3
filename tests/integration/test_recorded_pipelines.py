"""Schedules of torch.distributed.pipelining on four gloo ranks, recorded: their actions, bubbles and axes."""

import functools
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import pipelining

import tracekit
from tests.support import process_group
from tracekit.analysis.parallelism import axis_communication, expert_load, pipeline_bubbles, pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import pipeline_actions
from tracekit.capture import Recorder

RANKS, MICRO_BATCHES, WIDTH = 4, 8, 64
# 1F1B of torch writes no spans, so its actions are inferred; GPipe's spans name no stage.
SOURCES = {"1f1b": "inferred", "gpipe": "span", "interleaved": "span", "zbv": "span"}


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)))


def stages_of(schedule: str, rank: int) -> list[int]:
    return {"interleaved": [rank, rank + RANKS], "zbv": [rank, 2 * RANKS - 1 - rank]}.get(schedule, [rank])


def train_pipeline(schedule: str, out: Path) -> None:
    """Record two steps of a pipeline of four ranks."""
    own = stages_of(schedule, dist.get_rank())
    parts = [layers(3) for _ in own]
    built = [
        pipelining.PipelineStage(part, stage, RANKS * len(own), torch.device("cpu"))
        for part, stage in zip(parts, own, strict=True)
    ]
    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }
    runner = kinds[schedule](built if len(own) > 1 else built[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1e-3)
    batch = torch.randn(MICRO_BATCHES * 8, WIDTH)
    with Recorder(out / schedule, steps="1:3", warmup=1) as recorder:
        for _ in range(3):
            inputs = (batch,) if 0 in own else ()
            ends = {"target": batch, "losses": []} if max(own) == RANKS * len(own) - 1 else {}
            runner.step(*inputs, **ends)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def exchange_tokens(out: Path) -> None:
    """Record steps in which half of the ranks' experts get three times as many tokens as the others."""
    rank = dist.get_rank()
    counts = [3, 1, 3, 1]
    with Recorder(out / "experts", steps="1:3", warmup=1) as recorder:
        for _ in range(3):
            tokens = torch.randn(sum(counts), WIDTH)
            got = torch.empty(counts[rank] * RANKS, WIDTH)
            dist.all_to_all_single(got, tokens, [counts[rank]] * RANKS, counts)
            back = torch.empty_like(tokens)
            dist.all_to_all_single(back, got @ torch.randn(WIDTH, WIDTH), counts, [counts[rank]] * RANKS)
            recorder.step()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pipelines")
    cases = {schedule: functools.partial(train_pipeline, schedule, out) for schedule in SOURCES}
    outcomes = process_group.run_cases(RANKS, cases | {"experts": functools.partial(exchange_tokens, out)})
    for outcome in outcomes.values():
        outcome.results()
    return out


@pytest.mark.parametrize("schedule", SOURCES)
def test_every_action_of_a_schedule_is_found_with_its_stage(recorded: Path, schedule: str) -> None:
    run = tracekit.load(str(recorded / schedule), cache=False)
    assert set(run.table(pipeline_actions)["source"]) == {SOURCES[schedule]}
    actions = run.table(pipeline_stages.staged_actions)
    forwards = actions.filter(pl.col("action") == "forward")
    for rank in range(RANKS):
        own = forwards.filter(pl.col("rank") == rank)
        assert set(own["stage"]) == set(stages_of(schedule, rank))
        assert own.group_by("step", "stage").agg(pl.col("micro_batch").sort())["micro_batch"].to_list() == [
            list(range(MICRO_BATCHES))
        ] * (2 * len(stages_of(schedule, rank)))


@pytest.mark.parametrize("schedule", SOURCES)
def test_no_action_starts_before_its_input_is_complete(recorded: Path, schedule: str) -> None:
    run = tracekit.load(str(recorded / schedule), cache=False)
    needed = pipeline_stages.dependencies(run.table(pipeline_stages.staged_actions))
    assert needed.height
    assert needed.filter(pl.col("start_ns") < pl.col("ready_ns")).is_empty()


@pytest.mark.parametrize("schedule", SOURCES)
def test_a_recorded_pipeline_is_never_faster_than_its_own_schedule(recorded: Path, schedule: str) -> None:
    run = tracekit.load(str(recorded / schedule), cache=False)
    rows = run.table(pipeline_bubbles.pipeline_bubbles)
    assert (rows["ideal_duration_ns"] <= rows["duration_ns"]).all()
    causes = rows.select(pl.sum_horizontal(pipeline_bubbles.CAUSES)).to_series()
    assert (causes - rows["bubble_ns"]).abs().max() <= 2
    assert (rows.select(pl.sum_horizontal(pipeline_bubbles.PHASES)).to_series() == rows["bubble_ns"]).all()
    assert axis_communication.by_axis(run)["axis"].to_list() == ["pp"] * RANKS


def test_the_tokens_of_experts_are_those_that_were_sent(recorded: Path) -> None:
    run = tracekit.load(str(recorded / "experts"), cache=False)
    loads = run.table(expert_load.expert_load).group_by("rank").agg(pl.col("load_ratio").mean()).sort("rank")
    assert loads["load_ratio"].to_list() == [1.5, 0.5, 1.5, 0.5]
