"""One rank of a verification: it trains, and compares each step with what one process recorded."""

import contextlib
import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer, YaFSDPModule
from instrumented_trainers.parallelism.yafsdp.optimizer_support import refuse_whole_tensor_optimizer
from instrumented_trainers.verification import recording, strategies, user_training
from instrumented_trainers.verification.case import (
    BUFFER,
    FP64,
    GRADIENT,
    INITIAL,
    LOSS,
    ONE_PROCESS,
    OUTPUT,
    WEIGHT,
    Case,
)
from instrumented_trainers.verification.difference import Tolerance, difference, is_scale, tolerance
from instrumented_trainers.verification.user_training import UnusableTrainingError, UserTraining

_MOST_DIFFERENCES = 100
_MOST_CHARACTERS = 600
_NOT_OF_THE_USER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen")


@dataclass
class Answer:
    """What a rank reports. `phase` is what it does, or did when it raised `error`."""

    phase: str = "building the training"
    error: str | None = None
    is_unusable: bool = False
    """The function returned no training: no fault of the strategy."""
    is_refused: bool = False
    """The strategy raised before it computed anything."""
    model: dict[str, Any] | None = None
    differences: list[dict[str, Any]] = field(default_factory=list)
    """The first ones above the tolerance, in the order of computation."""
    difference_count: int = 0
    compared_count: int = 0
    largest: float = 0.0
    """The largest difference of all that were compared."""
    notes: list[str] = field(default_factory=list)


def answer(case: Case, rank: int) -> Answer:
    """Train on this rank, whose process does nothing else, and report."""
    result = Answer()
    try:
        rendezvous = f"file://{case.folder}/rendezvous-{case.name}"
        timeout = timedelta(seconds=case.timeout_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.ranks, timeout=timeout)
        if case.strategy == ONE_PROCESS:
            _record_reference(case, result)
        else:
            _compare_steps(case, rank, result)
    except UnusableTrainingError as error:
        result.error, result.is_unusable = str(error), True
    except Exception as error:  # noqa: BLE001 -- the user's code, or a strategy that refuses it
        traceback.print_exc()
        result.error, result.is_refused = _one_line(error), result.phase in _BEFORE_TRAINING
    return result


_SHARDING, _OPTIMIZER, _FIRST_FORWARD = "sharding the model", "making the optimizer", "the first forward pass"
_BEFORE_TRAINING = (_SHARDING, _OPTIMIZER, _FIRST_FORWARD)


