"""What a rank sends in a training step, by formula."""

from collections.abc import Iterator

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.memory.predicted import COMPUTE_BYTES, WEIGHT_BYTES
from instrumented_trainers.sizes import model_config
from tracekit.conventions import strategies
from tracekit.conventions.strategies import GRADIENTS, STRATEGIES, Collective


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


def repeated_bytes(config: TrainingConfig) -> float:
    """Return the bytes that a rank's data parallelism sends again for each micro-batch of its stages, on average."""
    shards = config.layout.dp_shard
    repeated = [
        size * collective.traffic_factor for collective, size in _messages(config) if _is_repeated(config, collective)
    ]
    return sum(repeated) * (shards - 1) / shards / config.pp


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
    """Number of layers gathered for backward: not those whose weights YaFSDP's buffers have still."""
    still_there = STRATEGIES[config.strategy].weight_buffers
    return 0 if config.keep_gathered else max(0, model_config(config).layers - still_there)


def _reduced_bytes(config: TrainingConfig) -> int:
    """Gradients are reduced in fp32 at least; under ddp and zero1 in the weights' own dtype."""
    return max(COMPUTE_BYTES[config.precision], 4)


def _times(config: TrainingConfig, collective: Collective) -> int:
    """Number of times it runs per step: once per micro-batch, or after the last one."""
    return config.micro_batches if _is_repeated(config, collective) else 1


def _is_repeated(config: TrainingConfig, collective: Collective) -> bool:
    """Return whether it runs for every micro-batch. Only YaFSDP reduces the gradients of each."""
    if collective.when == strategies.AFTER_OPTIMIZER:
        return False
    return collective.tensor != GRADIENTS or config.strategy == "yafsdp"
