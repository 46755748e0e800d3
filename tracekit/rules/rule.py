"""Rule, Finding and Report. Rules read tables of facts and yield findings; they never measure."""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from enum import IntEnum
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.quality import trace_quality
from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.stalls import Removal

_NUMBERED = re.compile(r"\bstep \((\d+)\)")
_STEP = re.compile(r"(?<![\w.])([Ss])tep(s?)\b(?!\()")

_FIRST_SENTENCE = re.compile(r".*?(?:\.(?=\s)|$)", re.DOTALL)
_KIND = "steps_from_repetition"
_MOST_DATA = 0.5
_MAX_EVIDENCE_ROWS = 10
_MIN_SHOWN_RATIO = 0.005
"""Part of a step that changes its duration as printed, in three digits."""


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
    """The cause that a replay removes to estimate a finding's cost (`tracekit.rules.cost_attribution`).

    `cause` is one of `tracekit.replay.graph.causes`, or of a plug-in. If the replay saves less than `min_saved_ratio`
    of the step, the finding is information: the step has another bottleneck behind this one.
    """

    cause: Cause
    min_saved_ratio: float = 0.005
    is_partial: bool = False
    """Whether only a part of the cause can be removed: the finding's own cost is then the upper bound of the saving."""


@dataclass(frozen=True, eq=False)
class Finding:
    """A claim about where a run loses time or memory, with its numbers, its evidence and a fix.

    `claim` is one clause that names the cause and the place at which a person acts (a rank, a line, an option), without
    its cost; `sentence` adds the cost, the one number of the finding. `message` is the evidence in words: what the rule
    measured, where. A rule gives a finding that costs time the severity WARNING, or INFO where it is doubtful; `check`
    grades it by cost and confidence (`cost_attribution.grade`).

    `impact` is the share of time lost (0 to 1): of step time, unless a field below states another. `cost_ns` is the
    time lost per step: with a replay, by how much the mean step of the run is shorter without the cause, else what the
    rule measures on the worst rank. `cost_bytes` is the memory used per rank or allocated per step: the message states
    which. A finding that costs only memory has impact 0. `confidence` ranges from 0 to 1. `evidence` contains the rows
    that prove the finding, with columns window, rank, start_ns and dur_ns where they refer to a moment in the trace.
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
    claim: str = ""
    """The cause in one clause, without a full stop; by default the first sentence of the message."""
    measured_ns: int = 0
    """The cost that the rule measured, where a replay gave another one; else 0."""
    what_if: WhatIf | None = None
    """The cause to remove in a replay; None where the rule itself measures the cost."""
    removals: tuple[Removal, ...] = ()
    """What a replay removed for the cost: causes that other findings price, and last its own. () without a replay."""
    is_priced: bool = False
    """Whether a replay without the cause gave impact and cost."""
    consequence_of: str = ""
    """The id of the finding on its cause, or on the whole of which it is a part: both are one trouble."""
    subject: str = ""
    """What the finding is about, if the rule can report several things (a unit, a checkpoint, a file); no numbers."""
    stall: str = ""
    """The cause of the single stalls that it reports (`analysis.host.host_stalls`); "" for other findings."""
    before_steps_ratio: float = 0.0
    """The part of `impact` that is lost before the first device work of the window: step times do not contain it."""
    is_of_window: bool = False
    """Whether impact and cost are of the whole window, because no steps are marked in it."""
    is_of_iterations: bool = False
    """Whether `steps` are iterations that were found by repetition, because no steps are marked."""
    is_of_training: bool = False
    """Whether `impact` is a share of training time, steps and the saves between them, instead of step time."""
    is_upper_bound: bool = False
    """Whether impact and cost are only an upper bound, which no replay has confirmed."""

    def __post_init__(self) -> None:
        """Take the first sentence of the message as the claim, where a rule, such as one of a plug-in, makes none."""
        first = _FIRST_SENTENCE.match(self.message)
        if not self.claim and first is not None:
            object.__setattr__(self, "claim", first[0].rstrip("."))

    @property
    def id(self) -> str:
        """Return an id that is stable across runs: the code, and a hash of the subject if there is one."""
        if not self.subject:
            return self.code
        return f"{self.code}-{hashlib.sha256(self.subject.encode()).hexdigest()[:8]}"

    @property
    def sentence(self) -> str:
        """The finding in one sentence, without a full stop: "Rank 1 computes longer; fixing it saves 9 ms of …"."""
        if not self.cost_in_words:
            return self.claim
        return f"{self.claim}; {'fixing it' if self.is_priced else 'it'} {self.cost_in_words}"

    @property
    def cost_in_words(self) -> str:
        """The cost and the mean step: "saves 16 ms of 190 ms a step (8.4%)" by replay, else "costs up to 16 ms of …".

        "" without one. The step is the mean; the text says whether it includes checkpoints or the first wait.
        """
        if not self.impact:
            return ""
        verb = "saves" if self.is_priced else "costs up to"
        if not self.cost_ns:
            return f"{verb} {units.share(self.impact)} of {self.time_noun}"
        duration, share = units.duration(self.cost_ns), units.share(self.impact)
        if self.is_of_window:
            return f"{verb} {duration} ({share} of {self.time_noun})"
        whole_ns = self.cost_ns / self.impact
        of_mean = f" of {units.duration(round(whole_ns))}" if self.impact < 1 and math.isfinite(whole_ns) else ""
        period = "an iteration" if self.is_of_iterations else "a step"
        included = ""
        if self.is_of_training:  # the step times that are shown elsewhere are those between saves
            included = ", checkpoints included"
        elif self.before_steps_ratio >= _MIN_SHOWN_RATIO:
            included = ", the wait before the first one included"
        return f"{verb} {duration}{of_mean} {period}{included} ({share})"

    @property
    def time_noun(self) -> str:
        """Time that the impact is a share of: "step time", or "the window" where no steps are marked.

        Of iterations that were found by repetition it is "iteration time", of findings on saves "training time".
        """
        if self.is_of_training:
            return "training time"
        if self.is_of_iterations:
            return "iteration time"
        return "the window" if self.is_of_window else "step time"

    def __repr__(self) -> str:
        return f"<Finding {self.id}, {self.severity.label}: {self.sentence}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: severity, sentence, message, fix and the first rows of evidence."""
        head = f"<b>{escaping.escape(f'{self.severity.label}: {self.sentence}', 1000)}</b> ({escaping.escape(self.id)})"
        head += f"<br>{escaping.escape(self.message, 1000)}"
        fix = f"<br><b>Fix</b> {escaping.escape(self.fix, 1000)}" if self.fix else ""
        more = self.evidence.height - _MAX_EVIDENCE_ROWS
        first = self.evidence.head(_MAX_EVIDENCE_ROWS)
        if "start_ns" in first.columns:  # a Unix time in ns is unreadable
            after_first = pl.col("start_ns") - pl.col("start_ns").min()
            first = first.with_columns(after_first).rename({"start_ns": "after_first_ns"})
        rows = escaping.frame(first) if first.height else ""
        return f"<div>{head}{fix}</div>{rows}" + (f"<p>and {more:,} more rows</p>" if more > 0 else "")


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity, then cost, highest first; upper bounds come after measured and replayed costs."""
    return tuple(
        sorted(
            findings,
            key=lambda f: (-f.severity, f.is_upper_bound, -f.impact, -f.cost_ns, -f.cost_bytes, f.code, f.subject),
        )
    )


def warnings(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings that are more than information: warnings and errors."""
    return (finding for finding in findings if finding.severity > Severity.INFO)


