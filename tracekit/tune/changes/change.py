"""Change of a training: the causes of lost time that it answers, its values, its risk, and how it is applied."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tracekit.analysis.memory import allocations
from tracekit.analysis.parallelism import workload
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.strategies import Prediction

FACTS: tuple[TraceFact, ...] = (allocations.peaks, workload.marks, workload.strategy_marks)
VALUE = "{value}"
"""Stands for the value in options, arguments, variables and keywords.

A value of two numbers, such as 4/8, has its parts as {first} and {second}."""
ON = "on"
"""The only value of a change that is either made or not."""
TRAINERS = "instrumented_trainers"
"""The module of our own trainers in a command."""
_HALF_PRECISION_BYTES, _FULL_PRECISION_BYTES = 2, 4
_LARGEST_OPTION = 1 << 31
"""No option is larger: what a manifest states beyond it is damage."""


class Risk(IntEnum):
    """What else a change may change, least first: changes of equal saving are tried in this order."""

    SAME = 0
    MEMORY = 1
    ROUNDING = 2
    TRAINING = 3

    @property
    def label(self) -> str:
        """Lower-case name that options and reports use."""
        return self.name.lower()

    @property
    def sentence(self) -> str:
        """What a person has to expect."""
        return _SENTENCES[self]


_SENTENCES = {
    Risk.SAME: "same numbers, bit for bit",
    Risk.MEMORY: "same numbers, more memory",
    Risk.ROUNDING: "numbers differ by rounding or by random draws",
    Risk.TRAINING: "another training: its loss has to be checked",
}


@dataclass(frozen=True, eq=False)
class TunedRun:
    """What changes know of a recorded training when they choose values."""

    run: Run
    manifest: Manifest
    is_of_trainers: bool
    """Whether our trainers made it: `options` are theirs, and changes apply to it by options."""

    @classmethod
    def of(cls, run: Run, *, is_of_trainers: bool | None = None) -> "TunedRun":
        """Facts of a run, for a command of our trainers or another one; by default for the recorded command."""
        manifest = Manifest.of(run.manifest)
        recorded = TRAINERS in manifest.command
        return cls(run, manifest, recorded if is_of_trainers is None else is_of_trainers)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of our trainers by field name; {} for another training."""
        return self.manifest.arguments if self.is_of_trainers else {}

    @property
    def strategy(self) -> str | None:
        """Strategy that the manifest states, else that of the wrapper whose annotations the traces have."""
        return workload.run_strategy(self.run)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks computed on CPUs."""
        return bool(self.run.manifest.get("device", "cuda") == "cpu")

    @property
    def cores_per_rank(self) -> int | None:
        """Whole cores of the host for each of its ranks, 1 or more; None where the recording does not state them."""
        processors = self.manifest.processors
        limits = [count for count in (processors.usable_cores, processors.quota_cores) if count]
        ranks = processors.ranks or self.manifest.world_size
        return max(1, int(min(limits)) // ranks) if limits and ranks else None

    @property
    def free_bytes(self) -> int | None:
        """Least memory over the ranks' devices that was never reserved; None where it was not measured."""
        headroom = self.run.table(allocations.peaks)["headroom_bytes"].drop_nulls()
        return int(min(headroom)) if len(headroom) else None

    def number(self, option: str, default: int) -> int:
        """Whole number of an option of our trainers; `default` where it is not stated."""
        value = self.options.get(option)
        if not isinstance(value, int) or isinstance(value, bool):
            return default
        return value if 0 <= value <= _LARGEST_OPTION else default

    def weight_bytes(self) -> int | None:
        """Bytes of all weights in the precision in which they are gathered; None where the model is not stated."""
        parameters = self.manifest.model.parameters
        if parameters is None or not math.isfinite(parameters):
            return None
        is_half = self.options.get("precision") == "bf16"
        return int(parameters * (_HALF_PRECISION_BYTES if is_half else _FULL_PRECISION_BYTES))


@dataclass(frozen=True)
class CallKeyword:
    """Keyword arguments of a call in a user's source, for a patch: ``num_workers={value}`` of ``DataLoader``."""

    functions: tuple[str, ...]
    text: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the keywords: a call that has one of them already is not changed."""
        return tuple(part.partition("=")[0].strip() for part in self.text.split(","))


def fill_template(template: str, value: str) -> str:
    """A template with a value in place of {value}, or its parts in place of {first} and {second}.

    >>> fill_template("--micro-batches {first} --batch {second}", "4/8")
    '--micro-batches 4 --batch 8'
    """
    first, _, second = value.partition("/")
    return template.replace(VALUE, value).replace("{first}", first).replace("{second}", second)


def no_prediction(_run: TunedRun, _value: str) -> None:
    """No prediction of its own: the saving is that of the first cause with an answer."""


def no_memory(_run: TunedRun, _value: str) -> int:
    """No additional memory on a device, in bytes."""
    return 0


def unknown_memory(_run: TunedRun, _value: str) -> None:
    """More memory on a device, of which no formula states how much."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Change:
    """A change that may make a training faster.

    Plug-ins add one by the entry point group ``tracekit.changes``. `values` are those to try, best guess first; none
    where the change does not apply to the run.
    """

    name: str
    summary: str
    """What it does, in one sentence without a full stop."""
    risk: Risk
    values: Callable[[TunedRun], Sequence[str]]
    causes: tuple[Cause, ...] = ()
    """The causes that it removes: the first one that the replay has an answer for predicts the saving.

    Of a partial change it is the one that saves most."""
    codes: tuple[str, ...] = ()
    """Rules whose findings it answers, too: their savings count where no cause has an answer."""
    is_partial: bool = False
    """Whether it removes a part of the causes only, so that their saving bounds what it saves of them."""
    saves_beyond_causes: bool = False
    """Whether it also saves time that no cause has, so that the saving of its causes is no bound: devices do more of a
    larger batch in the same time."""
    is_divided: bool = False
    """Whether the value is a number of processes that do the removed work while the step runs: it takes as long as they
    need for it."""
    option: str = ""
    """Options of our trainers."""
    variable: str = ""
    """Environment variable of any command, as NAME=VALUE."""
    joins_variable: bool = False
    """Whether the variable is a list: a value that the user has set stays, before a comma."""
    keyword: CallKeyword | None = None
    """What to change in the source of a training that takes no argument for it."""
    predict: Callable[[TunedRun, str], Prediction | None] = no_prediction
    """Predicted step, for changes that a replay plays whole. Raises InputError where it cannot."""
    added_bytes: Callable[[TunedRun, str], int | None] = no_memory
    """Additional memory of each device; None where no formula states it."""
    is_uneven: bool = False
    """Whether what it saves falls on some steps only, so that the mean of all logged steps decides, not their median.

    Such are saves, and batches that several workers finish at once."""

    @property
    def key(self) -> str:
        """Its key in the settings' table ``tune.arguments``."""
        return self.name.replace("-", "_")
