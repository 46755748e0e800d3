"""What a pipeline's schedule leaves to others: data parallelism, and faults."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class StageHooks:
    """Functions of a stage's number."""

    accumulate: Callable[[int, bool], AbstractContextManager[None]]
    """Context of a backward; its second argument says whether it is the stage's last one in the step."""
    synchronize: Callable[[int], None]
    """Begins to reduce gradients. Called after the stage's last backward in the step."""
    finish: Callable[[int], None]
    """Called for each stage after the rank's last action: gradients are complete then."""
    around: Callable[[int], AbstractContextManager[None]]
    """Context of each forward and backward."""
