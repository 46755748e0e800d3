"""The metrics that runs are compared by, each stated once: samples, compare, budgets, history, charts, docs derive.

A metric that another distribution adds stands in its entry point group ``tracekit.metrics``: an object `Metric` with a
source of its own (see `tracekit.regression.metric_sources`).
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tracekit import conventions
from tracekit.conventions import device_metrics
from tracekit.errors import ConfigError, similar_names
from tracekit.model import escaping, plugins, units
from tracekit.model.run import RunFact
from tracekit.model.trace import TraceFact
from tracekit.regression import metric_sources as sources

PERCENT = "%"
NUMBER = r"\d+\.?\d*|\.\d+"
_AMOUNT = re.compile(rf"\s*(?P<number>{NUMBER})\s*(?P<unit>[^\s\d.]*)\s*\Z")


def _plain(value: float) -> str:
    """Return a number with four digits, a large one without an exponent.

    >>> _plain(0.12345), _plain(17_970.4)
    ('0.1235', '17,970')
    """
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


@dataclass(frozen=True)
class Unit:
    """A unit of metrics: its name, how amounts of it are written, and the scales of a chart's axis."""

    name: str
    text: Callable[[float], str] = _plain
    """A value in words: 12.4e6 ns is "12.4 ms"."""
    suffixes: Mapping[str, float] = field(default_factory=dict)
    """The units that settings and options may use, each in this unit; '' where a bare number is meant."""
    ticks: tuple[tuple[float, str], ...] = ((1.0, ""),)
    """What an axis divides by and writes behind its numbers, the largest scale first."""
    is_time: bool = False
    """Whether it depends on how fast the machine runs: a time, or a rate."""

    def amount(self, value: object) -> float:
        """Return an amount in this unit: ``"412ms"``, ``"70GiB"``, 0.15 or ``"15%"`` of a share.

        A time, a size and a clock need their unit; a share and a count are numbers. Raises ConfigError naming what is
        expected.

        >>> NS.amount("412ms"), SHARE.amount("15%")
        (412000000.0, 0.15)
        """
        if self is SHARE:
            return _share(value)
        if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] in self.suffixes:
            return _finite(float(match["number"]) * self.suffixes[match["unit"]], value)
        if "" in self.suffixes and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return _finite(float(value), value)
        if "" in self.suffixes:
            raise ConfigError(f"expected a number that is not negative, not {value!r}")
        example = {NS.name: "412ms", MHZ.name: "1755MHz"}.get(self.name, "70GiB")
        raise ConfigError(
            f'expected text of a number and a unit such as "{example}" ({", ".join(self.suffixes)}), not {value!r}'
        )

    def scale(self, largest: float) -> tuple[float, str]:
        """Return the divisor of an axis whose values reach `largest`, and the unit behind its numbers."""
        return next((tick for tick in self.ticks if largest >= tick[0]), self.ticks[-1])


