"""Record a training by Lightning's Trainer: a callback."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.framework_recorder import FrameworkRecorder, never_raises
from tracekit.capture.metrics import Number
from tracekit.conventions.strategies import ALIASES

_FETCHING = "train_dataloader_next"  # Lightning's name for it in its own profiler
_SINGLE_DEVICE = "SingleDeviceStrategy"


def _callback_class() -> Any:
    """Return Lightning's Callback. Two independent packages have it: the one that the script imported is used."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(packages, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise ImportError("Lightning is not installed: pip install 'torch-tracekit[lightning]'")


_Callback = _callback_class()


class TracekitCallback(_Callback):  # type: ignore[misc,valid-type]
    """Records what a Lightning `Trainer` fits, on each rank, into the run folder `out`.

    Takes the options of `tracekit.capture.Recorder`. A step ends with the batch after which the Trainer's
    `global_step` has moved. Steps are numbered as `global_step`, from 0, and a training that is resumed goes on
    counting; in manual optimization, where Lightning counts each optimizer's steps, all that fall to one batch are
    one, and a resumed training goes on at `global_step` divided by the number of optimizers. The loss is what
    `training_step` returns, of this rank; of accumulated batches their mean. `tokens` returns the tokens in a batch, by
    default the size of its ``input_ids``.

        trainer = Trainer(callbacks=[TracekitCallback("runs/today")])

    Validation counts in no step's time; a save counts in the step that follows. No failure here stops the training.
    """

    def __init__(
        self, out: str | os.PathLike[str], *, tokens: Callable[[Any], int | None] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.recorder = FrameworkRecorder(out, options)
        self._tokens_in = tokens or _tokens_in
        self._undo: list[Callable[[], None]] = []
        self._steps_seen = 0  # by the Trainer's count
        self._default_phase: str | None = None  # what a training step does when neither backward nor an optimizer runs
        self._tokens: int | None = None  # this and the next two since the step began
        self._loss: torch.Tensor | None = None
        self._learning_rate: float | None = None

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._stop_watching()
        self._steps_seen = trainer.global_step
        automatic = pl_module.automatic_optimization
        self._default_phase = None if automatic else conventions.FORWARD
        self._begin_step()
        optimizers = 1 if automatic else max(1, len(trainer.optimizers))
        self.recorder.begin(trainer.global_step // optimizers, lambda: _describe_run(trainer, pl_module))
        self._watch_fetching(trainer.profiler)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._undo.append(optimizer.register_step_post_hook(self._after_optimizer_step).remove)

    @never_raises
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        tokens = self._tokens_in(batch)
        self._tokens = tokens if self._tokens is None or tokens is None else self._tokens + tokens
        self.recorder.enter_phase(conventions.FORWARD)

    @never_raises
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.recorder.enter_phase(conventions.BACKWARD)

    @never_raises
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.enter_phase(self._default_phase)

    @never_raises
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._learning_rate is None:
            self._learning_rate = float(optimizer.param_groups[0]["lr"])
        self.recorder.enter_phase(conventions.OPTIMIZER)

    @never_raises
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.enter_phase(None)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            # In automatic optimization each is divided by the number of batches that it is accumulated over.
            adds = self._loss is not None and pl_module.automatic_optimization
            self._loss = self._loss + loss.detach() if adds else loss.detach()
        if trainer.global_step == self._steps_seen:
            return
        self._steps_seen = trainer.global_step
        metrics: dict[str, Number] = {}
        if self._loss is not None:
            metrics[conventions.LOSS_METRIC] = self._loss.item
        if self._learning_rate is not None:
            metrics["learning_rate"] = self._learning_rate
        tokens = self._tokens * trainer.world_size if self._tokens is not None else None
        self._begin_step()
        self.recorder.step(metrics, tokens=tokens, last=_is_last(trainer))

    @never_raises
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.enter_phase(conventions.EVALUATION)

    @never_raises
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.enter_phase(None)

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _begin_step(self) -> None:
        self._tokens = self._loss = self._learning_rate = None

    def _end(self) -> None:
        self._stop_watching()
        self.recorder.end()

    @never_raises
    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.recorder.enter_phase(self._default_phase)

    def _watch_fetching(self, profiler: Any) -> None:
        """Detect the wait for a batch through Lightning's calls of its own profiler."""
        start, stop = profiler.start, profiler.stop

        def starts(action: str) -> None:
            start(action)
            if action.endswith(_FETCHING):
                self._enter_phase(conventions.DATA)

        def stops(action: str) -> None:
            if action.endswith(_FETCHING):
                self._enter_phase(None)
            stop(action)

        profiler.start, profiler.stop = starts, stops
        self._undo.append(lambda: _restore_methods(profiler, start=starts, stop=stops))

    @never_raises
    def _enter_phase(self, phase: str | None) -> None:
        self.recorder.enter_phase(phase)

    def _stop_watching(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore_methods(owner: Any, **ours: Any) -> None:
    """Restore an object's own methods, unless they were replaced again since."""
    for name, method in ours.items():
        if vars(owner).get(name) is method:
            delattr(owner, name)


def _is_last(trainer: Any) -> bool:
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    last_epoch = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return bool(last_epoch and trainer.is_last_batch)


def _tokens_in(batch: Any) -> int | None:
    words = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return words.numel() if isinstance(words, torch.Tensor) else None


def _describe_run(trainer: Any, module: Any) -> dict[str, Any]:
    name = type(trainer.strategy).__name__
    known_name = ALIASES[name].name if name in ALIASES else name
    strategy = None if name == _SINGLE_DEVICE else known_name
    model: dict[str, Any] = {"name": type(module).__name__}
    if strategy in (None, "ddp"):  # under other strategies a rank has parts of the parameters
        model["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    plain = (str, int, float, bool, type(None))
    arguments = {key: value for key, value in dict(module.hparams).items() if isinstance(value, plain)}
    return {
        "strategy": strategy,
        "model": model,
        "arguments": {
            **arguments,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
        },
    }
