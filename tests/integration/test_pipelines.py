"""Pipelines train as one process does: every schedule with every data strategy, clipped, evaluated, saved and resumed.

In fp64 with SGD, whose steps are as large as the gradients: Adam's would hide a wrong scale.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from instrumented_trainers.config import SCHEDULES, TrainingConfig
from instrumented_trainers.parallelism.pipeline import PipelineModel, ReplicatedPart
from tests.integration import fault_signs, trainings
from tests.integration.trainings import case
from tests.support import process_group
from tests.support.selection import others_in_accuracy

STEPS, TOLERANCE = 3, 1e-10
ONE_STAGE = ("1f1b", "gpipe", "zb-h1")
SPLIT_BACKWARD = ("zb-h1", "zbv", "dualpipev")
PARITY = [
    (schedule, strategy)
    for schedule in SCHEDULES
    for strategy in ("ddp", "zero1", "fsdp2", "yafsdp")
    if schedule not in SPLIT_BACKWARD or strategy in ("ddp", "zero1")
]
CLIPPED = ("zero1", "fsdp2", "yafsdp")
BROKEN = ("skipped sync", "wrong scale")
SAVED = {"optimizer": "adamw", "steps": 4, "checkpoint_every": 2, "max_norm": 0.5, "learning_rate": 3e-3}
RESUMED = {
    "itself": ("zero1", 4, {"pp": 2, "schedule": "interleaved"}),
    "zbv, ddp": ("ddp", 4, {"pp": 2, "schedule": "zbv"}),
    "pp × yafsdp": ("yafsdp", 4, {"pp": 2}),
    "fsdp2": ("fsdp2", 4, {"batch": 1, "override": ("batch=1",)}),
    "one process": ("ddp", 1, {"batch": 4, "override": ("batch=4",)}),
}


# Every day each schedule with one strategy, and each strategy with one schedule.
EVERYDAY_PARITY = {
    ("1f1b", "yafsdp"),
    ("gpipe", "fsdp2"),
    ("interleaved", "zero1"),
    ("zb-h1", "zero1"),
    ("zbv", "zero1"),
    ("dualpipev", "ddp"),
}
EVERYDAY_ALONE = {"1f1b", "dualpipev"}
EVERYDAY_CLIPPED = {"zero1", "yafsdp"}
EVERYDAY_RESUMED = {"itself", "one process"}
IN_ACCURACY = {
    *(f"{schedule}, {strategy}" for schedule, strategy in set(PARITY) - EVERYDAY_PARITY),
    *(f"{schedule} alone" for schedule in set(SCHEDULES) - EVERYDAY_ALONE),
    *(f"clipped {strategy}" for strategy in set(CLIPPED) - EVERYDAY_CLIPPED),
    *(f"from {name}" for name in set(RESUMED) - EVERYDAY_RESUMED),
}
Outcomes = Mapping[int, Mapping[str, process_group.Outcome]]


def settings(strategy: str, out: Path, ranks: int = 4, **changes: Any) -> TrainingConfig:
    """Return a training on so many ranks, in which two ranks of data parallelism have 2 sequences each."""
    small = {"model": "micro-deep", "tokens": 8, "batch": 2, "micro_batches": 4, "steps": STEPS, "precision": "fp64"}
    plain = {
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "lr_schedule": "constant",
        "max_norm": 0.0,
        "profile_wait": 99,
    }
    return TrainingConfig(strategy, out, **{**small, **plain, "world_size": ranks, **changes})


def broken(config: TrainingConfig, how: str) -> Any:
    """Train with a mistake."""
    whole = ReplicatedPart.synchronize, PipelineModel.step

    def doubled(model: PipelineModel, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = whole[1](model, tokens, targets)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + 1e-6)
        return loss

    try:
        if how == "skipped sync":
            ReplicatedPart.synchronize = lambda part: None  # type: ignore[method-assign]
        else:
            PipelineModel.step = doubled  # type: ignore[method-assign]
        return trainings.train(config)
    finally:
        ReplicatedPart.synchronize, PipelineModel.step = whole  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Callable[[bool], Outcomes]:
    """A function that trains the cases of every day, or the others, which resume what the first have saved."""

    @functools.cache
    def train(everyday: bool) -> Outcomes:
        selected = {
            size: {name: case for name, case in of_size.items() if everyday == (name not in IN_ACCURACY)}
            for size, of_size in cases(folder).items()
        }
        return process_group.run_worlds(selected, timeout_s=400)

    return train


def cases(folder: Path) -> dict[int, dict[str, Callable[[], Any]]]:
    """Return what to train by the number of ranks and a name."""
    two, four = {"pp": 2}, {"pp": 4, "micro_batches": 8, "batch": 1}
    of_four: dict[str, Callable[[], Any]] = {
        f"{schedule}, {strategy}": case(
            settings(strategy, folder / f"{schedule}, {strategy}", schedule=schedule, **two)
        )
        for schedule, strategy in PARITY
    }
    of_two: dict[str, Callable[[], Any]] = {}
    for schedule in SCHEDULES:
        name = f"{schedule} alone"
        of_stages = of_four if schedule in ONE_STAGE else of_two
        changes = {**four, **({} if schedule in ONE_STAGE else {"pp": 2, "world_size": 2})}
        of_stages[name] = case(settings("zero1", folder / name, schedule=schedule, **changes))
    for strategy in CLIPPED:
        of_four[f"clipped {strategy}"] = case(settings(strategy, folder / f"clipped {strategy}", max_norm=0.5, **two))
    for how in BROKEN:
        of_four[how] = functools.partial(broken, settings("zero1", folder / how, **two), how)
    evaluated = {"eval_every": 2, "eval_split": 0.05, "eval_steps": 3}
    of_four["evaluated"] = case(settings("zero1", folder / "evaluated", **evaluated, schedule="zbv", **two))
    window = {"profile_wait": 1, "profile_warmup": 1, "profile_active": 1, "steps": 3}
    slow = {"fault": ("slow-stage=1:3",), **window}
    of_four["slow"] = case(settings("ddp", folder / "slow", **{**four, **slow}))
    of_four["saved"] = case(settings("zero1", folder / "saved", schedule="interleaved", **SAVED, **two))
    of_one = {
        "two": case(settings("ddp", folder / "two", 1, batch=4)),
        "one": case(settings("ddp", folder / "one", 1, micro_batches=8, batch=1)),
        "clipped": case(settings("ddp", folder / "clipped", 1, batch=4, max_norm=0.5)),
        "evaluated": case(settings("ddp", folder / "evaluated alone", 1, batch=4, **evaluated)),
    }
    for name, (strategy, ranks, changes) in RESUMED.items():
        start = {"resume": str(folder / "saved" / "checkpoints" / "step-000002")}
        resumed = case(settings(strategy, folder / f"from {name}", ranks, **{**SAVED, **changes, **start}))
        (of_one if ranks == 1 else of_four)[f"from {name}"] = resumed
    return {4: of_four, 2: of_two, 1: of_one}


def losses(outcomes: Callable[[bool], Outcomes], ranks: int, name: str) -> list[float]:
    """Return the mean over ranks of each step's loss; the ranks of a pipeline have the same one."""
    results = outcomes(name not in IN_ACCURACY)[ranks][name].results()
    assert results[0][0], results[0][1]
    by_step = zip(*(of_rank for of_rank, _ in results), strict=True)
    return [sum(values) / len(values) for values in by_step]


