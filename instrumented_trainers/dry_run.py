"""What a training would need, by formula: memory, traffic and checkpoints. Nothing is built but shapes."""

from instrumented_trainers import build, faults, loop
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.memory import Footprint, predict_footprint
from instrumented_trainers.memory.footprint import KINDS
from instrumented_trainers.memory.predicted import WEIGHT_BYTES
from instrumented_trainers.optimization.optimizers import state_numbers
from instrumented_trainers.sizes import model_config
from instrumented_trainers.traffic import sent_bytes_per_step

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
    footprints = {
        rank: predict_footprint(config, options, rank) for rank in range(min(config.world_size, _RANKS_COMPARED))
    }
    return max(footprints.items(), key=lambda item: item[1].known_bytes)


def checkpoint_bytes(config: TrainingConfig) -> int:
    """Return the bytes of a checkpoint: weights, and what the optimizer keeps of each."""
    numbers = 1 + state_numbers(config)
    return model_config(config).parameters * numbers * WEIGHT_BYTES[config.precision]


def _gib(size: int | None) -> str:
    return "—" if size is None else f"{size / 2**30:,.2f}"
