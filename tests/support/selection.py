"""Which cases of a parametrized test run every day, and which only in `make accuracy`. Not a test."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_in_accuracy(cases: Iterable[Any], everyday: Collection[Any]) -> list[Any]:
    """Mark the cases that are not in `everyday` with `accuracy`; a tuple is the values of several arguments.

    Raises ValueError if a case of every day is none of the cases.
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
