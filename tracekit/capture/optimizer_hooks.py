"""Training steps detected through torch's optimizer hooks, from `watch` to `remove`."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tracekit.capture.step_inference import StepCounter


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
