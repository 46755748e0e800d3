"""Findings on time of a straggler alone are part of what the straggler costs."""

from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.rules.engine import check
from tracekit.rules.outlier_steps import OutlierStep
from tracekit.rules.rule import Finding, Severity, WhatIf
from tracekit.rules.straggler_consequences import within_stragglers
from tracekit.rules.stragglers import Straggler

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


def pausing(pauses, ranks=4, blocks=6):
    """Return ranks that wait for the device in each block of each step; that of rank 1 pauses first in each step."""
    traces = []
    for rank in range(ranks):
        rows, calls, waits, ops = {"step": "", "compute": "", "comm": ""}, {}, [], {}
        launched = number = 0
        for step, pause in enumerate(pauses):
            for part in range(blocks):
                # compute  aaaaaaaa..........bbbb...     (rank 1; on other ranks: aaaaaaaa.bbbb............)
                # comm     ......................xxx                              .............xxxxxxxxxxxx
                late_by, longest = pause * (part == 0 and rank == 1), pause * (part == 0)
                begin, (a, b, x) = len(rows["step"]), (chr(0x4E00 + 3 * number + letter) for letter in range(3))
                compute = a * 8 + "." * (1 + late_by) + b * 4 + "." * (longest - late_by + 2)
                rows["step"] += str(step) * len(compute)
                rows["compute"] += compute
                rows["comm"] += "." * (13 + late_by) + x * (longest - late_by + 2)
                waits.append(("cudaStreamSynchronize", "runtime", launched + 1, begin + 8))
                calls[a], launched = launched, begin + 8 + late_by
                calls |= {b: launched, x: launched}
                ops[x], number = "all_reduce", number + 1
        picture = "\n".join(f"{lane} {cells}" for lane, cells in rows.items())
        groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(ranks))]})
        traces.append(drawn_hosts.trace(picture, calls, tuple(waits), rank=rank, groups=groups, ops=ops))
    return drawn_traces.run(*traces)


def test_the_longest_pauses_of_a_rank_that_pauses_in_every_step_are_part_of_its_cost():
    pauses = [4, 12, 24, 6, 18, 5]
    found = {each.code: each for each in check(pausing(pauses), [Straggler(), OutlierStep()]).findings}
    mean_ns = sum(pauses) * drawn_hosts.UNIT_NS / len(pauses)
    assert found["RANK001"].severity is Severity.WARNING
    # Of the longest pauses, the replay without a straggler leaves what its lead does not hide.
    assert found["RANK001"].cost_ns == pytest.approx(mean_ns, rel=0.2)
    assert (found["STEP001"].severity, found["STEP001"].consequence_of) == (Severity.INFO, found["RANK001"].id)


def test_without_a_warning_on_the_straggler_its_host_time_is_a_finding():
    information = replace(STRAGGLER, severity=Severity.INFO)
    assert within_stragglers(RUN, RUN, COPY, [COPY, information]) is COPY
