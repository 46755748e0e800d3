"""Evaluation in a training: the mean over all ranks' tokens, outside of every step, without an effect on training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.nn import functional

import tracekit
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.parallelism import STRATEGIES
from instrumented_trainers.text.batches import read_tokens
from instrumented_trainers.text.tokenizer import ByteTokenizer
from tests.integration import trainings
from tests.integration.trainings import case, micro
from tests.support import process_group
from tracekit import conventions

# 5 sequences for 2 ranks of 2: the last batch is not full, and rank 1 has one sequence less.
SEQUENCES, LENGTH = 5, 32
EXACT: dict[str, Any] = {"precision": "fp64", "max_norm": 0.0, "steps": 4, "dropout": 0.1, "profile_wait": 1}
EVALUATED: dict[str, Any] = {"eval_every": 2, "eval_steps": 10}
SPLIT: dict[str, Any] = {"steps": 3, "eval_every": 2, "eval_steps": 3, "eval_split": 0.25}


def text(folder: Path) -> Path:
    path = folder / "evaluation.txt"
    if not path.exists():
        path.write_text("".join(chr(97 + index * index % 23) for index in range(SEQUENCES * LENGTH + 3)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, process_group.Outcome]:
    evaluated = {**EXACT, **EVALUATED, "eval_data": (text(folder),)}
    cases = {name: case(micro(name, folder / name, **evaluated)) for name in STRATEGIES}
    cases["not evaluated"] = case(micro("fsdp2", folder / "not evaluated", **EXACT))
    cases["untrained"] = case(micro("yafsdp", folder / "untrained", **{**evaluated, "learning_rate": 0.0}))
    cases["split"] = case(micro("ddp", folder / "split", **SPLIT))
    cases["split, streamed"] = case(micro("ddp", folder / "split streamed", **SPLIT, stream=True))
    cases["too short"] = case(micro("ddp", folder / "short", **{**evaluated, "tokens": 256}))
    return process_group.run_cases(2, cases, timeout_s=300)


def evaluations(run: Path, rank: int) -> dict[int, tuple[float, float]]:
    """Return loss and perplexity of each evaluation, by the step before it."""
    rows = trainings.rows(run, rank, conventions.METRICS_SUFFIX)
    return {row["step"]: (row["eval_loss"], row["eval_perplexity"]) for row in rows if "eval_loss" in row}


def test_all_ranks_have_the_mean_over_all_tokens(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    outcomes["untrained"].results()
    with torch.device("meta"):
        model = Llama(PRESETS["micro"]).double()
    model.materialize(torch.device("cpu"), model.initializer(0))
    tokens = read_tokens([text(folder)], ByteTokenizer()).long()
    rows = tokens[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)
    targets = tokens[1 : SEQUENCES * LENGTH + 1]
    expected = functional.cross_entropy(model(rows).flatten(0, 1), targets)
    for rank in range(2):
        found = evaluations(folder / "untrained", rank)
        assert list(found) == [1, 3]
        assert found[3][0] == pytest.approx(expected.item(), rel=1e-12)
        assert found[3][1] == pytest.approx(expected.exp().item(), rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_evaluates_the_same(
    strategy: str, folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    outcomes[strategy].results()
    expected = evaluations(folder / "ddp", 0)
    for rank in range(2):
        for step, (loss, _) in evaluations(folder / strategy, rank).items():
            assert loss == pytest.approx(expected[step][0], rel=1e-12)


def test_evaluation_does_not_change_the_training(outcomes: Mapping[str, process_group.Outcome]) -> None:
    assert outcomes["fsdp2"].results() == outcomes["not evaluated"].results()


@pytest.mark.parametrize("rank", [0, 1])
def test_evaluation_belongs_to_no_step(rank: int, folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    outcomes["fsdp2"].results()
    recorded = tracekit.load(str(folder / "fsdp2"), cache=False).trace(rank)
    spans = recorded.ops.filter(pl.col("name") == "tracekit::evaluation")
    assert spans["step"].to_list() == [None]
    assert recorded.steps["step"].to_list() == [2, 3]
    forwards = recorded.ops.filter(pl.col("name") == conventions.span_name(conventions.FORWARD))
    assert forwards["step"].to_list() == [2, 3]


@pytest.mark.parametrize("name", ["split", "split streamed"])
def test_a_part_of_the_text_can_be_held_out(
    name: str, folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    outcomes["split"].results()
    outcomes["split, streamed"].results()
    found = evaluations(folder / name, 0)
    assert list(found) == [1, 2]
    assert found[2][0] < found[1][0] < 6.5


def test_too_short_a_text_is_refused(outcomes: Mapping[str, process_group.Outcome]) -> None:
    for _, said in outcomes["too short"].results():
        assert "the text to evaluate on has 164 tokens, which is too short for a sequence of 256" in said
