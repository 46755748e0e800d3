"""Fixed cases of which each run takes a share, another one each time, and ``pytest --thorough`` all.

Whole tests take turns too: of those that a module marks ``in_turns(3)`` a run takes a third, of those that modules mark
``in_turns(2, "examples")`` half of all together. Modules whose cost is what they set up take turns whole: of those with
``pytestmark = modules_in_turns(2, "ranks")`` a run takes half. What is asked for by itself always runs.
"""

import os
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

THOROUGH = "TRACEKIT_TEST_THOROUGH"  # set by conftest: modules choose their cases when they are imported
Case = TypeVar("Case")
in_turns = pytest.mark.in_turns
modules_in_turns = pytest.mark.modules_in_turns
# All processes of a run under pytest-xdist must choose alike.
_run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(random.SystemRandom().random())


def one_in(share: int, cases: Sequence[Case]) -> list[Case]:
    """Return one of each `share` cases."""
    if THOROUGH in os.environ:
        return list(cases)
    return list(cases)[random.Random(f"{_run} {share} {len(cases)}").randrange(min(share, len(cases))) :: share]


def one_in_of(share: int, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return one of each `share` named cases."""
    return {name: cases[name] for name in one_in(share, list(cases))}


def of_this_run(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that this run takes, and those whose turn it is not, both as ordered."""
    groups: dict[tuple[str, int], list[list[pytest.Item]]] = {}
    modules: dict[tuple[str, int, str], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("modules_in_turns"):
            share, name = mark.args
            modules.setdefault((name, share, str(item.path)), []).append(item)
        elif mark := item.get_closest_marker("in_turns"):
            share, *named = mark.args
            groups.setdefault((named[0] if named else str(item.path), share), []).append([item])
    for (name, share, _), of_module in modules.items():
        groups.setdefault((f"modules of {name}", share), []).append(of_module)
    left = set()
    for (_, share), group in groups.items():
        taken = one_in(share, range(len(group)))
        left |= {item for number, together in enumerate(group) if number not in taken for item in together}
    return [item for item in items if item not in left], [item for item in items if item in left]
