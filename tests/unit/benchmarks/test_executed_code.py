"""How deep the stack of a check is: facts read facts, and the stack of them grows unnoticed."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
MAX_DEPTH = 24


@pytest.mark.accuracy  # no behaviour: a debugger's stack, for people to read
def test_a_check_of_the_demo_is_no_deeper_than_people_can_read():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.executed_code"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    *_, depth = (line for line in done.stderr.splitlines() if line.endswith(" frames deep"))
    assert int(depth.split()[0]) <= MAX_DEPTH
