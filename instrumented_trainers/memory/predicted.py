"""A training's memory by formula, before anything is built.

Letters as in `instrumented_trainers.model`, and
    N  parameters      M  those of a layer      R  those outside the layers      S  ranks that share one model

What a rank stores (https://arxiv.org/abs/1910.02054, section 3; for AdamW, two numbers per weight):

    strategy   weights, gradients   optimizer    buffers: the most at a time, in bytes of a gathered weight (w) or of a
                                                 gradient that is reduced (r)
    ddp        N, N                 2 N          none: gradients live in the buckets that are reduced
    zero1      N, N                 2 N / S      none
    fsdp1      N / S, N / S         2 N / S      R w + 3 M w: the layer that runs, the next one, the one before
    fsdp2      N / S, N / S         2 N / S      R w + 3 M w: of the layer, and gathered but not yet copied weights
    yafsdp     N / S, N / S         2 N / S      2 M (w + r) + R (w + r), allocated once

Activations: a count of what autograd saves, as in https://arxiv.org/abs/2205.05198, section 4.1, for the layers of our
model; no attention matrix, because scaled_dot_product_attention keeps none. Buffers of fsdp1 and fsdp2 depend on when
the communication's threads let go of theirs, which can add a layer. All this was checked on the CPU only.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.config.settings import SELECTIVE
from instrumented_trainers.memory.footprint import Footprint
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.optimization.optimizers import state_numbers
from instrumented_trainers.optimization.parameter_roles import ParameterRoles
from instrumented_trainers.parallelism import ShardOptions, yafsdp
from instrumented_trainers.parallelism.yafsdp.layout import Layout
from instrumented_trainers.sizes import model_config
from tracekit.conventions.strategies import OPTIMIZER, STRATEGIES

_STEP_BYTES = 4  # Adam and AdamW count the steps of each tensor in fp32
WEIGHT_BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}  # of the weights that the optimizer steps
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


def predict_footprint(config: TrainingConfig, options: ShardOptions, rank: int) -> Footprint:
    """Return the predicted memory of `rank`, sharded with `options`. No activations for autocast's bf16 and experts."""
    with torch.device("meta"):
        model = Llama(model_config(config))
    strategy, ranks = STRATEGIES[config.strategy], config.layout.dp_shard
    shard = rank % ranks
    weight = WEIGHT_BYTES[config.precision]
    shards = _shards(config.strategy, model, options, ranks=ranks, shard=shard, weight_bytes=weight)
    stored = sum(padded for padded, _ in shards) * weight
    by_tensor = OPTIMIZER in strategy.sharded and not strategy.shards_parameters  # whole tensors, each of one rank
    stepped = shards[:0] if by_tensor else shards
    numel = sum(sum(parts) for _, parts in stepped)
    tensors = sum(len(parts) for _, parts in stepped)
    if by_tensor:
        assigned = _deal(_group_sizes(model), config.world_size)[rank]
        numel, tensors = sum(assigned), len(assigned)
    counters = tensors if "adam" in config.optimizer else 0
    optimizer = state_numbers(config) * numel * weight + counters * _STEP_BYTES
    offloaded = 0
    if options.offload:  # the optimizer, and what it steps: the shards themselves, or copies of whole tensors
        offloaded = optimizer + 2 * (numel * weight if by_tensor else stored)
        offloaded += stored if strategy.buffer_bytes and config.micro_batches > 1 else 0  # gradients on their way
        optimizer, stored = 0, stored if by_tensor else 0
    return Footprint(
        stored,
        stored,
        optimizer,
        _buffers_bytes(config, model, options, ranks),
        _activations_bytes(config, model_config(config)),
        offloaded,
    )


