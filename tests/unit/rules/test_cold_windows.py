"""Warm-up in a window that has no other step to compare with, on drawn timelines."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import GIB, HIDDEN
from tracekit.rules.allocator import FragmentedMemory
from tracekit.rules.engine import check
from tracekit.rules.host import LateLaunch
from tracekit.rules.rule import Severity


def judge(run, rule):
    (found,) = check(run, [rule]).findings
    return found


def late_run(*doing, steps=1):
    """Return a run in whose steps the device is idle from 4 to 44 of 50, while the host does what `doing` says."""
    letters = "abcdefghijklmno"
    cells = "".join(f"{letters[2 * step] * 4}{'.' * 40}{letters[2 * step + 1] * 6}" for step in range(steps))
    numbers = "".join(str(step) * 50 for step in range(steps))
    launched = {letters[2 * step + 1]: 50 * step + 43 for step in range(steps)}
    calls = tuple(
        (name, "runtime", 50 * step + since, 50 * step + until) for step in range(steps) for name, since, until in doing
    )
    return drawn_traces.run(drawn_hosts.trace(f"step {numbers}\ncompute {cells}", launched, calls))


@pytest.mark.parametrize(
    ("call", "severity"),
    [
        (("cuModuleLoadData", 4, 43), Severity.INFO),
        (("cudnnFindConvolutionForwardAlgorithmEx", 4, 43), Severity.INFO),
        (("cudaLaunchKernel", 4, 43), Severity.INFO),  # the first launch of a kernel
        (("cuModuleLoadData", 4, 10), Severity.WARNING),  # most of the loss has another cause
        (("cudaStreamIsCapturing", 4, 43), Severity.WARNING),
    ],
    ids=lambda value: str(value),
)
def test_a_single_step_that_loads_kernels_is_warm_up(call, severity):
    found = judge(late_run(call), LateLaunch())
    assert found.severity is severity
    assert ("run for the first time" in found.message) == (severity is Severity.INFO)
    assert ("Profile later steps" in found.fix) == (severity is Severity.INFO)


def test_what_every_step_loads_is_no_warm_up():
    late = judge(late_run(("cuModuleLoadData", 4, 43), steps=3), LateLaunch())
    assert late.severity is Severity.WARNING
    assert "loads kernels again in each step" in late.fix


def growing_run(*steps):
    """Return a run whose requests of 1 GiB are in these steps, and each reserves 1 GiB more than the one before."""
    rows = [(at, step, at, GIB, GIB, (4 + at) * GIB, 0) for at, step in enumerate(steps)]
    names = ["at_ns", "step", "address", "delta_bytes", "allocated_bytes", "reserved_bytes", "device"]
    allocations = pl.DataFrame(rows, schema=names, orient="row")
    return drawn_traces.run(drawn_traces.trace(HIDDEN, allocations=allocations))


def test_growth_in_a_single_step_may_be_warm_up(wording):
    steady = judge(growing_run(0, 0, 1, 1), FragmentedMemory())
    assert (steady.severity, steady.steps) == (Severity.WARNING, (1,))
    assert "warm-up" not in steady.message
    single = judge(growing_run(0, 0, 0), FragmentedMemory())
    assert (single.severity, single.steps) == (Severity.INFO, (0,))
    wording(single.message)
