"""Record a training by the Hugging Face Trainer: a callback."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.framework_recorder import FrameworkRecorder, never_raises
from tracekit.capture.metrics import Number

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("the Trainer is not installed: pip install 'torch-tracekit[huggingface]'") from error


class TracekitCallback(TrainerCallback):  # type: ignore[misc]
    """Records what a `transformers.Trainer` trains, on each rank, into the run folder `out`.

    Takes the options of `tracekit.capture.Recorder`. Steps are numbered as the Trainer's `global_step`, from 0; a
    training that is resumed goes on counting. Loss and gradient norm are those that the Trainer logs, at the steps at
    which it logs; the learning rate is the step's own. Tokens are what the Trainer counts, if it is configured to
    (`include_num_input_tokens_seen`), else the size of `input_ids`, padding included, times the number of ranks.

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TracekitCallback("runs/today")])

    Evaluation counts in no step's time; a save counts in the step that follows. No failure here stops the training.
    """

    def __init__(self, out: str | os.PathLike[str], **options: Any) -> None:
        self.recorder = FrameworkRecorder(out, options)
        self._hooks: list[Any] = []
        self._tokens = 0  # of this rank, since the step began
        self._tokens_seen = 0  # by all ranks, as the Trainer counts, when the step began
        self._learning_rate: float | None = None
        self._logged: dict[str, float] = {}

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._remove_hooks()
        self._tokens, self._tokens_seen = 0, state.num_input_tokens_seen
        self.recorder.begin(state.global_step, lambda: _describe_run(args, model))
        # A compiled model gets no hooks: they would be compiled with it.
        if isinstance(model, torch.nn.Module) and not (args.torch_compile or hasattr(model, "_orig_mod")):
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                model.register_forward_hook(self._after_forward),
            ]
        self._enter_next_phase(control)

    @never_raises
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.enter_phase(conventions.DATA)

    @never_raises
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.enter_phase(None)

    on_substep_end = on_optimizer_step = on_step_begin

    @never_raises
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._learning_rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
        self.recorder.enter_phase(conventions.OPTIMIZER)

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        metrics: dict[str, Number] = {}
        if self._learning_rate is not None:
            metrics["learning_rate"] = self._learning_rate
        logged: dict[str, float] = {}
        self._logged = logged
        if control.should_log:  # it logs after this callback; the recorder reads the values a step later
            metrics[conventions.LOSS_METRIC] = lambda: logged.get("loss", math.nan)
            if args.max_grad_norm > 0:
                metrics[conventions.GRADIENT_NORM_METRIC] = lambda: logged.get("grad_norm", math.nan)
        counted = state.num_input_tokens_seen - self._tokens_seen
        tokens = counted if counted > 0 else self._tokens * args.world_size
        self._tokens, self._tokens_seen = 0, state.num_input_tokens_seen
        self.recorder.step(metrics, tokens=tokens or None, last=control.should_training_stop)
        self._enter_next_phase(control)

    @never_raises
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._enter_next_phase(control, epoch_over=True)

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        values = logs or {}
        self._logged.update({name: float(values[name]) for name in ("loss", "grad_norm") if name in values})

    @never_raises
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.enter_phase(None, previous=conventions.EVALUATION)
        self._enter_next_phase(control)

    @never_raises
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.recorder.enter_phase(None, previous=conventions.EVALUATION)

    @never_raises
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.enter_phase(None, previous=conventions.CHECKPOINT)
        self._enter_next_phase(control)

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._remove_hooks()
        self.recorder.end()

    def _enter_next_phase(self, control: Any, *, epoch_over: bool = False) -> None:
        """Enter the Trainer's next phase between two steps: it evaluates, then saves, then fetches batches.

        What later callbacks request is seen only when it has happened.
        """
        if control.should_evaluate:
            self.recorder.enter_phase(conventions.EVALUATION)
        elif control.should_save:
            self.recorder.enter_phase(conventions.CHECKPOINT)
        elif control.should_training_stop or control.should_epoch_stop or epoch_over:
            self.recorder.enter_phase(None)
        else:
            self.recorder.enter_phase(conventions.DATA)

    @never_raises
    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if model.training:
            words = kwargs.get("input_ids")
            self._tokens += words.numel() if isinstance(words, torch.Tensor) else 0
            self.recorder.enter_phase(conventions.FORWARD)

    @never_raises
    def _after_forward(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model.training:
            self.recorder.enter_phase(conventions.BACKWARD)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _describe_run(args: Any, model: Any) -> dict[str, Any]:
    strategy = _strategy()
    described: dict[str, Any] = {"name": type(model).__name__}
    if strategy in (None, "ddp"):  # under other strategies a rank has parts of the parameters, or none
        described["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return {"strategy": strategy, "model": described, "arguments": args.to_dict()}


def _strategy() -> str | None:
    state = AcceleratorState()
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    if kind == "FSDP":
        return f"fsdp{getattr(state.fsdp_plugin, 'fsdp_version', 1)}"
    if kind.startswith("MULTI_"):
        return "ddp"
    return None if kind == "NO" else kind.lower()
