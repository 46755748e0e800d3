"""Why a run cannot be parallelized as configured."""

import dataclasses

from instrumented_trainers.config.settings import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_FORWARD_ONE_BACKWARD,
    RING,
    ZB_H1,
    ZBV,
    TrainingConfig,
)
from instrumented_trainers.model_config import PRESETS, ModelConfig
from tracekit.conventions import strategies

_SPLIT_BACKWARD = (ZB_H1, ZBV, DUALPIPEV)
_TWO_STAGES = (ZBV, DUALPIPEV)


def layout_problem(config: TrainingConfig) -> str | None:
    """Return why the layout of the ranks is impossible, or None."""
    if config.sequence_parallel and config.tp == 1:
        return "--sequence-parallel: needs --tp 2 or more"
    if config.loss_parallel and config.tp == 1:
        return "--loss-parallel: needs --tp 2 or more"
    if config.cp_method == RING and config.cp == 1:
        return "--cp-method ring: needs --cp 2 or more"
    ranks = config.pp * config.cp * config.tp
    if config.world_size % ranks:
        return f"--world-size {config.world_size}: not divisible by pp × cp × tp = {ranks}"
    if config.replicate > 1 and not strategies.STRATEGIES[config.strategy].shards_parameters:
        return (
            f"--replicate {config.replicate}: {config.strategy} replicates over all ranks; only fsdp* and yafsdp shard"
        )
    data_ranks = config.world_size // ranks
    if data_ranks % config.replicate:
        return f"--replicate {config.replicate}: does not divide the {data_ranks} ranks"
    shards = data_ranks // config.replicate * config.cp
    if shards % config.ep:
        return f"--ep {config.ep}: does not divide the {shards} ranks that share a model"
    if config.pp <= 1:
        return _model_axes_problem(config) or _unused_pipeline_option(config)
    problems = (_model_axes_problem, _stages_problem, _micro_batches_problem, _strategy_problem)
    return next(filter(None, (problem(config) for problem in problems)), None)


def _model_axes_problem(config: TrainingConfig) -> str | None:
    """Return why matrices, sequences or experts cannot be divided over ranks, or None."""
    for option, size in (("tp", config.tp), ("cp", config.cp), ("ep", config.ep)):
        if size > 1 and config.strategy == "fsdp1":
            return f"--{option}: not with fsdp1, which flattens what is divided over several axes; use fsdp2"
    if config.ep > 1 and config.strategy == "yafsdp":
        return "--ep: not with yafsdp, whose units have one mesh, and experts need another; use ddp, zero1 or fsdp2"
    if config.optimizer == "muon" and (config.tp > 1 or config.ep > 1):
        return "--optimizer muon: needs whole matrices; not with --tp or --ep"
    if config.init_from is not None:
        return None
    experts = {} if config.experts is None else {"experts": config.experts, "active_experts": 1}
    return model_problem(config, dataclasses.replace(PRESETS[config.model], **experts))


def model_problem(config: TrainingConfig, sizes: ModelConfig) -> str | None:
    """Return why a model of these sizes cannot be divided over the configuration's ranks, or None."""
    return _tensor_problem(config, sizes) or _context_problem(config) or _expert_problem(config, sizes)


def _tensor_problem(config: TrainingConfig, sizes: ModelConfig) -> str | None:
    ranks, tokens = config.tp, config.tokens // config.cp
    if sizes.key_value_heads % ranks:
        return (
            f"--tp {ranks}: cannot divide {sizes.key_value_heads} key and value heads; each rank needs whole ones, and "
            "several ranks with the same one are not supported"
        )
    for size, name in ((sizes.heads, "heads"), (sizes.hidden_width, "hidden units"), (sizes.vocabulary, "tokens")):
        if size % ranks:
            return f"--tp {ranks}: cannot divide the {size} {name} of {config.model_name}"
    if config.sequence_parallel and tokens % ranks:
        return f"--sequence-parallel: --tp {ranks} does not divide the {tokens} tokens that a rank has of a sequence"
    return None


def _context_problem(config: TrainingConfig) -> str | None:
    if config.cp > 1 and config.tokens % (2 * config.cp):
        return f"--cp {config.cp}: cannot divide --tokens {config.tokens} into {2 * config.cp} chunks, two a rank"
    return None


def _expert_problem(config: TrainingConfig, sizes: ModelConfig) -> str | None:
    if config.ep > 1 and not sizes.experts:
        return f"--ep {config.ep}: {config.model_name} has no experts; add --experts N"
    if sizes.experts % config.ep:
        return f"--ep {config.ep}: cannot divide {sizes.experts} experts"
    return None


def _unused_pipeline_option(config: TrainingConfig) -> str | None:
    if config.schedule != ONE_FORWARD_ONE_BACKWARD:
        return f"--schedule {config.schedule}: there is no pipeline; add --pp 2 or more"
    if config.virtual_stages is not None:
        return "--virtual-stages: there is no pipeline; add --pp 2 or more"
    return None


def _stages_problem(config: TrainingConfig) -> str | None:
    count = config.stages_per_rank
    if config.schedule in _TWO_STAGES and count != 2:
        return f"--virtual-stages {count}: {config.schedule} has 2 stages on each rank"
    if config.schedule in (ONE_FORWARD_ONE_BACKWARD, GPIPE, ZB_H1) and count != 1:
        return f"--virtual-stages {count}: {config.schedule} has 1 stage on each rank; --schedule interleaved has more"
    if config.init_from is not None:
        return None
    preset = PRESETS[config.model]
    if preset.layers < config.pp * count:
        return f"--pp {config.pp}: {config.model} has {preset.layers} layers, too few for {config.pp * count} stages"
    if preset.tied:
        return f"--pp {config.pp}: the embedding of {config.model} is its head, too: the first stage and the last"
    return None


def _micro_batches_problem(config: TrainingConfig) -> str | None:
    """Return why the schedule cannot run so many micro-batches: torch's schedules need them in whole rounds."""
    number, rounds = config.micro_batches, max(1, config.micro_batches // config.pp)
    if config.schedule in (INTERLEAVED, ZB_H1) and number % rounds:
        return f"--micro-batches {number}: {config.schedule} needs a multiple of --pp {config.pp}, or fewer than twice"
    if config.schedule == ZBV and number < 2 * config.pp - 1:
        return f"--micro-batches {number}: zbv on {config.pp} ranks needs {2 * config.pp - 1} or more"
    if config.schedule == DUALPIPEV and number < 2 * config.pp:
        return f"--micro-batches {number}: dualpipev on {config.pp} ranks needs {2 * config.pp} or more"
    return None


def _strategy_problem(config: TrainingConfig) -> str | None:
    if config.strategy == "fsdp1":
        return "--pp: not with fsdp1, whose flat parameters belong to one model; use zero1, fsdp2 or yafsdp"
    if config.schedule in _SPLIT_BACKWARD and strategies.STRATEGIES[config.strategy].shards_parameters:
        return (
            f"--schedule {config.schedule}: not with {config.strategy}, which would reduce gradients before the "
            "weights' backward has run; use zero1"
        )
    if config.schedule in _SPLIT_BACKWARD and config.checkpoint_layers:
        return f"--checkpoint-layers: not with {config.schedule}, whose split backward would recompute several times"
    if config.reentrant:
        return "--reentrant: not with --pp, whose stages call autograd for their inputs"
    if config.offload:
        return "--offload: not with --pp"
    return None
