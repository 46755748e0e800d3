"""The training loop, one for all strategies, and the recorder around it."""

import dataclasses
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from instrumented_trainers import faults
from instrumented_trainers.build import build, model_axes, pipeline_plan, shard_options
from instrumented_trainers.checkpoints import resume, storage
from instrumented_trainers.checkpoints.resume import ResumePoint
from instrumented_trainers.checkpoints.saver import CheckpointSaver
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.evaluation import Evaluation, EvaluationResult
from instrumented_trainers.experts import drop_ratio
from instrumented_trainers.faults import Fault
from instrumented_trainers.loss import upcast
from instrumented_trainers.memory import MemoryWatch
from instrumented_trainers.model import Llama
from instrumented_trainers.optimization.parameter_roles import ParameterRoles
from instrumented_trainers.optimization.schedules import learning_rate
from instrumented_trainers.parallelism import ModelAxes, PipelineModel, accumulate, clip_grad_norm
from instrumented_trainers.progress import Progress
from instrumented_trainers.sizes import model_config
from instrumented_trainers.text import loading
from instrumented_trainers.text.batches import Batches
from instrumented_trainers.text.stream import StreamedBatches
from instrumented_trainers.throughput import Throughput
from instrumented_trainers.trackers import Scalar, Trackers
from instrumented_trainers.traffic import repeated_bytes
from tracekit import conventions
from tracekit.capture import Recorder
from tracekit.capture.checksums import ModuleChecksums
from tracekit.capture.metrics import Number, Pending, PendingScalar
from tracekit.conventions.strategies import EP, STRATEGIES

_STOP_KEY = "after step"
_DROPPED_METRIC = "dropped_token_ratio"

# A rank that received the signal can be this many steps behind the others: on the CPU every collective waits for
# all ranks; on a GPU the host runs ahead of the device, but waits for the loss of the step before the last.
_LEAD_STEPS = {"cpu": 1, "cuda": 3}


class StopRequest:
    """Handles SIGTERM. Ranks receive it at different times, or only one does; all stop after the same step."""

    def __init__(self) -> None:
        self._received = False
        self._announced = False
        signal.signal(signal.SIGTERM, self._receive)

    def due(self, step: int, *, device: str) -> bool:
        """Return whether the training ends with this step, which the calling rank has just done."""
        store = dist.PrefixStore("stop", _get_default_store())
        if self._received and not self._announced:
            self._announced = True
            store.compare_set(_STOP_KEY, "", str(step + _LEAD_STEPS[device]))
        return store.check([_STOP_KEY]) and step >= int(store.get(_STOP_KEY))

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 the signature of a handler
        self._received = True


class _Lead:
    """Keeps the host at most two steps ahead of the device."""

    def __init__(self) -> None:
        self._losses: deque[PendingScalar] = deque()

    def limit(self, loss: PendingScalar) -> None:
        """Wait for the loss of the step before the last; `loss` is the last one's."""
        self._losses.append(loss)
        if len(self._losses) > 2:
            self._losses.popleft().value()


def train(config: TrainingConfig, mesh: DeviceMesh, command: list[str], stop: StopRequest) -> None:
    """Train on this rank of the mesh, recording into ``config.out``, until the last step or a `stop`."""
    rank = mesh.get_rank()
    origin = resume.resume_point(config)
    first_step = origin.seal.step if origin else 0
    if first_step >= config.steps:
        if rank == 0:
            sys.stdout.write(f"  nothing to do: {_nothing_to_do(origin, config)}\n")
        return
    active_faults = tuple(faults.parse(text) for text in config.fault)
    text = loading.load(config, rank, origin)
    batches, options, axes = text.batches, shard_options(config, active_faults), model_axes(config, mesh)
    evaluation = Evaluation.of(text.evaluation, config, rank, axes)
    model, optimizer = build(config, options, mesh, active_faults, axes)
    if origin:
        _restore(origin, config, model, optimizer, batches)
    checksums = ModuleChecksums(model) if config.checksums else None
    checkpoints = CheckpointSaver(config, active_faults, origin)
    watch = MemoryWatch(config, options, model, optimizer, first_step=first_step)
    throughput = Throughput.of(config)
    progress = Progress(throughput, rank=rank, steps=config.steps, log_every=config.log_every)
    trackers = Trackers(config, rank, first_step=first_step)
    lead = _Lead()
    _introduce(config, origin, progress)
    manifest = {**_manifest(config, mesh, active_faults, origin), "command": command}
    with _recorder(config, first_step, manifest) as recorder:
        for step in range(first_step, config.steps):
            _set_rate(optimizer, learning_rate(step, config))
            with watch.step(step):
                number, norm = _step(
                    step,
                    config,
                    model,
                    optimizer,
                    batches=batches,
                    recorder=recorder,
                    active_faults=active_faults,
                    axes=axes,
                )
            loss, dropped = PendingScalar(number), _drop_metrics(model)
            norms = {} if norm is None else {conventions.GRADIENT_NORM_METRIC: PendingScalar(norm)}
            sums = {} if checksums is None else checksums.of_step()
            stopped = stop.due(step, device=config.device)
            saved = None
            if stopped or _is_save_due(step, config):
                sequences = batches.taken_before((step + 1) * config.micro_batches)
                saved = checkpoints.save(
                    model, optimizer, step=step + 1, sequences=sequences, text=batches.state, recorder=recorder
                )
            evaluated = None if stopped else _evaluate(evaluation, step, model, recorder)
            last = stopped or step == config.steps - 1
            recorder.step(_metrics(loss, evaluated) | norms | dropped | sums, tokens=config.tokens_per_step, last=last)
            lead.limit(loss)
            assert recorder.step_time is not None
            progress.step(step, loss, elapsed=recorder.step_time)
            trackers.add(step, _scalars(step, loss, config, throughput.pending_scalars(recorder.step_time), evaluated))
            for line in _lines_after(step, evaluated, saved, blocking=checkpoints.blocking):
                progress.print(line)
            if stopped:
                progress.print(f"stopped by SIGTERM after {step + 1} steps; resume with --resume {saved}")
                break
        checkpoints.wait()
        if watch.report:
            recorder.describe({"memory": watch.report.as_manifest()})
    trackers.close()
    for line in watch.summary():
        progress.print(line)
    progress.flush()


