"""What a training would need, by formula: memory, traffic and checkpoints. Nothing is built but shapes."""

from collections.abc import Iterator

from instrumented_trainers import build, faults, loop
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.memory import Footprint, predicted
from instrumented_trainers.memory.footprint import KINDS
from instrumented_trainers.memory.predicted import COMPUTE_BYTES, WEIGHT_BYTES
from instrumented_trainers.optimization.optimizers import state_numbers
from instrumented_trainers.sizes import model_config
from tracekit.conventions import strategies
from tracekit.conventions.strategies import GRADIENTS, STRATEGIES, Collective

_SAVING_RATIO = 0.05
"""The share of the time that saving may take."""
_RANKS_COMPARED = 8


def report(config: TrainingConfig) -> list[str]:
    """Return lines on the memory of the rank that needs most, on what a rank sends per step, and on a checkpoint."""
    rank, footprint = _largest(config)
    lines = [loop.introduction(config), f"memory of rank {rank}, GiB, without temporary tensors"]
    for kind in (*KINDS, "offloaded"):
        size = footprint.as_row()[f"{kind}_bytes"]
        if kind != "offloaded" or size:
            lines.append(f"  {'in host memory' if kind == 'offloaded' else kind:<16}{_gib(size):>12}")
    lines.append(f"  {'on the device':<16}{_gib(footprint.known_bytes):>12}")
    sent = sent_bytes_per_step(config)
    lines.append(f"a rank sends {sent / 1e9:,.2f} GB per step, if it sends in rings")
    saved = checkpoint_bytes(config)
    seconds = saved / 1e9
    lines.append(
        f"a checkpoint has {seconds:,.2f} GB; at 1 GB/s it takes {seconds:,.0f} s, so that saving takes less than "
        f"{_SAVING_RATIO:.0%} of the time every {seconds / _SAVING_RATIO / 60:,.1f} minutes or more"
    )
    return lines


def _largest(config: TrainingConfig) -> tuple[int, Footprint]:
    """Return the rank that needs most, of the first ones: shards differ by padding, and the first have none."""
    active_faults = tuple(faults.parse(text) for text in config.fault)
    options = build.shard_options(config, active_faults)
    footprints = {rank: predicted(config, options, rank) for rank in range(min(config.world_size, _RANKS_COMPARED))}
    return max(footprints.items(), key=lambda item: item[1].known_bytes)


def sent_bytes_per_step(config: TrainingConfig) -> float:
    """Return the bytes that a rank sends per step, over rings: (n − 1)/n of a message per pass among n ranks."""
    strategy = STRATEGIES[config.strategy]
    shards = config.layout.dp_shard if strategy.shards_parameters else config.world_size
    sent = sum(
        size * collective.traffic_factor * _times(config, collective) * (shards - 1) / shards
        for collective, size in _messages(config)
    )
    if config.replicate > 1:  # each shard's gradient is all-reduced over its replicas
        passes, replicas = strategies.RING_PASSES[strategies.ALL_REDUCE], config.replicate
        times = config.micro_batches if config.strategy == "yafsdp" else 1
        sent += (
            model_config(config).parameters
            / shards
            * _reduced_bytes(config)
            * passes
            * times
            * (replicas - 1)
            / replicas
        )
    return sent


def checkpoint_bytes(config: TrainingConfig) -> int:
    """Return the bytes of a checkpoint: weights, and what the optimizer keeps of each."""
    numbers = 1 + state_numbers(config)
    return model_config(config).parameters * numbers * WEIGHT_BYTES[config.precision]


def _messages(config: TrainingConfig) -> Iterator[tuple[Collective, int]]:
    """Yield each kind of collective of a step with the bytes of all its messages of one micro-batch."""
    strategy, model = STRATEGIES[config.strategy], model_config(config)
    weight = (COMPUTE_BYTES if strategy.shards_parameters else WEIGHT_BYTES)[config.precision]
    for collective in strategy.collectives:
        if collective.tensor == GRADIENTS:
            yield collective, model.parameters * _reduced_bytes(config)
        elif collective.when == strategies.BACKWARD:
            yield collective, _gathered_again(config) * model.layer_parameters * weight
        else:
            yield collective, model.parameters * weight


def _gathered_again(config: TrainingConfig) -> int:
    """Return how many layers are gathered for backward: not those whose weights YaFSDP's buffers have still."""
    still_there = STRATEGIES[config.strategy].weight_buffers
    return 0 if config.keep_gathered else max(0, model_config(config).layers - still_there)


def _reduced_bytes(config: TrainingConfig) -> int:
    """Gradients are reduced in fp32 at least; under ddp and zero1 in the weights' own dtype."""
    return max(COMPUTE_BYTES[config.precision], 4)


def _times(config: TrainingConfig, collective: Collective) -> int:
    """Return how often it runs per step: once per micro-batch, or after the last one."""
    if collective.when == strategies.AFTER_OPTIMIZER:
        return 1
    if collective.tensor == GRADIENTS and config.strategy != "yafsdp":
        return 1
    return config.micro_batches


def _gib(size: int | None) -> str:
    return "—" if size is None else f"{size / 2**30:,.2f}"
