"""Fixed cases of which each run takes a share, another one each time, and ``pytest --thorough`` all."""

import os
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

THOROUGH = "TRACEKIT_TEST_THOROUGH"  # set by conftest: modules choose their cases when they are imported
Case = TypeVar("Case")
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
