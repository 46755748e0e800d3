"""The harness itself: a failing or silent rank must fail its case, and only its case."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import process_group


def total(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()
    return "unreached"


def stay_silent() -> None:
    time.sleep(600)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, process_group.Outcome]:
    cases = {
        "before": functools.partial(total, 1.0),
        "failing": functools.partial(fail_on, 1),
        "after": functools.partial(total, 2.0),
    }
    return process_group.run_cases(2, cases, case_timeout_s=20)


def test_every_rank_runs_every_case(outcomes: dict[str, process_group.Outcome]) -> None:
    assert outcomes["before"].results() == [2.0, 2.0]


def test_a_case_that_fails_on_one_rank_fails_with_its_words(outcomes: dict[str, process_group.Outcome]) -> None:
    with pytest.raises(process_group.RankError, match="rank 1 says no"):
        outcomes["failing"].results()


def test_a_failed_case_does_not_spoil_the_next(outcomes: dict[str, process_group.Outcome]) -> None:
    assert outcomes["after"].results() == [4.0, 4.0]


def test_a_rank_that_gives_no_answer_in_time_has_failed() -> None:
    with pytest.raises(process_group.RankError, match="no answer within 2 s"):
        process_group.run(1, stay_silent, timeout_s=2)


def die_on(rank: int) -> float:
    if dist.get_rank() == rank:
        os.abort()
    return total(1.0)


def test_nobody_waits_for_a_rank_that_died_and_its_stack_is_shown() -> None:
    cases = {"dying": functools.partial(die_on, 0), "after": functools.partial(total, 1.0)}
    outcomes = process_group.run_cases(2, cases)  # 480 s if rank 1 waited for the next case's rank 0
    for case in outcomes.values():
        assert set(case.errors) == {0, 1}
    assert "exit code -6" in outcomes["dying"].errors[0]
    assert "in die_on" in outcomes["dying"].errors[0]
    assert "process 0 died" in outcomes["after"].errors[1]
