"""Which cases of a parametrized test run every day, and which only in `make accuracy`. Not a test."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.support import process_group


def others_in_accuracy(cases: Iterable[Any], everyday: Collection[Any]) -> list[Any]:
    """Mark the cases that are not in `everyday` with `accuracy`; a tuple is the values of several arguments.

    Raises ValueError if a case of every day is none of the cases.

    >>> [(case.values, [mark.name for mark in case.marks]) for case in others_in_accuracy(["a", ("b", 2)], ["a"])]
    [(('a',), []), (('b', 2), ['accuracy'])]
    """
    cases = list(cases)
    if missing := set(everyday) - set(cases):
        raise ValueError(f"no such cases: {sorted(map(str, missing))}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in everyday else pytest.mark.accuracy,
        )
        for case in cases
    ]


class OutcomesOnDemand(Mapping[str, process_group.Outcome]):
    """Outcomes by name: the cases of every day run together when the first of them is needed, and so do the others."""

    def __init__(
        self, world_size: int, cases: Mapping[str, Callable[[], Any]], everyday: Collection[str], **limits: float
    ) -> None:
        self._world_size, self._cases, self._everyday, self._limits = world_size, cases, everyday, limits
        self._outcomes: dict[str, process_group.Outcome] = {}

    def __getitem__(self, name: str) -> process_group.Outcome:
        if name not in self._outcomes:
            is_everyday = name in self._everyday
            cases = {key: case for key, case in self._cases.items() if (key in self._everyday) == is_everyday}
            self._outcomes |= process_group.run_cases(self._world_size, cases, **self._limits)  # type: ignore[arg-type]
        return self._outcomes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)