def _one_line(error: BaseException) -> str:
    """Class and words of an error, and the line of the user's code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "…"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_OF_THE_USER)
    ]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _build(case: Case, result: Answer) -> UserTraining:
    training = user_training.load(case.target, steps=case.steps)
    if user_training.switch_dropout_off(training.model) and case.strategy == ONE_PROCESS:
        result.notes.append("dropout is switched off: ranks draw other masks than one process")
    if case.precision == FP64:
        torch.set_default_dtype(torch.float64)
        training.model.double()
        training = replace(training, batches=[user_training.in_fp64(batch) for batch in training.batches])
    return training


# One process ----------------------------------------------------------------------------------------------------------


def _record_reference(case: Case, result: Answer) -> None:
    training = _build(case, result)
    result.model = _description(training.model)
    parameters, batches = recording.parameters(training.model), training.batches
    for batch in batches:
        user_training.part_of(batch, 0, case.parts)
    _refuse_random_loss(training)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    buffers = recording.buffers(training.model)
    state = {"weights": weights, "buffers": buffers, "batches": batches, "tied": recording.tied_names(training.model)}
    torch.save(state, case.reference(-1))
    result.phase = _OPTIMIZER
    optimizer = training.optimizer(training.model)
    result.model["optimizer"] = type(optimizer).__name__
    outputs = recording.Outputs(training.model)
    coarsest = recording.CoarsestDtype(_coarsest_parameter(training.model))
    for step, batch in enumerate(batches):
        result.phase = f"step {step + 1}"
        optimizer.zero_grad()
        with outputs.recording() as values, coarsest if step == 0 else contextlib.nullcontext():
            loss = training.loss(training.model, batch)
        _check_loss(loss)
        _refuse_infinite_loss(loss, step)
        loss.backward()
        gradients = {name: recording.gradient(parameter) for name, parameter in parameters.items()}
        optimizer.step()
        record = {
            "dtype": coarsest.dtype,
            OUTPUT: values,
            LOSS: {"": loss.detach()},
            GRADIENT: gradients,
            WEIGHT: {name: parameter.detach() for name, parameter in parameters.items()},
            BUFFER: recording.buffers(training.model),
        }
        torch.save(record, case.reference(step))
    result.model["dtype"] = str(coarsest.dtype).removeprefix("torch.")


def _description(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    names = {id(parameter): name for name, parameter in recording.parameters(model).items()}
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "frozen": [names[id(parameter)] for parameter in parameters if not parameter.requires_grad],
        "tied": recording.tied_names(model),
        "buffers": list(recording.buffers(model)),
    }


def _coarsest_parameter(model: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def _refuse_random_loss(training: UserTraining) -> None:
    """Raise UnusableTrainingError if the same weights and batch give two losses. Buffers are as before afterwards."""
    buffers = {name: buffer.clone() for name, buffer in recording.buffers(training.model).items()}
    losses = []
    for _ in range(2):
        losses.append(training.loss(training.model, training.batches[0]))
        _check_loss(losses[-1])
        for name, buffer in recording.buffers(training.model).items():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
    if not torch.equal(*losses) and bool(torch.stack(losses).isfinite().all()):
        first, second = (float(loss) for loss in losses)
        raise UnusableTrainingError(
            f"the same weights and batch gave the losses {first:.9g} and {second:.9g}: the model draws random numbers "
            "or changes in forward; ranks draw others than one process, so switch that off (functional.dropout, noise)"
        )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shape = f" of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UnusableTrainingError(f"loss returned {type(loss).__name__}{shape}; return the mean loss of the batch")


def _refuse_infinite_loss(loss: Tensor, step: int) -> None:
    """Raise UnusableTrainingError for a loss after which all values are alike, whatever the ranks compute: NaN."""
    if not bool(loss.isfinite()):
        raise UnusableTrainingError(
            f"the loss of step {step + 1} is {float(loss):g} in one process, so nothing can be compared; return a "
            "training whose losses are finite"
        )


# Ranks ----------------------------------------------------------------------------------------------------------------


def _compare_steps(case: Case, rank: int, result: Answer) -> None:
    training = _build(case, result)
    start = torch.load(case.reference(-1), weights_only=True)
    comparison = _Comparison(case, rank, result, model=training.model, tied=start["tied"])
    comparison.compare(INITIAL, recording.parameters(training.model), start["weights"], -1, torch.float64)
    outputs = recording.Outputs(training.model)
    result.phase = _SHARDING
    model = strategies.shard(training, case.strategy)
    comparison.note_split_weights(model)
    result.phase = _OPTIMIZER
    optimizer = _optimizer(training, model, result)
    for step, batch in enumerate(start["batches"]):
        result.phase = f"step {step + 1}" if step else _FIRST_FORWARD
        reference = torch.load(case.reference(step), weights_only=True)
        optimizer.zero_grad()
        with outputs.recording() as values:
            loss = training.loss(model, user_training.part_of(batch, rank, case.parts))
        result.phase = f"step {step + 1}"
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        comparison.note_order(values)
        dtype = reference["dtype"]
        comparison.compare(OUTPUT, values, reference[OUTPUT], step, dtype)
        comparison.compare(LOSS, {"": mean / case.ranks}, reference[LOSS], step, dtype)
        parameters = recording.parameters(model)
        gradients = {name: recording.gradient(parameter) for name, parameter in parameters.items()}
        comparison.compare(GRADIENT, gradients, reference[GRADIENT], step, dtype)
        optimizer.step()
        weights = {name: recording.whole(parameter) for name, parameter in parameters.items()}
        comparison.compare(WEIGHT, weights, reference[WEIGHT], step, dtype)
        comparison.compare(BUFFER, recording.buffers(model), reference[BUFFER], step, dtype)
    result.phase = "done"


def _optimizer(training: UserTraining, model: nn.Module, result: Answer) -> Optimizer:
    """The user's optimizer; of shards of YaFSDP, one that needs whole tensors is given them."""
    inner = recording.inner_model(model)
    optimizer = training.optimizer(inner)
    if not isinstance(inner, YaFSDPModule) or isinstance(optimizer, WholeTensorOptimizer):
        return optimizer
    try:
        refuse_whole_tensor_optimizer(optimizer)
    except NotImplementedError:
        kind = type(optimizer)
        accepted = inspect.signature(kind.__init__).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        result.notes.append(
            f"{kind.__name__} needs whole tensors: verified as WholeTensorOptimizer(…, {kind.__name__})"
        )
        groups = [
            {name: value for name, value in group.items() if name == "params" or name in options}
            for group in optimizer.param_groups
        ]
        return WholeTensorOptimizer(groups, kind, **options)
    return optimizer


