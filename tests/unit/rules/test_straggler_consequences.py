"""Findings on time of a straggler alone are part of what the straggler costs."""

from dataclasses import replace

import pytest

from tests.support import drawn_traces
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.rules.rule import Finding, Severity, WhatIf
from tracekit.rules.straggler_consequences import within_stragglers

RUN = drawn_traces.run(drawn_traces.trace("compute aa.\ncomm ..x"))
MS = 1_000_000
STRAGGLER = Finding(
    "RANK001", Severity.WARNING, "late", "", ranks=(1,), cost_ns=2 * MS, measured_ns=2 * MS, is_priced=True, subject="1"
)
COPY = Finding("HOST004", Severity.WARNING, "copies", "", ranks=(1,), cost_ns=3 * MS)


@pytest.mark.parametrize(
    ("finding", "is_part"),
    [
        (COPY, True),
        (replace(COPY, ranks=(0, 1)), False),
        (replace(COPY, cost_ns=5 * MS), False),
        (replace(COPY, what_if=WhatIf(LATE_LAUNCH)), False),
        (replace(COPY, code="COMM001"), False),
    ],
    ids=["of the straggler", "of other ranks too", "much longer", "priced by a replay", "not of the host"],
)
def test_host_time_of_a_straggler_alone_is_part_of_its_cost(finding, is_part):
    judged = within_stragglers(RUN, RUN, finding, [finding, STRAGGLER])
    assert judged.consequence_of == (STRAGGLER.id if is_part else "")
    assert (judged.severity is Severity.INFO) == is_part
    assert judged.cost_ns == finding.cost_ns


def test_without_a_warning_on_the_straggler_its_host_time_is_a_finding():
    information = replace(STRAGGLER, severity=Severity.INFO)
    assert within_stragglers(RUN, RUN, COPY, [COPY, information]) is COPY