NS = Unit(
    "ns",
    units.duration,
    {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
    ((1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")),
    is_time=True,
)
BYTES = Unit(
    "bytes",
    units.size,
    {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B")),
)
SHARE = Unit("ratio", units.share, {}, ((0.01, "%"),))
"""A share from 0 to 1. Limits on its points need %: a bare number of them would be ambiguous."""
COUNT = Unit("count", suffixes={"": 1})
PER_SECOND = Unit("1/s", suffixes={"": 1}, is_time=True)
MHZ = Unit("MHz", "{:,.0f} MHz".format, {"MHz": 1, "GHz": 1e3}, ((1.0, " MHz"),))
FLOP = Unit("FLOP", units.operations, {"": 1})


def _share(value: object) -> float:
    number = value
    if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] == PERCENT:
        number = float(match["number"]) / 100
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1:
        return _finite(float(number), value)
    raise ConfigError(f'expected a share from 0 to 1, or text such as "15%", not {value!r}')


def _finite(number: float, value: object) -> float:
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number


ENTRY_POINTS = "tracekit.metrics"
STEP_TIME = conventions.STEP_TIME_METRIC
COMPUTE_TIME, COMMUNICATION_TIME = "compute_ns", "communication_ns"
SM_CLOCK = device_metrics.SM_CLOCK


class Scope(StrEnum):
    """What one sample of a metric covers: a training step, a save, or the run as a whole."""

    STEP = "step"
    SAVE = "save"
    RUN = "run"


class Aggregation(StrEnum):
    """How the ranks' values of a step become the job's: ranks wait for the worst; sizes and costs are averaged."""

    WORST = "worst rank"
    MEAN = "mean of ranks"


_MARK_STEPS = "the traces mark no steps"
_RECORD_MEMORY = "no memory events were recorded (profile_memory=True, or tracekit.capture)"
_RECORD_SAVES = "the run saves no checkpoint, or its log is not next to the traces (tracekit.capture records it)"


@dataclass(frozen=True)
class Metric:
    """A number that runs are compared by: what it is, where its samples come from, and how a change of it is judged."""

    key: str
    """Its name in tables, JSON and settings; settings may leave out the unit at its end."""
    label: str
    unit: Unit
    meaning: str
    of_trace: TraceFact | None = None
    """Measures its samples on one rank; several metrics may share it."""
    of_run: RunFact | None = None
    """Measures its samples where that needs several ranks."""
    lower_is_better: bool = True
    scope: Scope = Scope.STEP
    over_ranks: Aggregation = Aggregation.MEAN
    part_of: str | None = None
    """The time that contains it: a change of less than 1% of that is none."""
    least_change_ratio: float = 0.0
    """A smaller change is none, whatever the thresholds say."""
    usual_spread: float = 0.0
    """By how much recordings of the same training differ at least: a standard deviation, relative, or in points.

    Counts and sizes need not differ at all.
    """
    is_cpu_time: bool = False
    """Whether it is time of processors, not of the clock: it says nothing of a run on a GPU, where the host spins."""
    has_rank_values: bool = True
    """Whether each rank has its own value."""
    fails_check: bool = False
    """Whether a check with a baseline fails where it is worse, unless settings say otherwise."""
    is_peak: bool = False
    """Whether a budget limits its highest value, not its median."""
    is_drawn: bool = False
    """Whether the pictures of reports in CI show it."""
    cause: str = ""
    """What a regression of it is attributed to: compute, communication, checkpointing, memory or host."""
    phrase: str = ""
    """What a cause writes before its value: "a step takes"."""
    if_missing: str = _MARK_STEPS
    """Why a run may not have it, and what to do."""

    @property
    def short(self) -> str:
        """Return the key without its unit: step_time_ns is step_time."""
        return self.key.removesuffix("_ns").removesuffix("_bytes").removesuffix("_mhz")

    @property
    def is_share(self) -> bool:
        """Whether it is a share from 0 to 1, whose changes are in points."""
        return self.unit is SHARE

    def text(self, value: float | None) -> str:
        """Return a value in words; an em dash where it is missing."""
        return "—" if value is None else self.unit.text(value)

    def is_worse(self, difference: float) -> bool:
        """Return whether a change by this difference is for the worse."""
        return difference > 0 if self.lower_is_better else difference < 0


_of_steps = functools.partial(
    Metric, unit=NS, of_trace=sources.breakdown_samples, over_ranks=Aggregation.WORST, part_of=STEP_TIME
)
_of_transfers = functools.partial(
    Metric, unit=NS, over_ranks=Aggregation.WORST, part_of=STEP_TIME, usual_spread=0.03, fails_check=True,
    cause="communication",
)  # fmt: skip
_of_memory = functools.partial(
    Metric, unit=BYTES, of_trace=sources.allocation_samples, fails_check=True, cause="memory", if_missing=_RECORD_MEMORY
)
_of_saves = functools.partial(
    Metric, of_trace=sources.checkpoint_samples, scope=Scope.SAVE, fails_check=True, cause="checkpointing",
    if_missing=_RECORD_SAVES,
)  # fmt: skip
_of_saving_time = functools.partial(_of_saves, unit=NS, over_ranks=Aggregation.WORST, least_change_ratio=0.1)

METRICS = (
    Metric(
        STEP_TIME, "step time", NS, "Length of the step's window on the device.",
        of_trace=sources.breakdown_samples, over_ranks=Aggregation.WORST, usual_spread=0.015, fails_check=True,
        is_drawn=True, cause="compute", phrase="a step takes",
    ),
    Metric(
        conventions.CPU_TIME_METRIC, "CPU time", NS, "Time that the rank's process ran, all its threads, by the log.",
        of_trace=sources.logged_samples, usual_spread=0.015, is_cpu_time=True, fails_check=True,
        cause="compute", phrase="a step takes CPU time of",
        if_missing="no log records the CPU time (tracekit.capture records it)",
    ),
    Metric(
        "flops", "FLOPs per step", FLOP,
        "Floating-point operations of products, convolutions and attention, from recorded shapes.",
        of_trace=sources.flop_samples, fails_check=True, cause="compute", phrase="a step computes",
    ),
    _of_steps(
        COMPUTE_TIME, "compute", meaning="Time of the step in which any compute ran.",
        usual_spread=0.015, is_drawn=True, cause="compute", phrase="compute takes",
    ),
    _of_steps(
        COMMUNICATION_TIME, "communication", meaning="Time of the step in which any collective ran.",
        usual_spread=0.03, cause="communication", phrase="communication takes",
    ),
    _of_steps(
        "exposed_communication_ns", "exposed communication", meaning="Communication that no compute overlaps.",
        usual_spread=0.03, is_drawn=True, cause="communication", phrase="exposed communication takes",
    ),
    Metric(
        "exposed_communication_ratio", "exposed share of step", SHARE, "Exposed communication over step time.",
        of_trace=sources.breakdown_samples, usual_spread=0.01,
    ),
    Metric(
        "overlap_ratio", "communication overlap", SHARE, "Share of communication that compute overlaps.",
        of_trace=sources.breakdown_samples, lower_is_better=False, usual_spread=0.01,
    ),
    _of_transfers(
        "exposed_transfer_ns", "exposed transfer", meaning="Exposed communication in which no rank is waited for.",
        of_run=sources.exposed_transfer_samples, phrase="exposed transfers take",
    ),
    _of_transfers(
        "transfer_ns", "transfer", has_rank_values=False, of_run=sources.transfer_samples, phrase="transfers take",
        meaning="Time of collectives from the last rank's arrival to the end, saves left out.",
    ),
    Metric(
        "sent_bytes", "sent per step", BYTES, "Bytes that the step's collectives send, saves left out.",
        of_trace=sources.sent_samples, fails_check=True, cause="communication", phrase="a step sends",
    ),
    _of_steps(
        "idle_ns", "idle", meaning="Time of the step in which neither compute nor communication ran.",
        usual_spread=0.05, is_drawn=True, cause="host", phrase="the device is idle for",
    ),
    Metric(
        conventions.DATA_WAIT_METRIC, "data wait", NS, "Time in which training waited for a batch, by the metrics log.",
        of_trace=sources.logged_samples, over_ranks=Aggregation.WORST, part_of=STEP_TIME, usual_spread=0.05,
        cause="host", phrase="waiting for data takes",
        if_missing="no log records the wait for data (tracekit.capture records it)",
    ),
    Metric(
        conventions.COLLECTIVE_WAIT_METRIC, "collective wait", NS,
        "Time in which the host waited for collectives, by the metrics log of a CPU run.",
        of_trace=sources.logged_samples, over_ranks=Aggregation.WORST, part_of=STEP_TIME, usual_spread=0.05,
        cause="communication", phrase="waiting for collectives takes",
        if_missing="no log records waits for collectives (tracekit.capture records them of CPU runs)",
    ),
    Metric(
        "allocations", "allocations per step", COUNT, "Allocations of the step, by the allocator's events.",
        of_trace=sources.allocation_samples, if_missing=_RECORD_MEMORY,
    ),
    _of_memory(
        "allocated_bytes", "allocated per step", meaning="Bytes that these allocations request.",
        phrase="a step allocates",
    ),
    _of_memory(
        "peak_allocated_bytes", "peak allocated", meaning="Most memory allocated at once during the step.",
        is_peak=True, phrase="peak allocated memory is",
    ),
    _of_memory(
        "peak_reserved_bytes", "peak reserved", meaning="Most memory reserved by the caching allocator.",
        is_peak=True, phrase="peak reserved memory is",
    ),
    _of_saving_time(
        "checkpoint_blocked_ns", "checkpoint blocked", meaning="Time that saving blocks the training thread.",
        usual_spread=0.1, is_drawn=True, phrase="a save blocks training for",
    ),
    _of_saving_time(
        "checkpoint_cpu_ns", "checkpoint CPU time", meaning="Part of that time in which the training thread ran.",
        usual_spread=0.03, is_cpu_time=True, phrase="a save takes CPU time of",
    ),
    _of_saves(
        "checkpoint_written_bytes", "checkpoint written", unit=BYTES, phrase="a rank writes",
        meaning="Bytes that a rank writes in a blocking save.",
    ),
    _of_saves(
        "checkpoint_calls", "checkpoint calls", unit=COUNT, meaning="Write calls of a blocking save.",
        phrase="the number of write calls is",
    ),
    Metric(
        conventions.TOKENS_METRIC, "tokens per second", PER_SECOND, "Throughput of all ranks by the metrics log.",
        of_trace=sources.logged_samples, lower_is_better=False, usual_spread=0.015, fails_check=True,
        cause="compute", phrase="the tokens per second are",
        if_missing="no log records the tokens of a step (tracekit.capture: Recorder.step(tokens=…))",
    ),
    Metric(
        conventions.TOKENS_PER_GPU_METRIC, "tokens per second and GPU", PER_SECOND,
        "Throughput by the metrics log over the number of ranks.",
        of_trace=sources.logged_samples, lower_is_better=False, usual_spread=0.015, cause="compute",
        phrase="the tokens per second and GPU are",
        if_missing="no log records the tokens of a step (tracekit.capture: Recorder.step(tokens=…))",
    ),
    Metric(
        SM_CLOCK, "SM clock", MHZ, "Clock of the GPU's multiprocessors while it is busy, by the metrics log.",
        of_trace=sources.clock_samples, lower_is_better=False, over_ranks=Aggregation.WORST, least_change_ratio=0.03,
        usual_spread=0.01, cause="compute", phrase="the SM clock is",
        if_missing="no log records the counters of the GPUs (tracekit record --device-metrics)",
    ),
    Metric(
        "checkpoint_overhead_ratio", "checkpoint overhead", SHARE, "Share of training time that saves take.",
        of_run=sources.checkpoint_overhead, scope=Scope.RUN, has_rank_values=False, if_missing=_RECORD_SAVES,
    ),
)  # fmt: skip
"""Our metrics, in the order in which reports show them."""


@functools.cache
def all_metrics() -> Mapping[str, Metric]:
    """Return our metrics and those of other distributions, by key. Raises ConfigError where two have one key."""
    added = [point.load() for point in plugins.entry_points(group=ENTRY_POINTS)]
    by_key = {metric.key: metric for metric in METRICS}
    for metric in added:
        if metric.key in by_key:
            raise ConfigError(f"the plug-in metric {metric.key} has the key of another metric: rename it")
        by_key[metric.key] = metric
    return by_key


def compared_metrics() -> tuple[Metric, ...]:
    """Return the metrics that have samples, in order: all but those of the run as a whole."""
    return tuple(metric for metric in all_metrics().values() if metric.scope is not Scope.RUN)


def metric_of(key: str) -> Metric:
    """Return the metric of a key. One that is not registered, such as of a plug-in that is gone, has only its unit."""
    return all_metrics().get(key) or Metric(key, escaping.heading(key), _unit_of(key), "")


def find(name: str, metrics: Iterable[Metric]) -> Metric:
    """Return the metric of a name that may leave out the unit: step_time is step_time_ns.

    Raises ConfigError with the nearest name where there is none.
    """
    candidates = list(metrics)
    by_name = {metric.short: metric for metric in candidates} | {metric.key: metric for metric in candidates}
    if name not in by_name:
        close = similar_names(name, by_name, limit=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(m.short for m in candidates)}"
        raise ConfigError(f"{name} is not a metric: {hint}")
    return by_name[name]


def _unit_of(key: str) -> Unit:
    units = {"_ns": NS, "_bytes": BYTES, "_ratio": SHARE, "_mhz": MHZ}
    return next((unit for ending, unit in units.items() if key.endswith(ending)), COUNT)
