"""Every optimizer trains the same under every strategy, and resumes exactly, through the trainers' own loop."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from instrumented_trainers.config import OPTIMIZERS
from instrumented_trainers.parallelism import STRATEGIES
from tests.integration.trainings import case, micro
from tests.support import process_group

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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, process_group.Outcome]:
    folder: Path = tmp_path_factory.mktemp("runs")
    cases = {}
    for strategy, optimizer in PAIRS:
        run, again = folder / f"{strategy}-{optimizer}", folder / f"{strategy}-{optimizer}-again"
        settings = {**SETTINGS, "optimizer": optimizer}
        saved = {**settings, "checkpoint_every": 3}
        cases[run.name] = case(micro(strategy, run, **saved))
        resumed = {**settings, "resume": str(run / "checkpoints" / "step-000003")}
        if (strategy, optimizer) in RESUMED:
            cases[again.name] = case(micro(strategy, again, **resumed))
    return process_group.run_cases(2, cases, timeout_s=480)


def losses(outcomes: Mapping[str, process_group.Outcome], name: str) -> list[list[float]]:
    results = outcomes[name].results()
    assert not [said for _, said in results if said]
    return [of_rank for of_rank, _ in results]


@pytest.mark.parametrize(("strategy", "optimizer"), PAIRS)
def test_losses_are_those_of_ddp(strategy: str, optimizer: str, outcomes: Mapping[str, process_group.Outcome]) -> None:
    reference, actual = losses(outcomes, f"ddp-{optimizer}"), losses(outcomes, f"{strategy}-{optimizer}")
    assert reference[0][-1] < reference[0][0] - 0.01
    for of_rank, expected in zip(actual, reference, strict=True):
        assert of_rank == pytest.approx(expected, rel=TOLERANCE.get(optimizer, 1e-12))


@pytest.mark.parametrize(("strategy", "optimizer"), RESUMED)
def test_a_resumed_training_is_the_uninterrupted_one(
    strategy: str, optimizer: str, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    whole, resumed = losses(outcomes, f"{strategy}-{optimizer}"), losses(outcomes, f"{strategy}-{optimizer}-again")
    assert resumed == [of_rank[3:] for of_rank in whole]