def _recorder(config: TrainingConfig, first_step: int, manifest: dict[str, Any]) -> Recorder:
    """Return the recorder of this rank; it profiles after the steps that the configuration waits and warms up for."""
    first = config.profile_wait + config.profile_warmup
    return Recorder(
        config.out,
        device=config.device,
        first_step=first_step,
        steps=(first, first + config.profile_active),
        warmup=config.profile_warmup,
        memory=config.memory,
        stacks=config.stacks,
        modules=config.modules,
        device_metrics=config.device_metrics,
        manifest=manifest,
    )


def _is_save_due(step: int, config: TrainingConfig) -> bool:
    return config.checkpoint_every > 0 and (step + 1) % config.checkpoint_every == 0


def _evaluate(
    evaluation: Evaluation | None, step: int, model: nn.Module, recorder: Recorder
) -> EvaluationResult | None:
    """Evaluate the model if that is due after the step."""
    if evaluation is None or not evaluation.due(step):
        return None
    with recorder.evaluation():
        return evaluation.run(model)


def _drop_metrics(model: nn.Module) -> dict[str, Number]:
    """Return the share of choices of this rank's tokens that the step has dropped, where experts have a capacity."""
    ratio = drop_ratio(model)
    return {} if ratio is None else {_DROPPED_METRIC: PendingScalar(ratio)}


def _metrics(loss: PendingScalar, evaluated: EvaluationResult | None) -> dict[str, Number]:
    if evaluated is None:
        return {conventions.LOSS_METRIC: loss}
    return {conventions.LOSS_METRIC: loss, "eval_loss": evaluated.loss, "eval_perplexity": evaluated.perplexity}


def _scalars(
    step: int,
    loss: PendingScalar,
    config: TrainingConfig,
    speed: Mapping[str, Pending],
    evaluated: EvaluationResult | None,
) -> dict[str, Scalar]:
    """Values of a step for the trackers, the loss of this rank among them."""
    training = {"train/loss": loss, "train/learning_rate": learning_rate(step, config)}
    evaluation = {"eval/loss": evaluated.loss, "eval/perplexity": evaluated.perplexity} if evaluated else {}
    return {**training, **{f"speed/{name}": value for name, value in speed.items()}, **evaluation}


def _step(
    step: int,
    config: TrainingConfig,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    batches: Batches | StreamedBatches,
    recorder: Recorder,
    active_faults: tuple[Fault, ...],
    axes: ModelAxes,
) -> tuple[Tensor, Tensor | None]:
    """Do one optimizer step; return its loss on this rank, the mean over micro-batches, and the norm that it clips by.

    The norm of all gradients, before clipping, is the same on all ranks; None without clipping.
    """
    numbers = range(step * config.micro_batches, (step + 1) * config.micro_batches)
    micro_batches = (_batch(number, config, batches, recorder, active_faults, axes) for number in numbers)
    run = _run_pipeline if isinstance(model, PipelineModel) else _run_micro_batches
    loss: Tensor = run(model, micro_batches, config, recorder, axes)  # type: ignore[operator]
    norm = None
    if config.max_norm > 0:
        with recorder.span(conventions.CLIP):
            norm = clip_grad_norm(model, config.max_norm)
    with recorder.span(conventions.OPTIMIZER):
        optimizer.step()
        optimizer.zero_grad()
    for fault in active_faults:
        fault.end_step(config.device)
    return loss, norm


def _batch(
    number: int,
    config: TrainingConfig,
    batches: Batches | StreamedBatches,
    recorder: Recorder,
    active_faults: tuple[Fault, ...],
    axes: ModelAxes,
) -> tuple[Tensor, ...]:
    with recorder.span(conventions.DATA):
        for fault in active_faults:
            fault.delay_batch()
        rank_tokens = [axes.own_tokens(tokens) for tokens in batches.batch_at(number)]
        return _to(torch.device(config.device), *rank_tokens)


