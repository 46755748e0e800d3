"""What a training's memory on one rank consists of, in bytes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

KINDS = ("weights", "gradients", "optimizer", "buffers", "activations")


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank. None: no formula is claimed for it.

    `weights`, `gradients` and `optimizer` are what the rank keeps of the model on its device, padding included;
    `offloaded` is what it keeps of these in host memory. `buffers` is the most
    that the strategy has at a time of gathered weights and of gradients on their way, `activations` what the forward
    pass of a micro-batch leaves for its backward pass.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int | None
    activations_bytes: int | None
    offloaded_bytes: int = 0

    @property
    def known_bytes(self) -> int:
        """Sum of the device's known parts."""
        return sum(value for value in asdict(self).values() if value is not None) - self.offloaded_bytes

    def as_row(self) -> Mapping[str, int | None]:
        """Return the bytes by name."""
        return asdict(self)
