"""A sharded model's state survives a checkpoint exactly: on other ranks, by another strategy, optimizer included."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from instrumented_trainers.parallelism import ShardOptions
from tests.integration import training
from tests.integration.training import Training
from tests.support import process_group

YAFSDP, FSDP2, ZERO1 = (Training(name, steps=3, alike=True) for name in ("yafsdp", "fsdp2", "zero1"))
OFFLOADED = {
    f"{training.strategy} offloaded": dataclasses.replace(training, options=ShardOptions(offload=True))
    for training in (YAFSDP, FSDP2, ZERO1)
}
BY_NAME = {training.strategy: training for training in (YAFSDP, FSDP2, ZERO1)} | OFFLOADED
TOLERANCE = 1e-12

MOVES = ("yafsdp to yafsdp", "yafsdp to fsdp2", "fsdp2 to yafsdp", "fsdp2 to zero1", "zero1 to yafsdp")
MOVES += tuple(f"yafsdp to {name}" for name in OFFLOADED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> dict[str, process_group.Outcome]:
    save, load = (functools.partial(f, path=str(folder / "yafsdp")) for f in (training.save, training.load))
    cases = {
        "save": functools.partial(save, YAFSDP),
        "load": functools.partial(load, YAFSDP),
        "load into a trained model": functools.partial(load, YAFSDP, steps_before=2),
        "save in the background": functools.partial(training.save_while_training, YAFSDP, str(folder / "background")),
        "save fsdp2": functools.partial(training.save, FSDP2, str(folder / "fsdp2")),
        "save zero1": functools.partial(training.save, ZERO1, str(folder / "zero1")),
        "load zero1": functools.partial(training.load, ZERO1, str(folder / "zero1")),
        "load zero1 offloaded": functools.partial(training.load, OFFLOADED["zero1 offloaded"], str(folder / "zero1")),
        "load offloaded": functools.partial(load, OFFLOADED["yafsdp offloaded"], steps_before=2),
    }
    return process_group.run_cases(2, cases)


@pytest.fixture(scope="module")
def on_three_ranks(folder: Path, on_two_ranks: dict[str, process_group.Outcome]) -> dict[str, process_group.Outcome]:
    for name in ("save", "save fsdp2", "save zero1"):
        on_two_ranks[name].results()

    def move(name: str) -> Any:
        origin, by = name.split(" to ")
        save_to = str(folder / f"{origin} by {by}")
        return functools.partial(training.load, BY_NAME[by], str(folder / origin), save_to=save_to)

    return process_group.run_cases(
        3,
        {name: move(name) for name in MOVES}
        | {
            f"long {case.strategy}": functools.partial(
                training.save, dataclasses.replace(case, steps=10, alike=False), str(folder / f"long {case.strategy}")
            )
            for case in (YAFSDP, FSDP2)
        },
    )


@pytest.fixture(scope="module")
def on_four_ranks(folder: Path, on_three_ranks: dict[str, process_group.Outcome]) -> dict[str, process_group.Outcome]:
    on_three_ranks["yafsdp to fsdp2"].results()
    replicated, path = dataclasses.replace(YAFSDP, replicas=2), str(folder / "yafsdp by fsdp2")
    cases = {"yafsdp": YAFSDP, "yafsdp, replicated shards": replicated}
    return process_group.run_cases(
        4, {name: functools.partial(training.load, case, path) for name, case in cases.items()}
    )


def whole(path: Path) -> dict[str, Any]:
    """Read a checkpoint on one process, every tensor whole."""
    dcp_to_torch_save(path, path / "whole.pt")
    return torch.load(path / "whole.pt")


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{name}/{key}")
    else:
        yield name, state


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    found, wanted = dict(leaves(state)), dict(leaves(expected))
    assert found.keys() == wanted.keys()
    assert sum(isinstance(value, torch.Tensor) for value in wanted.values()) > 30
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("load", "save"),
        ("load into a trained model", "save"),
        ("load offloaded", "save"),
        ("load zero1", "save zero1"),
        ("load zero1 offloaded", "save zero1"),
    ],
)
def test_a_resumed_run_continues_exactly_like_the_saved_one(
    on_two_ranks: dict[str, process_group.Outcome], name: str, saved: str
) -> None:
    assert on_two_ranks[name].results() == on_two_ranks[saved].results()


def test_a_background_save_contains_the_state_at_its_start(
    folder: Path, on_two_ranks: dict[str, process_group.Outcome]
) -> None:
    on_two_ranks["save in the background"].results()
    assert_same(whole(folder / "background"), whole(folder / "yafsdp"))


@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_moves_to_other_ranks_and_strategies(
    folder: Path, on_three_ranks: dict[str, process_group.Outcome], name: str
) -> None:
    on_three_ranks[name].results()
    origin, by = name.split(" to ")
    assert_same(whole(folder / f"{origin} by {by}"), whole(folder / origin))


@pytest.mark.parametrize("name", ["yafsdp", "yafsdp, replicated shards"])
def test_from_two_ranks_by_fsdp2_on_three_to_four_the_next_losses_are_the_same(
    on_two_ranks: dict[str, process_group.Outcome], on_four_ranks: dict[str, process_group.Outcome], name: str
) -> None:
    expected = on_two_ranks["save"].results()[0]
    for losses in on_four_ranks[name].results():
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3), "a step must change the loss, or it says little"


def test_after_twenty_steps_weights_and_optimizer_are_those_of_fsdp2(
    folder: Path, on_three_ranks: dict[str, process_group.Outcome]
) -> None:
    for name in ("long yafsdp", "long fsdp2"):
        on_three_ranks[name].results()
    found, expected = dict(leaves(whole(folder / "long yafsdp"))), dict(leaves(whole(folder / "long fsdp2")))
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            difference = (found[name] - value).abs().max() / value.abs().max()
            assert difference < TOLERANCE, (name, difference)
    losses = on_three_ranks["long fsdp2"].results()[0]
    assert on_three_ranks["long yafsdp"].results()[0] == pytest.approx(losses, rel=TOLERANCE)
