"""Findings on time of a straggler alone are part of what the straggler costs."""

import random
from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.kineto_files import slice_, write
from tracekit.ingest.loader import load
from tracekit.replay.graph.causes.device_time import STRAGGLER as LATE_RANKS
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.rules.engine import check
from tracekit.rules.outlier_steps import OutlierStep
from tracekit.rules.rule import Finding, Severity, WhatIf
from tracekit.rules.straggler_consequences import of_one_cause, within_stragglers
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


LATE = replace(STRAGGLER, what_if=WhatIf(LATE_RANKS), is_priced=False)
LAUNCHES = Finding("HOST001", Severity.WARNING, "late", "", ranks=(1,), cost_ns=3 * MS, what_if=WhatIf(LATE_LAUNCH))


@pytest.mark.parametrize(
    ("finding", "is_part"),
    [
        (LAUNCHES, True),
        (replace(LAUNCHES, ranks=(0,)), False),
        (replace(LAUNCHES, cost_ns=5 * MS), False),
        (replace(LAUNCHES, what_if=None), False),
    ],
    ids=["of the straggler", "of another rank", "much longer", "of another cause"],
)
def test_late_launches_of_a_straggler_that_no_replay_prices_are_its_lateness(finding, is_part):
    judged = {found.code: found for found in of_one_cause(RUN, [finding, LATE])}
    assert judged["RANK001"] == LATE
    assert judged["HOST001"].consequence_of == (LATE.id if is_part else "")
    assert (judged["HOST001"].severity is Severity.INFO) == is_part


def gloo_ranks(folder, waits_us, transfer_us=4_000.0, steps=6):
    """Write a rank for each wait for data before its step; the all-reduce ends on all ranks together."""
    chance = random.Random(len(waits_us))
    events, at_us = [[] for _ in waits_us], 1_000.0
    for step in range(steps):
        began_us, arrivals = at_us, []
        for rank, wait_us in enumerate(waits_us):
            wait = wait_us * chance.uniform(0.95, 1.05)
            compute_us = chance.uniform(19_000, 20_000)
            loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            events[rank] += [
                slice_("user_annotation", loading, began_us + 10, wait, tid=1),
                slice_("cpu_op", "aten::addmm", began_us + wait + 20, compute_us, tid=1),
            ]
            arrivals.append(began_us + wait + compute_us + 40)
        end_us = max(arrivals) + transfer_us
        for rank, arrival_us in enumerate(arrivals):
            issued = slice_("cpu_op", "c10d::allreduce_", arrival_us - 10, end_us - arrival_us + 20, tid=1)
            inputs = {"Input type": ["float"], "Input Dims": [[1_000_000]]}
            ran = slice_("user_annotation", "gloo:all_reduce", arrival_us, end_us - arrival_us, tid=2, **inputs)
            mark = slice_("user_annotation", f"ProfilerStep#{step}", began_us, end_us + 30 - began_us, tid=1)
            events[rank] += [issued, ran, mark]
        at_us = end_us + 40
    for rank, of_rank in enumerate(events):
        about = {"backend": "gloo", "rank": rank, "world_size": len(waits_us)}
        write(folder / f"rank{rank}.json", {"distributedInfo": about, "traceEvents": of_rank})
    return load(folder)


def test_a_rank_that_is_late_because_it_waits_for_data_is_one_fault_without_a_replay(tmp_path):
    late = {found.code: found for found in check(gloo_ranks(tmp_path / "late", [50.0, 30_000.0])).findings}
    assert not late["HOST003"].is_priced
    assert (late["HOST003"].severity, late["HOST003"].ranks) == (Severity.WARNING, (1,))
    assert (late["RANK001"].severity, late["RANK001"].consequence_of) == (Severity.INFO, late["HOST003"].id)
    assert late["HOST003"].cost_ns == pytest.approx(30_000_000, rel=0.15)
    even = check(gloo_ranks(tmp_path / "even", [30_000.0, 30_000.0])).findings
    assert "RANK001" not in {found.code for found in even}
