"""Which findings report a fault that was put into a recording, and what they say that it costs."""

import pytest

from benchmarks import perturbed
from tracekit.replay.graph.causes.device_time import STRAGGLER
from tracekit.replay.graph.causes.host import BLOCKING_SYNC, LATE_LAUNCH
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.rules.rule import Finding, Severity

LATE_RANK, LATE, SYNC = Removal(STRAGGLER, (1,)), Removal(LATE_LAUNCH), Removal(BLOCKING_SYNC)


def warning(code, *removals, severity=Severity.WARNING):
    return Finding(code, severity, "", "", ranks=(1,), removals=removals)


@pytest.mark.parametrize(
    ("second", "are_added"),
    [
        (warning("HOST001", LATE_RANK, LATE), True),  # late launches besides the straggler
        (warning("HOST001", LATE), False),  # all late launches: the straggler's are among them
        (warning("HOST002", SYNC), False),
        (warning("HOST001", LATE_RANK, LATE, severity=Severity.INFO), False),
        (warning("HOST001"), False),  # as its rule measured it
    ],
)
def test_costs_add_up_where_one_warning_is_priced_besides_the_other(second, are_added):
    first = warning("RANK001", LATE_RANK)
    assert perturbed._are_added(first, second) is are_added
    assert perturbed._are_added(second, first) is are_added


def test_a_finding_is_not_added_to_itself():
    straggler = warning("RANK001", SYNC, LATE_RANK)
    assert not perturbed._are_added(straggler, straggler)


def test_a_finding_on_ranks_that_are_late_in_turn_names_none_of_them():
    of_all = Finding("RANK003", Severity.WARNING, "", "", ranks=(0, 1, 2))
    of_one = Finding("RANK003", Severity.WARNING, "", "", ranks=(1,))
    assert (perturbed._names(of_all, 1), perturbed._names(of_one, 1), perturbed._names(of_one, 0)) == (
        False,
        True,
        False,
    )
