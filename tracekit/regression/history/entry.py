"""What a history stores of one checked run: its identity, commit, metrics, findings, and whether it passed."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.conventions import git
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.regression import baseline
from tracekit.regression.comparison import RunSamples
from tracekit.regression.samples import Values, job_samples, without_parts

MAX_TEXT = 4000

_SHAS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT")  # GitHub, GitLab, Jenkins
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME", "GIT_BRANCH")
_TEXTS = ("CI_COMMIT_MESSAGE",)
_NAME = re.compile(r"[\w./@+][\w./@+-]*")


@dataclass(frozen=True)
class Commit:
    """A commit by its name, its message and the branch it was trained on; None where not known."""

    sha: str | None = None
    text: str | None = None
    branch: str | None = None


RECORDED_FACTS = ("arguments", "versions")

_LEFT_OUT = ("arguments.out", "arguments.seed")
_MAX_FACT = 200
_ONE_IN = 20  # how seldom the median lies outside of its interval


@dataclass(frozen=True)
class MetricSummary:
    """A metric of a run in its own unit: the median over steps, and its 95% interval where there are samples enough."""

    metric: str
    median: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True)
class FindingSummary:
    """The part of a finding that a history stores."""

    finding: str
    code: str
    name: str
    severity: str
    impact_ratio: float
    cost_ns: int
    cost_bytes: int
    message: str


@dataclass(frozen=True)
class HistoryEntry:
    """One checked run. `run` is its name by content: the same files give the same, whenever they are checked."""

    run: str
    name: str
    at_ns: int | None
    commit: Commit
    identity: Mapping[str, str]
    facts: Mapping[str, str]
    """What else the manifest states: it may differ within a series, and is shown where it does."""
    tool_version: str
    passed: bool | None
    failures: tuple[str, ...]
    metrics: tuple[MetricSummary, ...]
    findings: tuple[FindingSummary, ...]

    @property
    def fingerprint(self) -> str:
        """Return the hash of the fields that must agree for runs to be in one series."""
        return _hash(sorted(self.identity.items()))[:12]

    @property
    def digest(self) -> str:
        """Return the hash of all that is stored."""
        facts = [sorted(fields.items()) for fields in (self.identity, self.facts)]
        about = [self.run, self.name, self.at_ns, vars(self.commit), facts, self.tool_version]
        return _hash([*about, self.passed, self.failures, *map(vars, self.metrics), *map(vars, self.findings)])


def history_entry(
    document: Mapping[str, Any],
    side: RunSamples,
    *,
    commit: Commit | None = None,
    failures: Sequence[str] | None = None,
) -> HistoryEntry:
    """Return the entry of a report, as JSON has it, and its samples.

    `failures` is what failed the check of it, empty where it passed; by default what the report says of its own, which
    may be nothing. Raises KeyError or TypeError where the document is no whole report.
    """
    run = document["run"]
    if failures is None and "gate" in document:
        failures = [str(name) for name in document["gate"]["failures"]]
    return HistoryEntry(
        run=_content(document, side),
        name=str(run["name"]),
        at_ns=Manifest.of(run).created_ns,
        commit=commit or Commit(),
        identity=identity(run),
        facts=facts(run),
        tool_version=str(document["tool_version"]),
        passed=None if failures is None else not failures,
        failures=tuple(failures or ()),
        metrics=tuple(
            MetricSummary(metric, float(np.median(values)), *median_interval(values), len(values))
            for metric, values in job_samples(side.samples).items()
        ),
        findings=tuple(_finding_summary(finding) for finding in document["findings"]),
    )


def with_known_commit(new: HistoryEntry, old: Commit, stated: Commit) -> HistoryEntry:
    """Return an entry with the commit that was known before, except for what a person has `stated` now."""
    sha = stated.sha or old.sha or new.commit.sha
    # Where the same files are checked again, the environment may be of another commit: its words are not of this one.
    text = next((c.text for c in (old, new.commit) if c.sha == sha and c.text), None)
    branch = stated.branch or old.branch or (new.commit.branch if new.commit.sha in (None, sha) else None)
    return replace(new, commit=Commit(sha, text, branch))


def identity(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that must agree for runs to be in one series: a baseline's fingerprint but for versions.

    An upgrade that makes training slower is a change to be seen, not the start of another series.
    """
    fields = baseline.fingerprint(Run(str(run["name"]), (), manifest=run))
    return {key: _short(value) for key, value in sorted(fields.items()) if not key.startswith("versions.") and value}


def facts(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the other fields of a run's manifest, by dotted name, as short text."""
    fields = baseline.flat({key: run.get(key) for key in RECORDED_FACTS})
    left_out = {*_LEFT_OUT, *identity(run)}
    return {field: _short(value) for field, value in sorted(fields.items()) if field not in left_out}


def median_interval(values: Values) -> tuple[float | None, float | None]:
    """Return a 95% interval of the median of what `values` (n,) were drawn from, whatever its distribution.

    Its ends are two of the values: as many lie outside on either side as a coin that many times thrown seldom shows
    (Hahn and Meeker, Statistical Intervals, 1991, section 5.2). Below 6 values there is none.

    >>> median_interval(np.arange(1.0, 11.0))
    (2.0, 9.0)
    """
    count = len(values)
    # In whole numbers: of 2**count throws `tail` show at most `below` heads, `ways` one head more.
    below, tail, ways = -1, 0, 1
    while 2 * (tail + ways) * _ONE_IN <= 1 << count and below + 1 < count / 2:
        below += 1
        tail += ways
        ways = ways * (count - below) // (below + 1)
    if below < 0:
        return None, None
    ordered = np.sort(values)
    return float(ordered[below]), float(ordered[count - 1 - below])


def known_commit(
    environment: Mapping[str, str], folder: Path, *, sha: str | None = None, branch: str | None = None
) -> Commit:
    """Return the commit that is trained: as given, else from CI's environment, else from the checkout `folder`."""
    in_checkout = git.is_checkout(folder)
    stated_sha = sha or _first(environment, _SHAS)
    sha = stated_sha or (git.head(folder) if in_checkout else None)
    branch = branch or _first(environment, _BRANCHES)
    if branch is None and stated_sha is None and in_checkout:
        branch = git.output(folder, "symbolic-ref", "--quiet", "--short", "HEAD") or None
    text = _first(environment, _TEXTS)
    if text is None and in_checkout and sha and _NAME.fullmatch(sha):
        text = git.output(folder, "show", "--no-patch", "--format=%B", "--end-of-options", sha + "^{commit}", "--")
    return Commit(sha, text[:MAX_TEXT] if text else None, branch)


def _finding_summary(document: Mapping[str, Any]) -> FindingSummary:
    return FindingSummary(
        finding=str(document["id"]),
        code=str(document["code"]),
        name=str(document["name"]),
        severity=str(document["severity"]),
        impact_ratio=float(document["impact"] or 0.0),
        cost_ns=int(document["cost_ns"]),
        cost_bytes=int(document["cost_bytes"]),
        message=str(document["message"]),
    )


def _content(document: Mapping[str, Any], side: RunSamples) -> str:
    """Return a hash of the files that were checked; where they were not hashed, of what was measured in them."""
    hashes = sorted(str(file["sha256"]) for file in document["inputs"])
    if hashes and all(hashes):
        return _hash(hashes)[:32]
    order = ["metric", "rank", "step", "value"]
    return _hash(
        [
            document["run"]["name"],
            document["run"].get("created_ns"),
            without_parts(side.samples).select(order).sort(order).rows(),
        ]
    )[:32]


def _short(value: object) -> str:
    return str(value)[:_MAX_FACT]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
