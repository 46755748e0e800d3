"""Advice that follows what is recorded: on training or inference with PyTorch, or on another program."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.analysis.time import breakdown, host_state
from tracekit.model.run import Run
from tracekit.rules.rule import Report, Rule

_STATE_NAMES = {host_state.PYTHON: "host", host_state.OP: "range"}
"""States of the host in evidence, by what they are in a program without PyTorch."""


class AnyProgramText(str):
    """A fix that names nothing of PyTorch: only such a one reaches the report on a program without PyTorch."""

    __slots__ = ()

    def format(self, *values: object, **named: object) -> "AnyProgramText":
        """Return the text with values in place of its fields."""
        return AnyProgramText(super().format(*values, **named))

    def __add__(self, text: str) -> "AnyProgramText":
        return AnyProgramText(super().__add__(text))


@dataclass(frozen=True)
class Advice:
    """What to do about a finding; what is not stated for inference is as for training."""

    training: str
    inference: str = ""
    other: str = ""
    """For programs without PyTorch, such as those that Nsight Systems records; by default that of the rule."""

    def suited_to(self, run: Run) -> str:
        """The advice for the program of a run."""
        program = workload.program(run)
        inference = self.inference or self.training
        if program is Program.OTHER:
            return AnyProgramText(self.other) if self.other else inference
        return inference if program is Program.INFERENCE else self.training


@dataclass(frozen=True)
class DeviceAdvice:
    """What to check of the hardware: of GPUs, or in a CPU run of the cores."""

    on_device: str
    on_host: str

    def suited_to(self, run: Run) -> str:
        """The advice for what the run computes on."""
        return self.on_device if breakdown.is_on_device(run) else self.on_host


def suit_to_program(report: Report, rules: Iterable[Rule]) -> Report:
    """Return the report with fixes that its program can follow.

    Of a program without PyTorch those are fixes that are marked as such, else those of the findings' rules
    (`Rule.fix_without_pytorch`), which may be empty: no fix of PyTorch remains.
    """
    if workload.program(report.run) is not Program.OTHER:
        return replace(report, findings=tuple(replace(finding, fix=str(finding.fix)) for finding in report.findings))
    rule_fixes = {rule.code: rule.fix_without_pytorch for rule in rules}
    findings = []
    for finding in report.findings:
        fix = finding.fix if isinstance(finding.fix, AnyProgramText) else rule_fixes.get(finding.code, "")
        findings.append(replace(finding, fix=str(fix), evidence=_with_state_names(finding.evidence)))
    return replace(report, findings=tuple(findings))


def _with_state_names(evidence: pl.DataFrame) -> pl.DataFrame:
    if evidence.schema.get("detail") != pl.String:
        return evidence
    return evidence.with_columns(pl.col("detail").replace(_STATE_NAMES))