class _Comparison:
    """Compares what a rank computed with what one process did, and keeps what differs in the rank's answer."""

    def __init__(self, case: Case, rank: int, result: Answer, *, model: nn.Module, tied: list[list[str]]) -> None:
        self._case, self._rank, self._result, self._tied = case, rank, result, tied
        self._classes = {recording.plain_name(name): type(module).__name__ for name, module in model.named_modules()}
        self._order: dict[str, int] = {}

    def note_split_weights(self, model: nn.Module) -> None:
        """Note which tied weights are no longer one parameter."""
        named = recording.parameters(model)
        for names in self._tied:
            if len({id(named[name]) for name in names if name in named}) > 1:
                self._result.notes.append(
                    f"tied weights are separate parameters under this strategy: {', '.join(names)}"
                )

    def note_order(self, outputs: Mapping[str, Tensor]) -> None:
        """Note in which order modules ran: their gradients are computed in the other one."""
        self._order = {name.partition("#")[0]: number for number, name in enumerate(outputs)}

    def compare(
        self,
        quantity: str,
        values: Mapping[str, Tensor],
        references: Mapping[str, Tensor],
        step: int,
        dtype: torch.dtype,
    ) -> None:
        """Compare values by name, in the order in which they were computed."""
        allowed = tolerance(dtype, max(step, 0))
        largest_reference = max((_largest(reference) for reference in references.values()), default=0.0)
        for name, value in self._in_order(quantity, values):
            reference = references.get(name)
            if reference is None:
                continue
            if quantity == OUTPUT and (reference := self._own_part(value, reference)) is None:
                continue
            self._compare_one(quantity, name, value, reference, step, allowed, allowed.floor_ratio * largest_reference)

    def _compare_one(
        self,
        quantity: str,
        name: str,
        value: Tensor,
        reference: Tensor,
        step: int,
        allowed: Tolerance,
        least_scale: float,
    ) -> None:
        result, compared = self._result, difference(value, reference, least_scale=least_scale)
        result.compared_count += 1
        if compared.relative <= allowed.relative:
            result.largest = max(result.largest, compared.relative)
            return
        result.difference_count += 1
        if len(result.differences) >= _MOST_DIFFERENCES:
            return
        scale = is_scale(compared.ratio, elements=value.numel(), ranks=self._case.ranks)
        result.differences.append(
            {
                "step": step + 1,
                "quantity": quantity,
                "name": name,
                "rank": self._rank,
                "relative": compared.relative if math.isfinite(compared.relative) else None,
                "ratio": compared.ratio if scale else None,
                "tolerance": allowed.relative,
                "module": self._classes.get(name.partition("#")[0] if quantity == OUTPUT else name.rpartition(".")[0]),
            }
        )

    def _in_order(self, quantity: str, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if quantity != GRADIENT:
            yield from values.items()
            return
        yield from sorted(values.items(), key=lambda item: -self._order.get(item[0].rpartition(".")[0], -1))

    def _own_part(self, value: Tensor, reference: Tensor) -> Tensor | None:
        """This rank's samples of an output of one process; None if its first dim does not hold samples."""
        if value.shape == reference.shape:
            return reference
        ranks = self._case.ranks
        if value.dim() and (value.shape[0] * ranks, *value.shape[1:]) == tuple(reference.shape):
            return reference.chunk(ranks)[self._rank]
        return None


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
