"""Findings that cost more than in the baseline: by id, and by all that their code costs."""

import pytest

from tracekit.regression.baseline import KnownFinding
from tracekit.regression.gate import StepGrowth
from tracekit.rules.rule import Finding, Severity

LEAST = 0.05


def finding(impact, subject="", code="STEP001", before_steps=0.0):
    return Finding(code, Severity.WARNING, "", "", impact=impact, subject=subject, before_steps_ratio=before_steps)


def known(*findings):
    """Return the findings of a baseline of one recording, by id."""
    return {one.id: (KnownFinding.of(one),) for one in findings}


@pytest.mark.parametrize(
    ("findings", "before", "is_certain"),
    [
        ([finding(0.12, "save")], [], True),
        ([finding(0.04, "save")], [], False),  # below the least cost
        ([finding(0.12, "save"), finding(0.22, "retry")], [finding(0.25, "retry")], True),
        ([finding(0.12, "rank 3")], [finding(0.12, "rank 2")], False),  # moved to another rank
        ([finding(0.31, "retry")], [finding(0.25, "retry")], True),
        ([finding(0.26, "retry")], [finding(0.25, "retry")], False),
        ([finding(0.3)], [finding(0.25)], True),  # 25 of 100 ms, and now 33 of 110
        ([finding(0.27)], [finding(0.25)], False),  # 30 of 110 ms
        ([finding(0.7)], [finding(0.66)], False),  # 66 of 100 ms, and now 77 of 110: by less than a quarter of itself
        ([finding(0.12, "save")], [finding(0.25, "retry", code="MEM001")], True),  # of another code
    ],
)
def test_a_cost_is_new_as_far_as_its_code_costs_more(findings, before, is_certain):
    growth = StepGrowth(growth_ratio=0.1, mean_growth_ratio=0.1, noise_ratio=0.0)
    assert growth.is_certain(findings[0], findings, known(*before), LEAST) is is_certain


def test_a_cost_that_the_step_time_does_not_show_is_not_certain():
    assert not StepGrowth(0.04, 0.04, noise_ratio=0.0).is_certain(finding(0.12), [finding(0.12)], {}, LEAST)


def test_a_cost_before_the_first_step_is_not_in_the_step_time():
    load = finding(0.12, before_steps=0.1)
    assert StepGrowth(0.01, 0.01, noise_ratio=0.0).is_certain(load, [load], {}, LEAST)
    hidden = finding(0.12, before_steps=0.02)
    assert not StepGrowth(0.01, 0.01, noise_ratio=0.0).is_certain(hidden, [hidden], {}, LEAST)


def test_a_cost_within_the_noise_of_a_cpu_is_not_certain():
    assert not StepGrowth(0.12, 0.12, noise_ratio=0.2).is_certain(finding(0.12), [finding(0.12)], {}, LEAST)


def test_a_cost_of_which_the_step_shows_as_much_as_fails_is_certain():
    found = finding(0.4)  # a price may be too high
    assert StepGrowth(0.15, 0.15, noise_ratio=0.0).is_certain(found, [found], {}, LEAST)
