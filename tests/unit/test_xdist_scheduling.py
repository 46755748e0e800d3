"""The distribution of tests over workers names files that are there."""

import itertools
from pathlib import Path

import pytest

from tests.support import xdist_scheduling

ROOT = Path(__file__).parents[2]


TOGETHER = itertools.chain(*xdist_scheduling.ONE_WORKER.values())


@pytest.mark.parametrize("name", [*xdist_scheduling.LONG_FILES, *TOGETHER])
def test_what_is_scheduled_first_exists(name: str) -> None:
    assert list(ROOT.glob(f"{name.rstrip('/')}*"))


def test_long_files_are_scheduled_in_the_order_that_is_named() -> None:
    named = xdist_scheduling.LONG_FILES
    tests = [("tests/unit/test_a.py::test", "a"), *((f"{name}::test", name) for name in reversed(named))]
    assert xdist_scheduling.long_files_first(tests) == [*named, "a"]
