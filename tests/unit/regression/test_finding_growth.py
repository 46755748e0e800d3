"""Findings that cost more than in the baseline: by id, and by all that their code costs."""

import pytest

from tracekit.regression.baseline import KnownFinding
from tracekit.regression.finding_growth import StepGrowth
from tracekit.rules.rule import Finding, Severity

LEAST = 0.05


def finding(impact, subject="", code="STEP001"):
    return Finding(code, Severity.WARNING, "", "", impact=impact, subject=subject)


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
        ([finding(0.28, "retry")], [finding(0.25, "retry")], False),
        ([finding(0.12, "save")], [finding(0.25, "retry", code="MEM001")], True),  # of another code
    ],
)
def test_a_cost_is_new_as_far_as_its_code_costs_more(findings, before, is_certain):
    growth = StepGrowth(growth_ratio=0.1, noise_ratio=0.0)
    assert growth.is_certain(findings[0], findings, known(*before), LEAST) is is_certain


def test_a_cost_that_the_step_time_does_not_show_is_not_certain():
    assert not StepGrowth(growth_ratio=0.04, noise_ratio=0.0).is_certain(finding(0.12), [finding(0.12)], {}, LEAST)


def test_a_cost_within_the_noise_of_a_cpu_is_not_certain():
    assert not StepGrowth(growth_ratio=0.12, noise_ratio=0.2).is_certain(finding(0.12), [finding(0.12)], {}, LEAST)
