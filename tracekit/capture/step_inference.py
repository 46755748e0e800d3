"""Training steps inferred from optimizer steps, where the script does not mark them."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_PATIENCE = 8  # steps of other optimizers after which one that never stepped is ignored


class StepCounter:
    """Counts the training steps of a script by the steps of its optimizers, each known by a number.

    With one optimizer each of its steps ends a training step. With several, the one with the most elements leads: a
    training step ends once those that followed it in the round before have followed it again (so Muon for the
    matrices, then AdamW for the rest, is one step); in the first round those are the others that were made. All ranks
    that run the same script count alike.

    >>> counter = StepCounter()
    >>> counter.add_optimizer(0, 90), counter.add_optimizer(1, 10)
    (None, None)
    >>> [counter.step(optimizer) for optimizer in (0, 1, 0, 1)]
    [0, 1, 0, 1]
    """

    def __init__(self) -> None:
        self._elements: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._first: int | None = None  # the first that ever stepped opens each round
        self._leader: int | None = None
        self._expected: list[int] = []
        self._followed: list[int] = []
        self._learning = False
        self._waiting = False

    def add_optimizer(self, optimizer: int, elements: int) -> None:
        """Add an optimizer whose parameters have this many elements."""
        self._elements[optimizer] = elements
        if self._leader is None or elements > self._elements[self._leader]:
            self._set_leader(optimizer)

    def nested_step(self, optimizer: int) -> None:
        """Record a step of an optimizer inside another's step; it does not count by itself."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def step(self, optimizer: int) -> int:
        """Record an optimizer's step and return how many training steps ended with it.

        That is 0 or 1; more only where earlier ends are recognized late.
        """
        if optimizer not in self._elements:
            self.add_optimizer(optimizer, 0)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._first = optimizer if self._first is None else self._first
        ended = self._replace_idle_leader()
        if optimizer == self._leader:
            ended += self._end()  # the optimizers it expected did not step
            unseen = [other for other in self._elements if other not in self._steps]
            self._expected = self._followed if self._steps[optimizer] > 1 else unseen
            self._followed = []
            self._learning = self._waiting = True
        elif optimizer == self._first:
            ended += self._end()
            self._learning = False
        elif self._learning:
            self._followed.append(optimizer)
        if self._waiting and sorted(self._followed) == sorted(self._expected):
            ended += self._end()
        return ended

    def _replace_idle_leader(self) -> int:
        """Replace a leader that never steps; return how many steps the new one has already ended."""
        assert self._leader is not None
        if self._leader in self._steps or sum(self._steps.values()) < _PATIENCE:
            return 0
        self._elements = {other: self._elements.get(other, 0) for other in self._steps}
        self._set_leader(max(self._elements, key=lambda other: self._elements[other]))
        return max(0, self._steps[self._leader] - 1)

    def _set_leader(self, optimizer: int) -> None:
        self._leader, self._expected, self._followed = optimizer, [], []

    def _end(self) -> int:
        ended, self._waiting = int(self._waiting), False
        return ended


class OptimizerSteps:
    """Calls `on_step` after each training step that optimizers make on the thread that called `watch`.

    `StepCounter` defines a step of several optimizers. Unlike the recorder of ``tracekit record`` it leaves no hook in
    torch after `remove`, and knows optimizers from their first step on only.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._step_counter = StepCounter()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stepping: list[Any] = []
        self._hooks: list[Any] = []
        self._thread = 0
        self.unseen = 0
        """Steps inside backward or on other threads, at which the profiler cannot advance."""

    def watch(self) -> None:
        """Add the hooks."""
        self._thread = threading.get_ident()
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: self._before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: self._after(optimizer)),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer) -> None:
        if self._is_elsewhere():
            return
        if optimizer in self._stepping:  # its last step raised
            del self._stepping[self._stepping.index(optimizer) :]
        self._stepping.append(optimizer)
        if optimizer not in self._numbers:
            elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
            self._step_counter.add_optimizer(self._number(optimizer), elements)

    def _after(self, optimizer: Optimizer) -> None:
        if self._is_elsewhere():
            self.unseen += 1
            return
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping:
            self._step_counter.nested_step(self._number(optimizer))
            return
        for _ in range(self._step_counter.step(self._number(optimizer))):
            self._on_step()

    def _is_elsewhere(self) -> bool:
        # Autograd saves the profiler's state of each thread, and restores it after backward.
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1

    def _number(self, optimizer: Optimizer) -> int:
        return self._numbers.setdefault(optimizer, len(self._numbers))
