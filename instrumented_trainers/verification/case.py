"""A case of a verification and what is compared in it; the process that starts the ranks imports no torch for them."""

from dataclasses import dataclass
from pathlib import Path

FP64, NATIVE = "fp64", "native"
ONE_PROCESS = "one process"
INITIAL, OUTPUT, LOSS, GRADIENT, WEIGHT, BUFFER = "initial weight", "output", "loss", "gradient", "weight", "buffer"
QUANTITIES = (INITIAL, OUTPUT, LOSS, GRADIENT, WEIGHT, BUFFER)
"""In the order in which a step computes them."""


@dataclass(frozen=True)
class Case:
    """One way to train: under a strategy (or in one process, whose steps are the reference), in a precision."""

    target: str
    strategy: str
    precision: str
    ranks: int
    parts: int
    """Among how many ranks batches are divided: in one process, those of the strategies."""
    steps: int
    folder: str
    timeout_s: float

    @property
    def name(self) -> str:
        """Name of the case, which is also that of its files."""
        return f"{self.strategy}-{self.precision}".replace(" ", "-")

    def reference(self, step: int) -> Path:
        """File of what one process computed in a step; step -1 is the state before the first one."""
        return Path(self.folder) / f"reference-{self.precision}-{step}.pt"
