"""Rule and Finding: what a judgement is. Rules read tables of facts and yield findings; they never measure."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import IntEnum
from typing import ClassVar

import polars as pl

from tracekit.model import escaping
from tracekit.model.run import Run
from tracekit.model.trace import Fact


class Severity(IntEnum):
    """How bad a finding is. Ordered: ``Severity.WARNING < Severity.ERROR``."""

    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        """Return the lower-case name used in options and reports."""
        return self.name.lower()


@dataclass(frozen=True)
class WhatIf:
    """What a replay of the run takes away to tell what a finding costs (`tracekit.rules.cost_attribution`).

    `cause` is a name of `tracekit.replay.graph.causes`. A finding whose replay saves less than `least_ratio` of the step is
    information: something else would hold it up next.
    """

    cause: str
    min_saved_ratio: float = 0.005
    is_partial: bool = False
    """Whether only a part of the cause can be taken away: then the finding's own cost bounds what is saved."""


@dataclass(frozen=True, eq=False)
class Finding:
    """A claim about where a run loses time or memory, with its numbers, its evidence and what to change.

    `impact` is the share of step time lost (0 to 1), `cost_ns` the time lost per step on the worst rank, `cost_bytes`
    the memory it takes per rank, or takes anew every step: the message says which. What costs memory only has impact 0.
    `confidence` runs from 0 to 1. `evidence` holds the rows that prove it: with columns window, rank, start_ns and
    dur_ns where a moment in the trace can be shown.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    impact: float = 0.0
    cost_ns: int = 0
    cost_bytes: int = 0
    confidence: float = 1.0
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    evidence: pl.DataFrame = field(default_factory=pl.DataFrame)
    what_if: WhatIf | None = None
    """What is taken away to price it; None where its cost is as the rule measures it."""
    subject: str = ""
    """What it is about where a rule can speak of several things (a unit, a checkpoint, a file); never a number."""

    @property
    def id(self) -> str:
        """Return a name that stays the same from run to run: the code, and a hash of the subject where there is one."""
        if not self.subject:
            return self.code
        return f"{self.code}-{hashlib.sha256(self.subject.encode()).hexdigest()[:8]}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: severity, message, fix and the first rows of evidence."""
        head = f"<b>{escaping.escape(f'{self.severity.label} {self.id}')}</b> {escaping.escape(self.message, 1000)}"
        fix = f"<br><b>Fix</b> {escaping.escape(self.fix, 1000)}" if self.fix else ""
        more = self.evidence.height - _MAX_EVIDENCE_ROWS
        rows = (
            escaping.frame(_with_relative_time(self.evidence.head(_MAX_EVIDENCE_ROWS))) if self.evidence.height else ""
        )
        return f"<div>{head}{fix}</div>{rows}" + (f"<p>and {more:,} more rows</p>" if more > 0 else "")


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, the gravest and costliest first."""
    return tuple(sorted(findings, key=lambda f: (-f.severity, -f.impact, -f.cost_ns, -f.cost_bytes, f.code, f.subject)))


_MAX_EVIDENCE_ROWS = 10


def _with_relative_time(evidence: pl.DataFrame) -> pl.DataFrame:
    # Nobody can read a Unix time in ns.
    start_ns = pl.col("start_ns")
    after_first = (start_ns - start_ns.min()).alias("after_first_ns")
    return evidence.select(after_first if name == "start_ns" else name for name in evidence.columns)


@dataclass(frozen=True)
class Rule(ABC):
    """A judgement. Subclasses set `code` and `facts`, declare thresholds as fields, and document themselves.

    A subclass's docstring is its documentation: a first line, then the sections What it does, Why it costs, How it is
    measured, How to fix, Blind spots. Each field is a threshold that configuration can set; its type must be int,
    float, bool or str.
    """

    code: ClassVar[str]
    facts: ClassVar[tuple[Fact, ...]] = ()
    """The facts `check` reads by ``run.table``, so that all rules share one pass over the traces."""

    @classmethod
    def name(cls) -> str:
        """Return the rule's name in kebab case: ExposedCommunication is ``exposed-communication``."""
        return "".join("-" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("-")

    @abstractmethod
    def check(self, run: Run) -> Iterator[Finding]:
        """Yield the findings of this rule on `run`; nothing where all is well."""

    def blind_spot(self, run: Run) -> str | None:  # noqa: ARG002
        """Return one sentence on why this rule cannot judge `run`; None where it can."""
        return None


@dataclass(frozen=True)
class Input:
    """A file that was read, with its hash, so that a report says what it speaks of."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class IgnoredFinding:
    """A finding that the configuration accepts: why, and until when (None: for good)."""

    finding: Finding
    reason: str
    until: date | None = None


@dataclass(frozen=True, eq=False)
class Report:
    """What `check` found of one run: findings by severity and impact, notes, and the inputs it rests on."""

    run: Run
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    inputs: tuple[Input, ...]
    tool_version: str
    ignored: tuple[IgnoredFinding, ...] = ()
    rules: tuple[str, ...] = ()
    """The codes of the rules that were asked, in their order."""
    blind_spots: Mapping[str, str] = field(default_factory=dict)
    """Why rules could not judge, by code; each is a note too."""