def cost_order(finding: Finding) -> tuple[bool, float, int, int, int]:
    """Return the key that sorts findings by cost, in ascending order.

    An upper bound is below every measured or replayed cost: it does not show that the time is lost.
    """
    cost = (finding.impact, finding.severity, finding.cost_ns, finding.cost_bytes)
    return (not finding.is_upper_bound, *cost)


def costliest(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding with the highest measured or replayed cost; None if there is none, or only upper bounds."""
    return max((finding for finding in findings if not finding.is_upper_bound), key=cost_order, default=None)


def first_to_read(findings: Iterable[Finding]) -> Finding | None:
    """Costliest of the severest findings; None without any.

    Where a recording is as doubtful as a loss is certain, the loss is what a person can act on.
    """
    return max(findings, key=lambda f: (f.severity, not is_data_quality(f.code), *cost_order(f)), default=None)


def is_data_quality(code: str) -> bool:
    """Return whether a rule judges the recording rather than the training."""
    return code.rstrip("0123456789") == "DATA"


def doubtful_data_issue(findings: Iterable[Finding]) -> Finding | None:
    """Return the issue of most of the data of a run, if nothing but data quality was found above info; else None."""
    severe = list(warnings(findings))
    issues = [finding for finding in severe if is_data_quality(finding.code)]
    if len(issues) < len(severe):
        return None
    for issue in issues:
        ratios = issue.evidence["affected_ratio"] if "affected_ratio" in issue.evidence.columns else pl.Series([0.0])
        if issue.severity is Severity.ERROR or float(str(ratios.max() or 0.0)) > _MOST_DATA:
            return issue
    return None


TIMED_FAMILIES = ("COMM", "HOST", "COMP", "RANK", "STREAM", "PIPE", "TP", "EP")
"""The families of rules on the time of steps: communication, host, compute, ranks, streams, and axes of the mesh."""


def family(code: str) -> str:
    """Return the letters of a rule's code.

    >>> family("COMM001")
    'COMM'
    """
    return code.rstrip("0123456789")


def distinct(table: pl.DataFrame, column: str) -> tuple[int, ...]:
    """Return the distinct values of an integer column, such as the ranks or steps of a finding; nulls are left out."""
    return tuple(table[column].drop_nulls().unique().sort().to_list())


def largest_first(table: pl.DataFrame, by: str, *ties: str) -> pl.DataFrame:
    """Return a table sorted by column `by` in descending order, then by `ties` in ascending order."""
    return table.sort(by, *ties, descending=[True, *[False] * len(ties)])


def median_row(table: pl.DataFrame, *by: str) -> dict[str, Any]:
    """Return the lower median row of a table with one row or more, by columns `by`."""
    return table.sort(by).row((table.height - 1) // 2, named=True)


def median_name(count: int) -> str:
    """Name of the row of `median_row`: of an even number of rows it is not their median.

    >>> median_name(2), median_name(3)
    ('lower median', 'median')
    """
    return "median" if count % 2 else "lower median"


@dataclass(frozen=True)
class Rule(ABC):
    """A judgement. Subclasses set `code` and `facts`, declare thresholds as fields, and document themselves.

    A subclass's docstring is its documentation: a first line, then the sections What it does, Why it costs, How it is
    measured, How to fix, Blind spots. Each field is a threshold that configuration can set; its type must be int,
    float, bool or str.
    """

    code: ClassVar[str]
    facts: ClassVar[tuple[TraceFact, ...]] = ()
    """The facts that `check` reads with ``run.table``: all rules share one pass over the traces."""
    part_of: ClassVar[str] = ""
    """Code of the rule whose findings contain the time of this rule's: with one, both are one trouble."""
    finding_facts: ClassVar[tuple[TraceFact, ...]] = ()
    """Facts that `check` reads only to explain a finding: too many rows to measure them of all ranks of every run."""
    fix_without_pytorch: ClassVar[str] = ""
    """The fix for a program without PyTorch, such as one in CUDA and C++; "" where the rule has none for it."""

    @classmethod
    def name(cls) -> str:
        """Return the rule's name in kebab case: ExposedCommunication is ``exposed-communication``."""
        return "".join("-" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("-")

    @abstractmethod
    def check(self, run: Run) -> Iterator[Finding]:
        """Yield the findings of this rule on `run`; none if it sees no problem."""

    def blind_spot(self, run: Run) -> str | None:  # noqa: ARG002
        """Return one sentence on why this rule cannot judge `run`; None if it can."""
        return None


@dataclass(frozen=True)
class Input:
    """An input file of a report, with its hash."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class IgnoredFinding:
    """A finding that the configuration ignores: the reason, and the last day (None: no end)."""

    finding: Finding
    reason: str
    until: date | None = None


@dataclass(frozen=True, eq=False)
class Report:
    """The result of `check` for one run: findings by severity and impact, notes, and the input files."""

    run: Run
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    inputs: tuple[Input, ...]
    tool_version: str
    ignored: tuple[IgnoredFinding, ...] = ()
    rules: tuple[str, ...] = ()
    """The codes of the rules that ran, in order."""
    blind_spots: Mapping[str, str] = field(default_factory=dict)
    """Why rules could not judge the run, by code; each is also a note."""

    @property
    def cannot_judge(self) -> str | None:
        """Return why no rule on time, of those that ran, could judge the run; None if one could."""
        timed = [code for code in self.rules if family(code) in TIMED_FAMILIES]
        judging = timed or [code for code in self.rules if family(code) != "DATA"]
        reasons = [self.blind_spots[code] for code in judging if code in self.blind_spots]
        return reasons[0] if reasons and len(reasons) == len(judging) else None


def has_found_iterations(run: Run) -> bool:
    """Return whether steps of the run are iterations that were found by repetition."""
    return _KIND in run.table(trace_quality.data_quality)["kind"]


def name_iterations(report: Report) -> Report:
    """Return the report with findings that speak of iterations, where its steps are iterations that were found."""
    if not has_found_iterations(report.run):
        return report
    findings = []
    for finding in report.findings:
        if not finding.is_of_window and finding.subject != _KIND:
            message, claim = _of_iterations(finding.message), _of_iterations(finding.claim)
            finding = replace(finding, message=message, claim=claim, is_of_iterations=True)
        findings.append(finding)
    return replace(report, findings=tuple(findings))


def _of_iterations(text: str) -> str:
    text = _NUMBERED.sub(r"iteration (\1, found by repetition)", text)
    return _STEP.sub(lambda step: f"{'I' if step[1] == 'S' else 'i'}teration{step[2]}", text)