@pytest.mark.parametrize(("schedule", "strategy"), others_in_accuracy(PARITY, EVERYDAY_PARITY), ids=str)
def test_a_pipeline_trains_as_one_process_does(outcomes: Any, schedule: str, strategy: str) -> None:
    expected = losses(outcomes, 1, "two")
    assert len(expected) == STEPS
    assert losses(outcomes, 4, f"{schedule}, {strategy}") == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("schedule", others_in_accuracy(SCHEDULES, EVERYDAY_ALONE))
def test_a_pipeline_without_data_parallelism_trains_as_one_process_does(outcomes: Any, schedule: str) -> None:
    ranks = 4 if schedule in ONE_STAGE else 2
    assert losses(outcomes, ranks, f"{schedule} alone") == pytest.approx(
        losses(outcomes, 1, "one"), rel=0, abs=TOLERANCE
    )


@pytest.mark.parametrize("strategy", others_in_accuracy(CLIPPED, EVERYDAY_CLIPPED))
def test_gradients_are_clipped_by_their_norm_over_stages_and_shards(outcomes: Any, strategy: str) -> None:
    expected = losses(outcomes, 1, "clipped")
    assert expected[1:] != pytest.approx(losses(outcomes, 1, "two")[1:], rel=0, abs=1e-3)
    assert losses(outcomes, 4, f"clipped {strategy}") == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("how", BROKEN)