def _run_micro_batches(
    model: nn.Module,
    micro_batches: Iterator[tuple[Tensor, ...]],
    config: TrainingConfig,
    recorder: Recorder,
    axes: ModelAxes,
) -> Tensor:
    """Run forward and backward of one micro-batch after the other."""
    losses = []
    for index, (tokens, targets) in enumerate(micro_batches):
        with accumulate(model, last=index == config.micro_batches - 1):
            with recorder.span(conventions.FORWARD):
                logits = upcast(model(tokens))
                loss = axes.next_token_loss(logits, targets) / config.micro_batches
            with recorder.span(conventions.BACKWARD):
                loss.backward()
        losses.append(loss.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _run_pipeline(
    model: PipelineModel,
    micro_batches: Iterator[tuple[Tensor, ...]],
    config: TrainingConfig,  # noqa: ARG001 as the other way to run a step
    recorder: Recorder,  # noqa: ARG001 the schedule's actions have spans of their own
    axes: ModelAxes,  # noqa: ARG001 the schedule knows the loss
) -> Tensor:
    tokens, targets = zip(*micro_batches, strict=True)
    return model.step(torch.cat(tokens), torch.cat(targets))


def _restore(
    origin: ResumePoint,
    config: TrainingConfig,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches | StreamedBatches,
) -> None:
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    position = batches.state
    has_random_state = origin.seal.has_places_of(config)
    storage.load(
        origin.path, model, optimizer,
        has_random_state=has_random_state, text=position, run=config.out, step=origin.seal.step,
    )  # fmt: skip
    if isinstance(batches, StreamedBatches):
        batches.restore(position)
    for group, settings in zip(optimizer.param_groups, options, strict=True):
        group.update(settings)  # settings may have been overridden


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _to(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    if device.type == "cpu":
        return tensors
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)


def _manifest(
    config: TrainingConfig, mesh: DeviceMesh, active_faults: tuple[Fault, ...], origin: ResumePoint | None
) -> Mapping[str, Any]:
    sizes = model_config(config)
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()}
    expert_axis = (EP,) if config.ep > 1 else ()
    return {
        "strategy": config.strategy,
        "mesh": {"axes": list(mesh.mesh_dim_names or ()), "shape": list(mesh.mesh.shape)},
        "layout": dataclasses.asdict(config.layout),
        **({"pipeline": pipeline_plan(config).as_manifest(config.layout)} if config.pp > 1 else {}),
        "groups": {axis: config.layout.groups(axis) for axis in (*(mesh.mesh_dim_names or ()), *expert_axis)},
        "model": {"name": config.model_name, "parameters": sizes.parameters, **dataclasses.asdict(sizes)},
        "arguments": arguments,
        "faults": [faults.truth(fault) for fault in active_faults],
        "lineage": list(origin.lineage(config)) if origin else [],
    }


def introduction(config: TrainingConfig, origin: ResumePoint | None = None) -> str:
    """Return a line on what is trained, on how many ranks, and from which checkpoint."""
    parameters = model_config(config).parameters
    where = f"{config.world_size} {'GPUs' if config.device == 'cuda' else 'CPU processes'}"
    since = f" from step {origin.seal.step}, saved in {origin.path}" if origin else ""
    return (
        f"{config.strategy}: {config.model_name} ({parameters / 1e6:,.1f} M parameters) in {config.precision} "
        f"on {where}, {config.tokens_per_step:,} tokens a step{since}"
    )


def _introduce(config: TrainingConfig, origin: ResumePoint | None, progress: Progress) -> None:
    for line in (introduction(config, origin), _optimizer_line(config), *_warnings(config)):
        progress.print(line)


def _warnings(config: TrainingConfig) -> Iterator[str]:
    if config.pp > 1 and STRATEGIES[config.strategy].shards_parameters:
        repeated = repeated_bytes(config)
        yield (
            f"warning: in a pipeline {config.strategy} communicates for every micro-batch: a rank sends "
            f"{repeated / 1e6:,.1f} MB for each, {repeated * config.micro_batches / 1e6:,.1f} MB per step; zero1 sends "
            "gradients and weights once"
        )


def _optimizer_line(config: TrainingConfig) -> str:
    with torch.device("meta"):
        roles = ParameterRoles.of(Llama(model_config(config)))
    return f"{config.optimizer}, {config.lr_schedule}: {roles.describe(config.weight_decay)}"


def _lines_after(step: int, evaluated: EvaluationResult | None, saved: Path | None, *, blocking: bool) -> Iterator[str]:
    if evaluated:
        yield (
            f"evaluation after step {step}: loss {evaluated.loss:.4f}   perplexity {evaluated.perplexity:,.2f}   "
            f"on {evaluated.sequences:,} sequences"
        )
    if saved:
        yield f"saved {saved}" if blocking else f"saving {saved} in the background"


def _nothing_to_do(origin: ResumePoint | None, config: TrainingConfig) -> str:
    assert origin is not None
    return (
        f"{origin.path} was saved after step {origin.seal.step} of {config.steps}; to train on, --override steps=N, "
        f"N over {origin.seal.step}"
    )
