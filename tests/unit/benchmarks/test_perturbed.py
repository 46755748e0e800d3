"""Which findings report a fault that was put into a recording, and what they say that it costs."""

import pytest

from benchmarks import perturbed
from tracekit.replay.graph.savings import Removal
from tracekit.rules.rule import Finding, Severity

STRAGGLER, LATE, SYNC = Removal("straggler", (1,)), Removal("late-launch"), Removal("blocking-sync")


def warning(code, *removals, severity=Severity.WARNING):
    return Finding(code, severity, "", "", ranks=(1,), removals=removals)


@pytest.mark.parametrize(
    ("second", "are_added"),
    [
        (warning("HOST001", STRAGGLER, LATE), True),  # late launches besides the straggler
        (warning("HOST001", LATE), False),  # all late launches: the straggler's are among them
        (warning("HOST002", SYNC), False),
        (warning("HOST001", STRAGGLER, LATE, severity=Severity.INFO), False),
        (warning("HOST001"), False),  # as its rule measured it
    ],
)
def test_costs_add_up_where_one_warning_is_priced_besides_the_other(second, are_added):
    first = warning("RANK001", STRAGGLER)
    assert perturbed._are_added(first, second) is are_added
    assert perturbed._are_added(second, first) is are_added


def test_a_finding_is_not_added_to_itself():
    straggler = warning("RANK001", SYNC, STRAGGLER)
    assert not perturbed._are_added(straggler, straggler)