def test_the_comparison_sees_a_mistake(outcomes: Any, how: str) -> None:
    assert losses(outcomes, 4, how) != pytest.approx(losses(outcomes, 1, "two"), rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("name", others_in_accuracy(RESUMED, EVERYDAY_RESUMED))
def test_a_pipelines_checkpoint_is_resumed_under_another_layout(outcomes: Any, name: str) -> None:
    expected = losses(outcomes, 4, "saved")[2:]
    resumed = losses(outcomes, RESUMED[name][1], f"from {name}")
    assert resumed == pytest.approx(expected, rel=0, abs=0 if name == "itself" else TOLERANCE)


def test_every_rank_of_a_pipeline_has_its_loss(outcomes: Any) -> None:
    results = [of_rank for of_rank, _ in outcomes(True)[4]["zbv, zero1"].results()]
    assert results[0] == results[2] != results[1] == results[3]  # ranks 0 and 2 are a pipeline


def test_a_pipeline_is_evaluated_as_one_process_is(outcomes: Any, folder: Path) -> None:
    losses(outcomes, 4, "evaluated"), losses(outcomes, 1, "evaluated")
    expected = evaluations(folder / "evaluated alone", 0)
    assert len(expected) == 2
    for rank in range(4):
        assert evaluations(folder / "evaluated", rank) == pytest.approx(expected, rel=0, abs=TOLERANCE)


def evaluations(run: Path, rank: int) -> list[float]:
    rows = trainings.rows(run, rank, trainings.conventions.METRICS_SUFFIX)
    return [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]


def test_the_manifest_says_which_ranks_and_layers_a_stage_has(outcomes: Any, folder: Path) -> None:
    losses(outcomes, 4, "interleaved, zero1")
    manifest = trainings.manifest(folder / "interleaved, zero1")
    assert manifest["mesh"] == {"axes": ["pp", "dp_replicate"], "shape": [2, 2]}
    assert manifest["groups"] == {"pp": [[0, 2], [1, 3]], "dp_replicate": [[0, 1], [2, 3]]}
    assert manifest["pipeline"] == {
        "schedule": "interleaved",
        "stages": 4,
        "virtual_stages": 2,
        "micro_batches": 4,
        "stage_ranks": [[0, 1], [2, 3], [0, 1], [2, 3]],
        "stage_layers": [[0], [1], [2], [3]],
    }


@pytest.mark.parametrize("rank", range(4))
def test_each_action_has_a_span_and_waits_outside_of_those_that_compute(outcomes: Any, folder: Path, rank: int) -> None:
    losses(outcomes, 4, "slow")
    spans = [event for event in fault_signs.named(folder / "slow", rank, "PP:") if event["cat"] == "user_annotation"]
    count = Counter(re.sub(r"\d+$", "", event["name"]) for event in spans)
    expected = {f"PP:{rank}F": 8, f"PP:{rank}B": 8, f"PP:{rank}REDUCE_GRAD": 1}
    if rank > 0:
        expected |= {f"PP:{rank}RECV_F": 8, f"PP:{rank}SEND_B": 8}
    if rank < 3:
        expected |= {f"PP:{rank}SEND_F": 8, f"PP:{rank}RECV_B": 8}
    assert count == expected
    for before, after in itertools.pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_a_slow_stage_computes_more_and_loses_nothing(outcomes: Any, folder: Path) -> None:
    assert losses(outcomes, 4, "slow") == pytest.approx(losses(outcomes, 4, "1f1b alone")[:3], rel=0, abs=TOLERANCE)
    for rank in range(4):
        products = fault_signs.named(folder / "slow", rank, "aten::mm")
        extra = [event for event in products if event["args"].get("Input Dims") == [[240, 240], [240, 240]]]
        assert bool(extra) is (rank == 1)
        assert all(any(fault_signs.within(event, span) for span in computing(folder / "slow", rank)) for event in extra)
    (truth,) = trainings.manifest(folder / "slow")["faults"]
    assert truth["args"] == {"stage": 1, "factor": 3.0}


def computing(run: Path, rank: int) -> list[dict[str, Any]]:
    return [event for action in "FB" for event in fault_signs.named(run, rank, f"PP:{rank}{action}")]
