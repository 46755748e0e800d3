"""Every optimizer trains the same under every strategy, and resumes exactly, through the trainers' own loop."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from instrumented_trainers.config import OPTIMIZERS
from instrumented_trainers.parallelism import STRATEGIES
from tests.integration.trainings import case, micro
from tests.support import process_group
from tests.support.selection import others_in_accuracy

STEPS = 6
# In fp64. FSDP1 cannot clip there.
SETTINGS = {
    "precision": "fp64",
    "max_norm": 0.0,
    "steps": STEPS,
    "lr_schedule": "wsd",
    "decay_steps": 2,
    "warmup_steps": 2,
    "learning_rate": 3e-3,
    "weight_decay": 0.3,
    "profile_wait": 99,
}
# torch's Muon orthogonalizes in bfloat16, to which a sum in another order may round differently.
TOLERANCE = {"muon": 1e-10}
PAIRS = [
    (strategy, optimizer)
    for optimizer in OPTIMIZERS
    for strategy in STRATEGIES
    if (strategy, optimizer) != ("fsdp1", "muon")
]

# AdamW is resumed in test_trainers_resume.py.
RESUMED = [
    pair for pair in PAIRS if pair[1] == "muon" or pair in (("fsdp1", "sgd"), ("zero1", "lion"), ("fsdp2", "lion"))
]


# Every day: each optimizer under DDP and under a strategy that divides its state, and the one that needs whole tensors.
EVERYDAY = {
    *(pair for pair in PAIRS if pair[0] == "ddp"),
    *(("fsdp2", "adamw"), ("yafsdp", "adam"), ("fsdp1", "sgd"), ("zero1", "lion")),
    *(("zero1", "muon"), ("yafsdp", "muon")),
}
Outcomes = Mapping[str, process_group.Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Outcomes]:
    """A function that trains the pairs of every day, or the others."""
    folder: Path = tmp_path_factory.mktemp("runs")

    @functools.cache
    def train(everyday: bool) -> Outcomes:
        cases = {}
        for strategy, optimizer in (pair for pair in PAIRS if everyday == (pair in EVERYDAY)):
            run, again = folder / f"{strategy}-{optimizer}", folder / f"{strategy}-{optimizer}-again"
            settings = {**SETTINGS, "optimizer": optimizer}
            if (strategy, optimizer) in RESUMED:
                cases[run.name] = case(micro(strategy, run, **settings, checkpoint_every=3))
                resumed = {**settings, "resume": str(run / "checkpoints" / "step-000003")}
                cases[again.name] = case(micro(strategy, again, **resumed))
            else:
                cases[run.name] = case(micro(strategy, run, **settings))
        return process_group.run_cases(2, cases, timeout_s=480)

    return train


def losses(outcomes: Callable[[bool], Outcomes], pair: tuple[str, str], suffix: str = "") -> list[list[float]]:
    results = outcomes(pair in EVERYDAY)["-".join(pair) + suffix].results()
    assert not [said for _, said in results if said]
    return [of_rank for of_rank, _ in results]


@pytest.mark.parametrize(("strategy", "optimizer"), others_in_accuracy(PAIRS, EVERYDAY))
def test_losses_are_those_of_ddp(strategy: str, optimizer: str, outcomes: Callable[[bool], Outcomes]) -> None:
    reference, actual = losses(outcomes, ("ddp", optimizer)), losses(outcomes, (strategy, optimizer))
    assert reference[0][-1] < reference[0][0] - 0.01
    for of_rank, expected in zip(actual, reference, strict=True):
        assert of_rank == pytest.approx(expected, rel=TOLERANCE.get(optimizer, 1e-12))


@pytest.mark.parametrize(("strategy", "optimizer"), others_in_accuracy(RESUMED, EVERYDAY.intersection(RESUMED)))
def test_a_resumed_training_is_the_uninterrupted_one(
    strategy: str, optimizer: str, outcomes: Callable[[bool], Outcomes]
) -> None:
    whole, resumed = losses(outcomes, (strategy, optimizer)), losses(outcomes, (strategy, optimizer), "-again")
    assert resumed == [of_rank[3:] for of_rank in whole]
