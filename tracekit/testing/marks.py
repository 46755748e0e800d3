"""What a test's mark asks for: which steps are recorded, what they may take at most, which findings fail it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracekit.capture.window_schedule import parse_steps
from tracekit.cli import settings
from tracekit.errors import ConfigError
from tracekit.regression import budgets as budget
from tracekit.regression.budgets import Budgets
from tracekit.regression.metrics import all_metrics
from tracekit.rules.rule import Severity

DEFAULT_STEPS = (3, 8)

_STEPS, _FAIL_ON = "steps", "fail_on"
_OTHERS = (_STEPS, _FAIL_ON, "strict", "where")


@dataclass(frozen=True)
class TraceBudget:
    """The mark of one test. `steps` is half-open, counted from 0; findings from `fail_on` on fail it, None: none."""

    steps: tuple[int, int]
    budgets: Budgets
    fail_on: Severity | None


def parse_marks(marks: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> TraceBudget:
    """Budget that marks ask for together, the nearest to the test last. Raises ConfigError or ValueError."""
    settings_by_name: dict[str, Any] = {}
    for positional, keywords in marks:
        if positional:
            raise ConfigError(f'{positional[0]!r} has no name: write budgets as step_time="50ms"')
        settings_by_name |= keywords
    steps = settings_by_name.pop(_STEPS, DEFAULT_STEPS)
    if isinstance(steps, str):
        steps = parse_steps(steps)
    elif steps != DEFAULT_STEPS:
        raise ConfigError(f'{_STEPS}: expected text such as "3:8", not {steps!r}')
    fail_on = settings.parse_fail_on(str(settings_by_name.pop(_FAIL_ON, settings.NEVER)))
    try:
        return TraceBudget(steps, budget.parse(settings_by_name), fail_on)
    except ConfigError as error:
        if " is not a metric" not in str(error):
            raise
        names = ", ".join([*(metric.short for metric in all_metrics().values()), *_OTHERS])
        raise ConfigError(f"{str(error).partition(': expected')[0]}; there are {names}") from None
