"""Build a rank's part of the model, parallelized, and its optimizer.

The order: the layers are divided into stages, then their matrices (tensor parallelism); layers checkpoint their
activations by themselves; last comes the strategy of data parallelism, of each stage.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from instrumented_trainers import huggingface
from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.config.parallelism import model_problem
from instrumented_trainers.faults import Fault
from instrumented_trainers.initialization import WeightInitializer
from instrumented_trainers.model import Llama
from instrumented_trainers.optimization import optimizers
from instrumented_trainers.optimization.parameter_roles import ParameterRoles
from instrumented_trainers.parallelism import (
    SHARDS_ON_META,
    STAGE_STRATEGIES,
    STRATEGIES,
    CombinedOptimizer,
    ModelAxes,
    ShardOptions,
    accumulate,
    axis_mesh,
    data_mesh,
    materialize,
)
from instrumented_trainers.parallelism.combined_optimizer import parts_of
from instrumented_trainers.parallelism.pipeline import PipelineModel, PipelinePlan, StageShapes
from instrumented_trainers.parallelism.state import AnyOptimizer
from instrumented_trainers.sizes import model_config
from tracekit.conventions import strategies
from tracekit.conventions.strategies import PP

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def shard_options(config: TrainingConfig, active_faults: tuple[Fault, ...]) -> ShardOptions:
    """Options of how a training shards its model, its faults included."""
    lower = config.precision == "bf16"
    options = ShardOptions(
        param_dtype=torch.bfloat16 if lower else None,
        reduce_dtype=torch.float32 if lower else None,
        reshard_after_forward=config.reshard_to or not config.keep_gathered,
        prefetch=config.prefetch,
        offload=config.offload,
    )
    for fault in active_faults:
        options = fault.change_options(options)
    return options


def build(
    config: TrainingConfig,
    options: ShardOptions,
    mesh: DeviceMesh,
    active_faults: tuple[Fault, ...],
    axes: ModelAxes,
) -> tuple[nn.Module, AnyOptimizer]:
    """Return the rank's part of the model, and its optimizer. All ranks draw the same weights, then own numbers.

    Under fsdp2 and yafsdp no rank ever has all weights. Raises InvalidConfigError for what the model does not allow.
    """
    with torch.device("meta"):
        llama = Llama(model_config(config)).to(_DTYPES[config.precision])
    if reason := model_problem(config, llama.config):
        raise InvalidConfigError(reason)
    roles, initializer = ParameterRoles.of(llama), _initializer(config, llama)

    def parallelize_part(part: Llama) -> nn.Module:
        return _parallelize(axes.divide(part), config, options, mesh, initializer)

    try:
        if config.pp > 1:
            model, layers = _pipeline(llama, config, mesh, parallelize_part, active_faults, axes)
        else:
            layers = list(llama.layers)
            model = parallelize_part(llama)
    except NotImplementedError as error:
        raise InvalidConfigError(str(error)) from error
    for fault in active_faults:
        fault.prepare(_sharded_layers(model, layers), mesh.get_rank(), config.device)
    optimizer = _optimizer(config, model, roles)
    torch.manual_seed(_random_seed(config, mesh.get_rank()))
    return model, optimizer


def _parallelize(
    part: Llama, config: TrainingConfig, options: ShardOptions, mesh: DeviceMesh, initializer: WeightInitializer
) -> nn.Module:
    """Apply the parallelism inside a stage to a part of the model, or the whole, and draw its weights."""
    device = torch.device(config.device)
    if config.strategy not in SHARDS_ON_META:
        part.materialize(device, initializer)
    shard = STRATEGIES[config.strategy] if config.pp == 1 else STAGE_STRATEGIES[config.strategy]
    model = shard(part, data_mesh(mesh), options)
    if config.strategy in SHARDS_ON_META:
        materialize(model, initializer, device, options)
    return model


def _pipeline(
    llama: Llama,
    config: TrainingConfig,
    mesh: DeviceMesh,
    parallelized: Callable[[Llama], nn.Module],
    active_faults: tuple[Fault, ...],
    axes: ModelAxes,
) -> tuple[nn.Module, list[nn.Module]]:
    """Return this rank's stages, and their layers."""
    _refuse_unsplittable(llama, config)
    plan, stage_mesh = pipeline_plan(config), axis_mesh(mesh, PP)
    assert stage_mesh is not None
    last = plan.stages - 1
    cut = {
        number: llama.part(plan.layers_of(number), has_embedding=number == 0, has_head=number == last)
        for number in plan.stages_on(stage_mesh.get_local_rank())
    }
    layers = [layer for part in cut.values() for layer in part.layers]
    model = PipelineModel(
        plan,
        {number: parallelized(part) for number, part in cut.items()},
        stage_mesh,
        _shapes(config, llama),
        loss=lambda logits, targets: axes.next_token_loss(logits, targets) / config.micro_batches,
        accumulate=accumulate,
        around=lambda number: _around_action(active_faults, number, config.device),
    )
    return model, layers


