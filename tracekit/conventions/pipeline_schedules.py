"""Pipeline schedules: the order in which a rank runs the actions of its stages.

Sources: GPipe: arXiv 1811.06965. 1F1B and interleaved 1F1B: 2104.04473, section 2.2 (and Megatron-LM's order of
micro-batches). ZB-H1: 2401.10241, section 3.1.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1 = "gpipe", "1f1b", "interleaved", "zb-h1"
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One pass of a stage over a micro-batch; `kind` is F, B (whole backward), I (input gradient) or W (weight's)."""

    stage: int
    kind: str
    micro_batch: int

    @property
    def name(self) -> str:
        """Return the span's name, as torch.distributed.pipelining writes it.

        >>> Action(1, "F", 3).name
        'PP:1F3'
        """
        return f"PP:{self.stage}{self.kind}{self.micro_batch}"


class Shape(NamedTuple):
    """The size of a pipeline: ranks along pp, stages per rank, micro-batches per step."""

    ranks: int
    virtual_stages: int
    micro_batches: int


def order(schedule: str, shape: Shape, rank: int) -> list[Action]:
    """Return the actions that the rank at place `rank` of the pp axis runs in a step.

    >>> " ".join(action.name[3:] for action in order("1f1b", Shape(2, 1, 3), 0))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    return _ORDERS[schedule](shape, rank)


def _gpipe(shape: Shape, rank: int) -> list[Action]:
    passes = range(shape.micro_batches)
    return [Action(rank, FORWARD, each) for each in passes] + [Action(rank, BACKWARD, each) for each in passes]


def _one_f_one_b(shape: Shape, rank: int) -> list[Action]:
    forwards, backwards = ([Action(rank, kind, each) for each in range(shape.micro_batches)] for kind in "FB")
    return _alternate(forwards, backwards, min(shape.ranks - 1 - rank, shape.micro_batches))


def _interleaved(shape: Shape, rank: int) -> list[Action]:
    ranks, stages, _ = shape
    total = stages * shape.micro_batches
    forwards, backwards = [], []
    for index in range(total):
        block, place = divmod(index, ranks * stages)
        chunk, micro_batch = place // ranks, block * ranks + place % ranks
        forwards.append(Action(chunk * ranks + rank, FORWARD, micro_batch))
        backwards.append(Action((stages - 1 - chunk) * ranks + rank, BACKWARD, micro_batch))
    return _alternate(forwards, backwards, min(2 * (ranks - rank - 1) + (stages - 1) * ranks, total))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return so many forward passes, then one forward and one backward pass in turns, then the rest."""
    steady = [each for pair in zip(forwards[warm_up:], backwards, strict=False) for each in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _zb_h1(shape: Shape, rank: int) -> list[Action]:
    """Return 1F1B with its backward passes split: a rank postpones as many weight gradients as ranks are before it.

    So gradients reach the ranks before it earlier, and its weight gradients fill the time in which it would wait.
    """
    found: list[Action] = []
    weights = 0
    for action in _one_f_one_b(shape, rank):
        found.append(action if action.kind == FORWARD else action._replace(kind=INPUT_GRADIENT))
        if action.kind == BACKWARD and action.micro_batch >= rank:
            found.append(Action(rank, WEIGHT_GRADIENT, weights))
            weights += 1
    return found + [Action(rank, WEIGHT_GRADIENT, each) for each in range(weights, shape.micro_batches)]


_ORDERS: Mapping[str, Callable[[Shape, int], list[Action]]] = {
    GPIPE: _gpipe,
    ONE_F_ONE_B: _one_f_one_b,
    INTERLEAVED: _interleaved,
    ZB_H1: _zb_h1,
}
SCHEDULES = tuple(_ORDERS)
