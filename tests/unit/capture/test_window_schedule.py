import random

import pytest

from tracekit.capture.window_schedule import Window, WindowSchedule, parse_steps


def profiled(windows: WindowSchedule, steps: int) -> dict[int, list[int]]:
    """Return the steps of each window by number, asking before each step as the recorder does."""
    found: dict[int, list[int]] = {}
    for step in range(steps):
        window = windows.upcoming(step)
        if window is not None and window.first <= step:
            found.setdefault(window.number, []).append(step)
    return found


def test_one_window_has_the_given_steps() -> None:
    assert profiled(WindowSchedule(10, 15), 100) == {0: [10, 11, 12, 13, 14]}
    assert profiled(WindowSchedule(0, 1), 100) == {0: [0]}


def test_windows_repeat_at_the_given_distance() -> None:
    assert profiled(WindowSchedule(2, 4, every=5), 14) == {0: [2, 3], 1: [7, 8], 2: [12, 13]}
    assert profiled(WindowSchedule(1, 3, every=2), 6) == {0: [1, 2], 1: [3, 4], 2: [5]}


def test_without_steps_only_requested_windows_are_recorded() -> None:
    windows = WindowSchedule(None)
    assert windows.upcoming(0) is None
    assert windows.request(7, 9)
    assert windows.request(3, 4)
    assert profiled(windows, 20) == {0: [3], 1: [7, 8]}


def test_a_requested_window_is_numbered_by_its_position() -> None:
    windows = WindowSchedule(10, 12, every=20)
    assert windows.request(20, 25)
    assert [windows.upcoming(step) for step in (0, 15, 25)] == [Window(0, 10, 12), Window(1, 20, 25), Window(2, 30, 32)]


@pytest.mark.parametrize("span", [(11, 13), (9, 11), (8, 20), (29, 31), (21, 22)])
def test_a_window_that_would_overlap_another_is_refused(span: tuple[int, int]) -> None:
    windows = WindowSchedule(10, 12, every=20)
    assert windows.request(20, 22) is True
    assert windows.request(*span) is False


def test_the_first_free_step_leaves_room_for_window_and_margin() -> None:
    assert WindowSchedule(10, 12).first_free_step(3, 5) == 3
    assert WindowSchedule(10, 12).first_free_step(8, 5) == 12
    assert WindowSchedule(10, 12).first_free_step(8, 5, margin=2) == 14
    assert WindowSchedule(10, 12, every=9).first_free_step(8, 5, margin=1) == 13
    with pytest.raises(ValueError, match="leave no room"):
        WindowSchedule(10, 12, every=9).first_free_step(8, 8)


def test_the_first_free_step_is_free_whatever_was_requested_before() -> None:
    dice = random.Random(20261122)
    for _ in range(200):
        every = dice.choice([None, dice.randint(12, 30)])
        windows = WindowSchedule(dice.randint(12, 20), 22, every=every)
        for _ in range(5):
            length, apart = dice.randint(1, 4), dice.randint(0, 2)
            wanted = dice.randint(0, 60)
            try:
                first = windows.first_free_step(wanted, length, margin=apart)
            except ValueError:
                continue
            assert first >= wanted
            assert windows.request(first, first + length)
        found = profiled(windows, 200)
        assert sorted(found) == list(range(len(found)))  # numbered in order, none twice
        steps = [step for number in sorted(found) for step in found[number]]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "5:5", "6:5", "-1:5", "a:b", "1:2:3", "1.5:2", "1:" + "9" * 20])
def test_an_invalid_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"END|FIRST"):
        parse_steps(text)