def _shards(
    strategy: str, model: Llama, options: ShardOptions, *, ranks: int, shard: int, weight_bytes: int
) -> list[tuple[int, list[int]]]:
    """Return, for each unit, the elements that the rank keeps with padding, and of which tensors how many."""
    if not STRATEGIES[strategy].shards_parameters:
        sizes = [parameter.numel() for parameter in model.parameters()]
        return [(sum(sizes), sizes)]
    if strategy == "fsdp2":
        return [_rows(parameter, ranks, shard) for parameter in model.parameters()]
    if strategy == "fsdp1":
        return [_flat(unit, ranks, shard, 16 // weight_bytes) for unit in _units(model)]
    return [_yafsdp_part(unit, ranks, shard) for unit in _yafsdp_units(model, options)]


def _rows(parameter: nn.Parameter, ranks: int, shard: int) -> tuple[int, list[int]]:
    """FSDP2 cuts each tensor along its first dim; every rank keeps as many rows as the first."""
    row = math.prod(parameter.shape[1:])
    rows = math.ceil(parameter.shape[0] / ranks)
    own_rows = min(max(parameter.shape[0] - shard * rows, 0), rows)
    return rows * row, [own_rows * row]


def _flat(unit: Sequence[nn.Parameter], ranks: int, index: int, alignment: int) -> tuple[int, list[int]]:
    """FSDP1 lays a unit's tensors end to end, each on a boundary of 16 bytes, and cuts that."""
    starts, end = [], 0
    for parameter in unit:
        starts.append(end)
        end += parameter.numel()
        end += -end % alignment if parameter is not unit[-1] else 0
    shard = math.ceil(end / ranks)
    first, last = index * shard, (index + 1) * shard
    sizes = [min(start + p.numel(), last) - max(start, first) for start, p in zip(starts, unit, strict=True)]
    return shard, [size for size in sizes if size > 0]


def _yafsdp_part(unit: Sequence[nn.Parameter], ranks: int, shard: int) -> tuple[int, list[int]]:
    layout = Layout.of([parameter.shape for parameter in unit], ranks)
    parts = [layout.part(index, shard) for index in range(len(unit))]
    return layout.shard_numel, [part.stop - part.start for part in parts]


def _units(model: Llama) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer, then those outside the layers."""
    layers = [list(layer.parameters()) for layer in model.layers]
    return [*layers, _others(model, layers)]


def _yafsdp_units(model: Llama, options: ShardOptions) -> list[list[nn.Parameter]]:
    """Return the units as `yafsdp.shard` forms them: layers without norms, large parts, all the rest."""
    norms = {id(p) for layer in model.layers for p in yafsdp._vectors(layer)} if options.gather_norms_once else set()
    layers = [[p for p in layer.parameters() if id(p) not in norms] for layer in model.layers]
    large = [list(part.parameters()) for part in yafsdp._large_parts(model)]
    return [*layers, *large, _others(model, [*layers, *large])]


def _others(model: Llama, units: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    excluded = {id(parameter) for unit in units for parameter in unit}
    return [parameter for parameter in model.parameters() if id(parameter) not in excluded]


def _group_sizes(model: Llama) -> list[list[int]]:
    """Return the sizes of the parameters that do not decay, and of the others, as the optimizer has them."""
    roles = ParameterRoles.of(model)
    return [[n for name, n in roles.numels.items() if (name in roles.decayed) is decays] for decays in (False, True)]


def _deal(groups: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Deal tensors out, group by group, the largest first, to the rank that has the least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for sizes in groups:
        for size in sorted(sizes, reverse=True):
            min(hands, key=sum).append(size)
    return hands


def _buffers_bytes(config: TrainingConfig, model: Llama, options: ShardOptions, ranks: int) -> int | None:
    strategy = STRATEGIES[config.strategy]
    if not strategy.shards_parameters:
        return None if config.precision == "bf16" else 0
    compute = COMPUTE_BYTES[config.precision]
    reduce = max(compute, 4)
    if strategy.buffer_bytes:
        largest = max(Layout.of([p.shape for p in unit], ranks).shard_numel for unit in _yafsdp_units(model, options))
        leaving = largest * WEIGHT_BYTES[config.precision] if options.offload else 0  # of a gradient shard
        return sum(_slots(model, options, ranks)) * (compute + reduce) + leaving
    *layers, rest = (sum(_gathered_numel(config.strategy, p, ranks) for p in unit) for unit in _units(model))
    layer, count, stays_gathered = max(layers), len(layers), options.reshard_after_forward is False
    if config.strategy == "fsdp1":
        gathered = count if stays_gathered else min(3 if options.prefetch != 0 else 2, count)
        cast = (gathered - 1) * layer * compute + layer * reduce if compute != reduce else 0
        return rest * compute + max(gathered * layer * compute, cast)
    prefetched = min(max(1, options.prefetch or 0), count - 1)
    gathered = count if stays_gathered else 1
    cast = layer * compute // ranks if compute != reduce else 0
    forward = (gathered + 1 + prefetched) * layer * compute
    backward = (gathered + (0 if stays_gathered else prefetched)) * layer * compute + layer * reduce + cast
    first = rest * compute + 2 * layer * compute  # what the root gathered is let go when the first layer's is there
    near = count * layer * compute // options.reshard_after_forward if options.reshard_after_forward > 1 else 0
    return rest * compute + max(forward, backward, first) + near


def _gathered_numel(strategy: str, parameter: nn.Parameter, ranks: int) -> int:
    """Return the elements of a gathered tensor: under FSDP2 each rank sends as many rows as the first has."""
    return ranks * _rows(parameter, ranks, 0)[0] if strategy == "fsdp2" else parameter.numel()


def _slots(model: Llama, options: ShardOptions, ranks: int) -> Iterator[int]:
    """Yield the elements of each of YaFSDP's pairs of buffers: those that layers share in turn, then units' own."""
    units = [Layout.of([p.shape for p in unit], ranks).numel for unit in _yafsdp_units(model, options)]
    layers, rest = units[: len(model.layers)], units[len(model.layers) :]
    yield from layers if not options.reshard_after_forward else [max(layers)] * options.buffers
    yield from rest


def _activations_bytes(config: TrainingConfig, model: ModelConfig) -> int | None:
    if model.experts or (not STRATEGIES[config.strategy].shards_parameters and config.precision == "bf16"):
        return None
    tokens, compute = config.batch * config.tokens, COMPUTE_BYTES[config.precision]
    statistic = max(compute, 4)
    stream = tokens * model.width * compute
    norm = _norm_bytes(config, stream, tokens * statistic)
    recomputed = config.checkpoint_layers
    logits = 2 * tokens * model.vocabulary * statistic  # and their log-softmax
    end = stream + norm + logits + 2 * statistic
    layer = _layer_bytes(config, model, stream=stream, norm=norm)
    state = stream + (torch.get_rng_state().nbytes if recomputed else 0)
    if config.recompute == SELECTIVE:
        state += _products_bytes(config, model, stream=stream)
    return (model.layers - recomputed) * layer + recomputed * state + end + _rotations_bytes(config, model)


def _products_bytes(config: TrainingConfig, model: ModelConfig, *, stream: int) -> int:
    """Return the outputs of a layer's matrix products and attention, and the logarithms that attention saves."""
    tokens, compute = config.batch * config.tokens, COMPUTE_BYTES[config.precision]
    shared = tokens * model.key_value_heads * model.head_width * compute
    logarithms = tokens * model.heads * max(compute, 4)
    return 4 * stream + 2 * shared + logarithms + 2 * tokens * model.hidden_width * compute


def _layer_bytes(config: TrainingConfig, model: ModelConfig, *, stream: int, norm: int) -> int:
    """Bytes that a layer which recomputes nothing keeps: of attention, then of the feed-forward part."""
    tokens, compute = config.batch * config.tokens, COMPUTE_BYTES[config.precision]
    shared = tokens * model.key_value_heads * model.head_width * compute
    mixed = 2 * stream if config.device == "cpu" else stream  # on the CPU flattening the heads is a copy
    attention = stream + norm + stream + 2 * shared + mixed + tokens * model.heads * max(compute, 4)
    feed_forward = stream + norm + 4 * tokens * model.hidden_width * compute
    mask = stream if config.device == "cpu" else stream // compute
    return attention + feed_forward + (2 * mask if config.dropout else 0)


def _norm_bytes(config: TrainingConfig, stream: int, statistics: int) -> int:
    """Bytes that a norm saves in addition to its input. On the CPU its intermediate steps are saved too, in fp32."""
    if config.device == "cuda":
        return stream + statistics
    return 2 * stream + (2 * stream if config.precision == "bf16" else 0) + statistics


def _rotations_bytes(config: TrainingConfig, model: ModelConfig) -> int:
    """Return the positions' cosines and sines: in fp64, cast twice by a layer in fp32; bf16 is a buffer."""
    numbers = config.tokens * model.head_width
    if config.precision == "bf16":
        return 0
    if config.precision == "fp64":
        return numbers * 8
    return 2 * (model.layers - config.checkpoint_layers) * numbers * 4 + (
        numbers * 8 if config.checkpoint_layers else 0
    )
