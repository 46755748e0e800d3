"""Which kernels of several ranks an independent program takes for one collective."""

from types import SimpleNamespace

import pytest

from benchmarks.perturbation_events import Kernel, collective_instances


def rank(number, *kernels):
    """Rank with collectives of a group, given by its ranks, at a time."""
    return SimpleNamespace(number=number, kernels=[kernel(*values) for values in kernels])


def kernel(ranks, start, name="ncclAllReduce"):
    event = {"cat": "kernel", "name": name, "args": {"Process Group Ranks": ranks} if ranks else {}}
    return Kernel(event, start, start + 1.0, (0, 7), None)


def starts(ranks):
    return [{owner.number: kernel.start for owner, kernel in members} for members in collective_instances(ranks)]


def test_collectives_match_within_their_group():
    # rank 0  a b . c     a and c are of ranks 0 and 1, b of ranks 0 and 2
    # rank 1  a . . c
    # rank 2  . . b .
    first, second = "[0, 1]", "[0, 2]"
    ranks = [
        rank(0, (first, 0.0), (second, 1.0), (first, 3.0)),
        rank(1, (first, 0.0), (first, 3.0)),
        rank(2, (second, 2.0)),
    ]
    assert starts(ranks) == [{0: 0.0, 1: 0.0}, {0: 1.0, 2: 2.0}, {0: 3.0, 1: 3.0}]


def test_without_groups_all_are_of_one_and_match_from_the_last():
    ranks = [rank(0, ("", 0.0), ("", 2.0), ("", 4.0)), rank(1, ("", 2.5), ("", 4.5))]
    assert starts(ranks) == [{0: 2.0, 1: 2.5}, {0: 4.0, 1: 4.5}]


def test_different_collectives_at_one_place_are_refused():
    ranks = [rank(0, ("", 0.0, "ncclAllGather")), rank(1, ("", 0.0))]
    with pytest.raises(ValueError, match="differ"):
        collective_instances(ranks)
