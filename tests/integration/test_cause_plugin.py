"""A new price is two files of another distribution: a cause, and a rule whose findings it prices."""

import json
from pathlib import Path

import pytest

from dashboard.run_store import what_if
from tests.support import cli_runner
from tests.unit.simulate.jobs import job, written

CAUSE = """
from tracekit.replay.graph.causes.cause import Cause, Kind

def without_compute(graph):
    '''Set the time of compute to zero.'''
    return graph.with_durations(graph.matches("kind", "compute").nonzero()[0], 0)

SLOW_KERNELS = Cause(
    name="slow-kernels",
    codes=("MINE001",),
    summary="kernels take no time",
    basis="kernels of compute",
    kind=Kind.COMPUTE,
    transform=without_compute,
)
"""
RULE = """
from dataclasses import dataclass
from typing import ClassVar
from mine_cause import SLOW_KERNELS
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf

@dataclass(frozen=True)
class SlowKernels(Rule):
    '''Kernels that take time.

    What it does: reports that kernels take time.
    '''
    code: ClassVar[str] = "MINE001"

    def check(self, run):
        yield Finding(
            self.code, Severity.WARNING, "Kernels take time.", "", impact=0.9, cost_ns=1, what_if=WhatIf(SLOW_KERNELS)
        )
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a simulated run; the distribution with the rule and the cause is installed."""
    metadata = tmp_path / "plugin" / "mine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "plugin" / "mine_cause.py").write_text(CAUSE)
    (tmp_path / "plugin" / "mine_rule.py").write_text(RULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[tracekit.rules]\nslow = mine_rule:SlowKernels\n\n[tracekit.causes]\nslow = mine_cause:SLOW_KERNELS\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    written(job("fsdp2", steps=4, ranks_written=2), tmp_path / "run")
    return tmp_path / "run"


def printed(*words: object) -> str:
    done = cli_runner.tracekit(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cause_of_another_distribution_prices_its_rule_and_is_listed_everywhere(run: Path):
    report = json.loads(printed("check", run, "--fail-on", "never", "--format", "json"))
    (finding,) = (finding for finding in report["findings"] if finding["code"] == "MINE001")
    assert finding["is_priced"]
    answers = json.loads(printed("whatif", run, "--format", "json"))["without"]
    (answer,) = (answer for answer in answers if answer["cause"] == "slow-kernels")
    assert (answer["code"], answer["summary"]) == ("MINE001", "kernels take no time")
    assert finding["cost_ns"] == answer["saved_ns"] > 0.1 * answer["without_ns"]
    (named,) = json.loads(printed("whatif", run, "--without", "slow-kernels", "--format", "json"))["without"]
    assert named == answer
    assert "slow-kernels" in what_if.cause_names()
    assert "Kernels that take time." in printed("explain", "MINE001")
    assert "MINE001" in printed("explain", "--kind", "rule")


def test_without_the_distribution_the_cause_is_unknown():
    assert "slow-kernels" not in what_if.cause_names()
    done = cli_runner.tracekit("whatif", ".", "--without", "slow-kernels")
    assert done.returncode != 0
    assert "'slow-kernels' is not a known cause" in done.stderr
