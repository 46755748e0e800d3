"""Timelines of optimizer steps, a letter each, and the training steps that they make."""

import pytest

from tracekit.capture.step_inference import StepCounter


def counted(steps: str, made: dict[str, int]) -> list[int]:
    """Return after which optimizer steps, counted from 0, training steps ended; `made` gives sizes in order."""
    rounds, numbers, ends = StepCounter(), {name: number for number, name in enumerate(made)}, []
    for name, elements in made.items():
        rounds.add_optimizer(numbers[name], elements)
    for at, name in enumerate(steps):
        ends += [at] * rounds.step(numbers[name])
    return ends


@pytest.mark.parametrize(
    ("steps", "made", "ends"),
    [
        ("AAAA", {"A": 5}, [0, 1, 2, 3]),
        ("DGDGDG", {"D": 1, "G": 5}, [1, 3, 5]),
        ("DGDGDG", {"D": 5, "G": 1}, [1, 3, 5]),
        ("GDGDGD", {"D": 1, "G": 5}, [1, 3, 5]),
        ("DDDGDDDG", {"D": 1, "G": 5}, [3, 7]),
        ("ABCDABCD", {"A": 1, "B": 9, "C": 2, "D": 9}, [3, 7]),  # one optimizer per parameter, in backward
        ("AAADADAD", {"A": 9, "D": 1}, [1, 1, 2, 5, 7]),  # the first step waits for an optimizer that comes later
        ("A" * 10, {"A": 1, "unused": 9}, [7] * 8 + [8, 9]),
    ],
    ids=["one", "gan", "critic-is-larger", "critic-second", "wgan", "in-backward", "late", "one-never-steps"],
)
def test_a_training_step_is_a_round_of_its_optimizers(steps: str, made: dict[str, int], ends: list[int]) -> None:
    assert counted(steps, made) == ends


def test_a_nested_optimizer_step_is_not_counted() -> None:
    rounds = StepCounter()
    rounds.add_optimizer(0, 10)
    rounds.add_optimizer(1, 10)
    for _ in range(3):
        rounds.nested_step(1)
        assert rounds.step(0) == 1


def test_the_count_is_the_number_of_the_leaders_steps() -> None:
    ends = counted("AB" * 50 + "A" * 10 + "AB" * 20, {"A": 3, "B": 2})
    assert len(ends) == 80
