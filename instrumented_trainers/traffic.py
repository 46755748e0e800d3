"""What a rank sends in a training step, by formula."""

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.memory.predicted import COMPUTE_BYTES, WEIGHT_BYTES
from instrumented_trainers.sizes import model_config
from tracekit.conventions.strategies import HSDP, STRATEGIES


def sent_bytes_per_step(config: TrainingConfig) -> float:
    """Return the bytes that a rank sends per step, over rings: (n − 1)/n of a message per pass among n ranks."""
    return _sent_bytes(config, micro_batches=config.micro_batches)


def repeated_bytes(config: TrainingConfig) -> float:
    """Return the bytes that a rank's data parallelism sends again for each micro-batch of its stages, on average."""
    return (_sent_bytes(config, micro_batches=2) - _sent_bytes(config, micro_batches=1)) / config.pp


def _sent_bytes(config: TrainingConfig, *, micro_batches: int) -> float:
    # Replicas of shards add the same all-reduce to every strategy that shards parameters.
    strategy, model = HSDP if config.replicate > 1 else STRATEGIES[config.strategy], model_config(config)
    return strategy.sent_bytes(
        model.parameters,
        ranks=config.layout.dp_shard if strategy.shards_parameters else config.world_size,
        micro_batches=micro_batches,
        reduces_each=config.strategy == "yafsdp",
        still_gathered=model.parameters - _layers_gathered_again(config) * model.layer_parameters,
        replicas=config.replicate,
        gathered_bytes=(COMPUTE_BYTES if strategy.shards_parameters else WEIGHT_BYTES)[config.precision],
        # Gradients are reduced in fp32 at least; under ddp and zero1 in the weights' own dtype.
        reduced_bytes=max(COMPUTE_BYTES[config.precision], 4),
    )


def _layers_gathered_again(config: TrainingConfig) -> int:
    """Number of layers gathered for backward: not those whose weights YaFSDP's buffers have still."""
    still_there = STRATEGIES[config.strategy].weight_buffers
    return 0 if config.keep_gathered else max(0, model_config(config).layers - still_there)
