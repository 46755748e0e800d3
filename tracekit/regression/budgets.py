"""Budgets: what a step, a rank or a unit may take at most, as settings say it.

    [tool.tracekit.budget]
    step_time = "412ms"
    exposed_communication_ratio = 0.15
    checkpoint_overhead_ratio = 0.05
    peak_reserved = "70GiB"

    [[tool.tracekit.budget.where]]
    unit = "layers.*"
    compute = "9ms"

    [[tool.tracekit.budget.where]]
    rank = "0-3"
    peak_allocated = "60GiB"

A budget of a metric of which more is better, such as tokens_per_second, is the least that there must be.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.analysis.compute.unit_work import UNIT_METRICS
from tracekit.errors import ConfigError
from tracekit.regression import quantities
from tracekit.regression.samples import LOWER_IS_BETTER

CHECKPOINT_OVERHEAD = "checkpoint_overhead_ratio"
METRICS: Mapping[str, bool] = {**LOWER_IS_BETTER, CHECKPOINT_OVERHEAD: True}
"""What there are budgets of, and whether lower is better."""

_STRICT, _WHERE, _RANK, _UNIT = "strict", "where", "rank", "unit"
OF_RANKS_TOGETHER = ("transfer_ns", "exposed_transfer_ns")
"""Metrics that only several ranks together tell."""
_OF_RUN_ONLY = (CHECKPOINT_OVERHEAD, "transfer_ns")


@dataclass(frozen=True)
class Budget:
    """The limit of one metric, in the metric's own unit: of the run, or of each rank or unit that a pattern names."""

    metric: str
    limit: float
    ranks: str = ""
    """Ranks such as ``0-3,8``, each held to it by itself; ``*`` for all of them."""
    units: str = ""
    """A pattern such as ``layers.*``: each FSDP unit that it matches is held to it by itself."""

    @property
    def name(self) -> str:
        """Return what reports call it: ``step_time``, ``compute of layers.*``."""
        short = quantities.short(self.metric)
        place = [f"rank {self.ranks}"] if self.ranks else []
        place += [self.units] if self.units else []
        return f"{short} of {', '.join(place)}" if place else short

    @property
    def is_minimum(self) -> bool:
        """Whether the limit is the least that there must be."""
        return not METRICS[self.metric]

    def is_beyond(self, value: float) -> bool:
        """Return whether a value is past the limit."""
        return value < self.limit if self.is_minimum else value > self.limit

    def applies_to_rank(self, rank: int) -> bool:
        """Return whether a rank is one of those it is for."""
        if self.ranks in ("", "*"):
            return True
        spans = (part.partition("-") for part in self.ranks.split(","))
        return any(int(first) <= rank <= int(last or first) for first, _, last in spans)

    def applies_to_unit(self, unit: str) -> bool:
        """Return whether a unit is one of those it is for."""
        return fnmatch.fnmatchcase(unit, self.units)


@dataclass(frozen=True)
class Budgets:
    """All budgets of a project, and whether one that cannot be told fails too."""

    budgets: tuple[Budget, ...] = ()
    is_strict: bool = False


def parse(value: object) -> Budgets:
    """Return the budgets of a settings table. Raises ConfigError naming the key within it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'expected a table such as step_time = "412ms", not {value!r}')
    strict = value.get(_STRICT, False)
    if not isinstance(strict, bool):
        raise ConfigError(f"{_STRICT}: expected true or false, not {strict!r}")
    own = {key: given for key, given in value.items() if key not in (_STRICT, _WHERE)}
    found = _limits(own, "", {})
    where = value.get(_WHERE, [])
    if not isinstance(where, list):
        raise ConfigError(f"{_WHERE}: expected [[budget.where]] tables with unit or rank, not {where!r}")
    for number, table in enumerate(where):
        found += _of_place(table, f"{_WHERE}[{number}]")
    return Budgets(tuple(found), strict)


def _of_place(table: object, key: str) -> list[Budget]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{key}: expected a table with unit or rank, not {table!r}")
    if (_RANK in table) == (_UNIT in table):
        raise ConfigError(f'{key}: expected unit = "layers.*" or rank = "0-3", one of them')
    limits = {name: given for name, given in table.items() if name not in (_RANK, _UNIT)}
    if not limits:
        raise ConfigError(f"{key}: there is no budget in it")
    if _UNIT in table:
        unit = table[_UNIT]
        if not isinstance(unit, str) or not unit:
            raise ConfigError(f'{key}: unit: expected a pattern such as "layers.*", not {unit!r}')
        return _limits(limits, f"{key}: ", {"units": unit}, UNIT_METRICS)
    per_rank = {metric: lower for metric, lower in METRICS.items() if metric not in _OF_RUN_ONLY}
    return _limits(limits, f"{key}: ", {"ranks": _ranks(table[_RANK], key)}, per_rank)


def _limits(
    table: Mapping[str, object], where: str, place: Mapping[str, str], metrics: Mapping[str, bool] = METRICS
) -> list[Budget]:
    found = []
    for name, given in table.items():
        try:
            metric = quantities.metric_named(name, metrics)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None
        try:
            found.append(Budget(metric, quantities.amount(metric, given), **place))
        except ConfigError as error:
            raise ConfigError(f"{where}{name}: {error}") from None
    return found


def _ranks(value: object, key: str) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        text = text.replace(" ", "")
        spans = [part.partition("-") for part in text.split(",")]
        if text == "*" or all(a.isdecimal() and (b.isdecimal() if dash else not b) for a, dash, b in spans):
            return text
    raise ConfigError(f'{key}: rank: expected a rank, ranks such as "0-3,8", or "*", not {value!r}')
