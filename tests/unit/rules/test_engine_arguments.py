"""Arguments of the library's public functions that are of another type than documented."""

from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.rule_examples import HIDDEN


@pytest.mark.parametrize("given", ["runs/today", Path("runs/today"), None, b"x", [], object(), "\ud800"])
def test_what_is_no_run_is_refused_with_the_way_to_load_one(given):
    with pytest.raises(TypeError, match=r"tracekit\.load"):
        tracekit.check(given)
    with pytest.raises(TypeError, match=r"tracekit\.load"):
        tracekit.query(given, "SELECT 1")


@pytest.mark.parametrize("given", ["COMM001", 1, None, "DATA001"])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(TypeError, match="instances of Rule"):
        tracekit.check(drawn_traces.run(drawn_traces.trace(HIDDEN)), rules=[given])
