"""The schedule of a pipeline as a graph: what each action waits for, and when it would run on links without cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.analysis.parallelism.pipeline_actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

Floats: TypeAlias = npt.NDArray[np.float64]
Action: TypeAlias = tuple[int, int, int, str]
"""Place of the rank in the pipeline, stage, micro-batch, action (of pipeline_actions.COMPUTE_ACTIONS)."""
_GRADIENTS = (BACKWARD, INPUT_GRADIENT)


@dataclass(frozen=True)
class ScheduleGraph:
    """Actions in an order in which each follows what it waits for: `order`, and `waits_for` of each action."""

    order: tuple[int, ...]
    waits_for: tuple[tuple[int, ...], ...]
    sender: tuple[int | None, ...]
    """The action of another rank that each action gets its input from; None for those without."""


@lru_cache(maxsize=64)
def graph(actions: tuple[Action, ...]) -> ScheduleGraph | None:
    """Return the graph of actions, given in the order in which each rank runs its own.

    An action follows the one before it on its rank. A forward needs that of the stage before, a backward (or input
    gradient) that of the next stage and its own forward, a weight gradient its input gradient. None where actions wait
    for each other in a circle: the order is none of a schedule.
    """
    index_of = {action[1:]: index for index, action in enumerate(actions)}
    last_of: dict[int, int] = {}
    waits_for, sender = [], []
    for index, action in enumerate(actions):
        needed = [index_of[key] for key in producers(*action[1:]) if key in index_of]
        sender.append(next((other for other in needed if actions[other][0] != action[0]), None))
        waits_for.append(tuple({*needed, *([last_of[action[0]]] if action[0] in last_of else [])}))
        last_of[action[0]] = index
    order = _topological(waits_for)
    return None if order is None else ScheduleGraph(order, tuple(waits_for), tuple(sender))


def producers(stage: int, micro_batch: int, action: str) -> list[tuple[int, int, str]]:
    """Return the actions (stage, micro-batch, action) whose result an action may need.

    >>> producers(1, 0, "forward")
    [(0, 0, 'forward')]
    """
    if action == FORWARD:
        return [(stage - 1, micro_batch, FORWARD)]
    if action == WEIGHT_GRADIENT:
        return [(stage, micro_batch, INPUT_GRADIENT)]
    return [(stage, micro_batch, FORWARD), *((stage + 1, micro_batch, gradient) for gradient in _GRADIENTS)]


def end_times(schedule: ScheduleGraph, durations: Floats, delays: Floats | None = None) -> Floats:
    """End of each action if it starts as soon as it can, from 0; shape (actions, cases) like `durations`.

    `delays` has the same shape: how long after the end of its sender the input of an action arrives; by default 0.
    """
    ends = np.zeros_like(durations)
    for action in schedule.order:
        needed, sender = schedule.waits_for[action], schedule.sender[action]
        start = ends[list(needed)].max(axis=0) if needed else np.zeros(durations.shape[1:])
        if delays is not None and sender is not None:
            start = np.maximum(start, ends[sender] + delays[action])
        ends[action] = start + durations[action]
    return ends


def _topological(waits_for: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    remaining = [len(needed) for needed in waits_for]
    followers: list[list[int]] = [[] for _ in waits_for]
    for index, needed in enumerate(waits_for):
        for other in needed:
            followers[other].append(index)
    ready = [index for index, count in enumerate(remaining) if not count]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for follower in followers[index]:
            remaining[follower] -= 1
            if not remaining[follower]:
                ready.append(follower)
    return tuple(order) if len(order) == len(waits_for) else None
