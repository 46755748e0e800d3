"""Ranks that take turns on one GPU: the time of their collectives is that of time slices, not of links."""

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.cli_runner import ROOT
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.rule import Finding, Severity

SHARED = ROOT / "sample_traces" / "gpu" / "slow-rank"


def exposed(run: tracekit.Run) -> Finding:
    (finding,) = tracekit.check(run, (ExposedCommunication(),)).findings
    return finding


def test_what_two_ranks_on_one_gpu_expose_is_information_below_the_straggler() -> None:
    run = tracekit.load(SHARED)
    report = run.check()
    communication = next(finding for finding in report.findings if finding.code == "COMM001")
    assert communication.severity is Severity.INFO
    warnings = [finding.code for finding in report.findings if finding.severity is Severity.WARNING]
    assert warnings[0] == "RANK001"


@pytest.mark.parametrize(("number", "severity"), [(0, Severity.INFO), (1, Severity.WARNING)])
def test_ranks_whose_devices_have_different_numbers_share_none(number: int, severity: Severity) -> None:
    run = tracekit.load(SHARED, cache=False)
    first, second = (run.trace(rank) for rank in run.ranks)
    tables = {name: table for name, table in second.tables.items() if "device" in table.columns}
    second = second.replace(**{name: table.with_columns(pl.col("device") + number) for name, table in tables.items()})
    assert exposed(drawn_traces.run(first, second)).severity is severity
