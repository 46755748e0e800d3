"""The settings that `tracekit record` passes to the processes it starts, in one environment variable."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tracekit import conventions
from tracekit.capture.perturbed_places import DELAY_RATIO

GIBIBYTE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to record. Paths are absolute: ranks may work elsewhere than their launcher."""

    out: str
    """The run's folder or URL; another training of the same command takes ``OUT-2``, and so on."""
    launch: str
    """A unique name of this start of the command."""
    notes: str
    """A folder on the launching node; each recorded process writes there where its files are."""
    scratch: str
    """A folder for traces that are not compressed yet, local to each node."""
    steps: str | None = "10:15"
    every: int | None = None
    warmup: int = 2
    ranks: tuple[int, ...] | None = None
    """The ranks to record; None for all."""
    memory: bool = True
    stacks: bool = False
    shapes: bool | None = None
    modules: bool = False
    snapshot: bool = False
    device_metrics: bool = False
    disk_budget_bytes: int = 10 * GIBIBYTE
    on_outlier: int = 0
    """Windows a day that may be opened because of slow steps."""
    perturb: tuple[str, ...] = ()
    """Places before which small delays are injected."""
    perturb_ratio: float = DELAY_RATIO
    tokens_per_step: int | None = None
    """Tokens of all ranks in one optimizer step; only the training knows them."""

    hang_timeout_s: float | None = None
    """Dump stacks and flight recorders of ranks whose collectives make no progress for so long; None: do not watch."""

    def recorder_options(self) -> dict[str, Any]:
        """Fields that are options of `Recorder`."""
        excluded = ("out", "launch", "notes", "ranks", "tokens_per_step", "hang_timeout_s")
        return {name: value for name, value in vars(self).items() if name not in excluded}

    def as_variable(self) -> str:
        """Value of the environment variable."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Read the settings of this process; None if it is not recorded. Raises ValueError for an invalid variable."""
    text = environment.get(conventions.RECORD_VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        ranks = values.pop("ranks", None)
        return Settings(**values, ranks=None if ranks is None else tuple(ranks))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{conventions.RECORD_VARIABLE} cannot be read: {error}") from error