def pipeline_plan(config: TrainingConfig) -> PipelinePlan:
    """Division of a configuration's model into stages."""
    layers = model_config(config).layers
    return PipelinePlan(config.schedule, config.pp, config.stages_per_rank, layers, config.micro_batches)


def _refuse_unsplittable(llama: Llama, config: TrainingConfig) -> None:
    try:
        from instrumented_trainers.parallelism.pipeline import schedules  # noqa: F401 needs a recent torch
    except ImportError as error:
        raise InvalidConfigError(f"--pp {config.pp}: torch {torch.__version__} is too old: {error}") from error
    layers, stages = len(llama.layers), config.pp * config.stages_per_rank
    if layers < stages:
        raise InvalidConfigError(
            f"--pp {config.pp}: {config.model_name} has {layers} layers, too few for {stages} stages"
        )
    if llama.config.tied:
        raise InvalidConfigError(
            f"--pp {config.pp}: the embedding of {config.model_name} is its head, too: the first stage and the last"
        )


def _shapes(config: TrainingConfig, llama: Llama) -> StageShapes:
    sizes, tokens = llama.config, (config.batch, config.tokens // config.cp)
    stream = config.batch, tokens[1] // (config.tp if config.sequence_parallel else 1), sizes.width
    vocabulary = sizes.vocabulary // (config.tp if config.loss_parallel else 1)
    # What autocast computes in lower precision is added to a stream in full precision; sharded weights are cast.
    lower = config.precision == "bf16" and config.strategy in SHARDS_ON_META
    dtype = torch.bfloat16 if lower else _DTYPES[config.precision]
    return StageShapes(tokens, stream, (*tokens, vocabulary), dtype)


@contextlib.contextmanager
def _around_action(active_faults: tuple[Fault, ...], stage: int, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        for fault in active_faults:
            entered.enter_context(fault.during_stage(stage, device))
        yield


def _optimizer(config: TrainingConfig, model: nn.Module, roles: ParameterRoles) -> AnyOptimizer:
    """Return the optimizer of the model; of a pipeline one for each of the rank's stages, stepped as one."""
    if not isinstance(model, PipelineModel):
        return optimizers.make(config, model, roles)
    per_stage = (optimizers.make(config, part, roles) for part in model.parts)
    return CombinedOptimizer(*(inner for optimizer in per_stage for inner in parts_of(optimizer)))


def _random_seed(config: TrainingConfig, rank: int) -> int:
    """Return the seed of a rank's random numbers.

    A tensor-parallel group has one, and drops the same values, unless each of its ranks has tokens of its own.
    """
    place = rank if config.sequence_parallel else rank // config.layout.tp
    return config.seed * 1_000_003 + place + 1


def model_axes(config: TrainingConfig, mesh: DeviceMesh) -> ModelAxes:
    """Return the axes that a configuration divides matrices, sequences and experts over. All ranks call it."""
    return ModelAxes(
        config.layout,
        mesh,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        shards_experts=strategies.STRATEGIES[config.strategy].shards_parameters,
        cp_method=config.cp_method,
    )


def _initializer(config: TrainingConfig, model: Llama) -> WeightInitializer:
    if config.init_from is None:
        return model.initializer(config.seed)
    return huggingface.PretrainedWeights(model, config.init_from)


def _sharded_layers(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return each layer as sharded: itself, or (FSDP1) its wrapper."""
    around = {id(child): module for module in model.modules() for child in module.children()}
    parents = [around[id(layer)] for layer in layers]
    return [
        outer if isinstance(outer, FullyShardedDataParallel) else layer
        for outer, layer in zip(parents, layers, strict=True)
    ]
