"""What `check` says of real recordings into which an independent program put a fault of known cost.

    python -m benchmarks.perturbed FOLDER… [--seeds 3] [--out FILE]

Each FOLDER holds the recordings of all ranks of one job. `perturbation_graph` replays them with one change, such as a
rank whose kernels are slower, and writes what would have been recorded. A change is found if `check` reports it with
the right code and rank, and the control (the recording replayed unchanged) does not, or at a lower cost. Each changed
recording is also checked with the control as its baseline, at the default settings: what costs 10% or more should fail.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from benchmarks import injected_faults, perturbation_graph
from benchmarks.documents import put_between
from benchmarks.injected_faults import KINDS, Kind
from benchmarks.perturbation_graph import Job
from tracekit.regression import baseline as baselines
from tracekit.regression import gate
from tracekit.regression.baseline import Baseline
from tracekit.rules import cost_attribution, engine
from tracekit.rules.model_parallel import ExposedTensorParallel
from tracekit.rules.rule import Finding, Report, Severity

SIZES = (0.05, 0.12, 0.3)
"""How large a change is, as a share of a step."""
MATTERS = 0.03
"""What costs a smaller share of the recording need not be found."""
FAILS = 0.1
"""What costs this share of the recording should fail a check against the control."""
_NOTHING_SLOWER = ("clock skew", "missing rank")


@dataclass(frozen=True)
class Result:
    """What `check` said of one changed recording."""

    folder: str
    kind: str
    size: float
    seed: int
    lost_ratio: float
    """How much longer the recording is, as a share of its length."""
    truth_ns: float
    """How much longer a step is."""
    reported: str | None
    """The code and severity that report it; None if none does."""
    cost_ns: float | None
    """What the finding says that it costs a step, beyond what its cause costs in the control."""
    unexpected: tuple[str, ...]
    """Further warnings that the control does not have, and whose cause is not there."""
    failures: tuple[str, ...] = ()
    """What fails a check with the control as its baseline."""

    @property
    def matters(self) -> bool:
        """Whether the change costs enough that it should be found."""
        return self.lost_ratio >= MATTERS and self.kind not in _NOTHING_SLOWER

    @property
    def should_fail(self) -> bool:
        """Whether the change costs enough that a check against the control should fail."""
        return self.lost_ratio >= FAILS and self.kind not in _NOTHING_SLOWER


@dataclass(frozen=True, eq=False)
class Control:
    """The recordings replayed unchanged: what `check` says of them, and a baseline of them."""

    report: Report
    baseline: Baseline
    below_thresholds: tuple[Finding, ...] = ()
    """What rules whose costs no replay prices measure in the control, even if it is too little to be reported."""

    def cost_ns(self, finding: Finding) -> int:
        """Cost in the control of the cause of a finding on a changed recording, by a replay if it has one."""
        if finding.removals:
            return cost_attribution.saved_by(self.report, finding.removals)
        same = [other.cost_ns for other in self.report.findings if other.id == finding.id]
        return max(same or [other.cost_ns for other in self.below_thresholds if other.code == finding.code], default=0)

    @classmethod
    def of(cls, report: Report) -> "Control":
        """Return a control by its report."""
        below_thresholds = tuple(ExposedTensorParallel(max_exposed_ratio=0.0).check(report.run))
        return cls(report, baselines.of_reports([(report, report.run)]), below_thresholds)


def measure(folder: Path, kind: Kind, size: float, seed: int, scratch: Path, control: Control) -> Result:
    """Change a job's recordings, check them, and compare with the control."""
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    steps = max(len(injected_faults.steps_of(job.ranks[0])), 1)
    key = f"{folder.name} {kind.name} {size} {seed}"
    culprit = _apply_by_cost(job, kind, size, key) if kind.by_cost else kind.apply(job, size, random.Random(key))
    length_us = max(rank.end for rank in job.ranks) - min(rank.start for rank in job.ranks)
    with tempfile.TemporaryDirectory(dir=scratch) as written:
        report = check_job(job, Path(written))
        failures = gate.judge(report, Severity.ERROR, baseline=control.baseline).failures
    findings = report.findings
    truth_ns = 1000 * job.lost_in_steps_us() / steps
    match, cost_ns = _matching(findings, control, kind.codes, culprit, truth_ns)
    control_keys = {(finding.code, finding.subject) for finding in control.report.findings}
    allowed = {*kind.codes, *kind.also}
    unexpected = [
        f"{finding.code} {finding.subject}"
        for finding in findings
        if finding.severity >= Severity.WARNING
        and finding.code not in allowed
        and (finding.code, finding.subject) not in control_keys
    ]
    return Result(
        folder.name,
        kind.name,
        size,
        seed,
        job.lost_us / length_us,
        truth_ns,
        match,
        cost_ns,
        tuple(unexpected),
        failures,
    )


_STRONGEST = 64.0
"""A change that costs less than its share of the step even so strong stays as strong."""
_BISECTIONS = 10
_NEAR_SHARE = 0.1
"""Largest distance of the cost from the requested share."""


def _apply_by_cost(job: Job, kind: Kind, share: float, key: str) -> int | None:
    """Change a job so that its steps take longer by a share; return the rank at fault."""
    job.replay()
    whole_us = max(rank.new_end - (rank.first_of_steps.new_start or 0.0) for rank in job.ranks)
    weakest, strongest = 0.0, _STRONGEST
    size = 0.5
    for _ in range(_BISECTIONS):
        job.undo_changes()
        kind.apply(job, size, random.Random(key))
        lost_ratio = job.lost_in_steps_us() / whole_us
        if abs(lost_ratio / share - 1) < _NEAR_SHARE:
            break
        weakest, strongest = (size, strongest) if lost_ratio < share else (weakest, size)
        size = (
            min(size * 4, _STRONGEST) if strongest == _STRONGEST and lost_ratio < share else (weakest + strongest) / 2
        )
    job.undo_changes()
    return kind.apply(job, size, random.Random(key))


def check_job(job: Job, folder: Path) -> Report:
    """Replay a job, write its recordings to a folder, and return what `check` finds, measured for a baseline."""
    job.replay()
    for rank, document in zip(job.ranks, job.documents(), strict=True):
        perturbation_graph.write(document, folder / f"rank{rank.number}.pt.trace.json.gz")
    run = tracekit.load(str(folder), cache=False)
    return engine.check(run, facts=baselines.FACTS)


def _matching(
    findings: Sequence[Finding], control: Control, codes: Sequence[str], culprit: int | None, truth_ns: float
) -> tuple[str | None, float | None]:
    """Return code and severity of the finding that reports the change, and its cost: warnings first, then by `codes`.

    The first code is that of the cause itself. A finding reports the change if it names the rank at fault, and costs a
    quarter of the change or more beyond the control. The costs of several that report it add up where one is priced by
    what it costs besides the other.
    """
    fitting = [
        (finding, finding.cost_ns - control.cost_ns(finding))
        for finding in sorted(findings, key=lambda f: (f.severity < Severity.WARNING, -f.cost_ns))
        if finding.code in codes and (culprit is None or _names(finding, culprit))
    ]
    parts = [(finding, cost_ns) for finding, cost_ns in fitting if cost_ns >= truth_ns / 4]
    if not parts:
        return None, None
    first, cost_ns = min(parts, key=lambda part: (part[0].severity < Severity.WARNING, codes.index(part[0].code)))
    more_ns = sum(more_ns for other, more_ns in parts if _are_added(first, other))
    return f"{first.code} {first.severity.name.lower()}", cost_ns + more_ns


def _names(finding: Finding, culprit: int) -> bool:
    """Whether a finding names a rank; one on ranks that are late in turn names all of these, so none."""
    return not finding.ranks or (culprit in finding.ranks and (finding.code != "RANK003" or len(finding.ranks) == 1))


def _are_added(first: Finding, second: Finding) -> bool:
    """Return whether two warnings are parts of one cost: one is priced by what it costs besides the other's cause."""
    if first is second or min(first.severity, second.severity) < Severity.WARNING:
        return False
    pairs = ((first, second), (second, first))
    return any(
        bool(a.removals) and a.removals[-1].cause in {removal.cause for removal in b.removals[:-1]} for a, b in pairs
    )


def table(results: Sequence[Result]) -> list[str]:
    """Return the results as lines of Markdown: for each kind of fault, over all recordings."""
    lines = [
        "| fault | recordings | cost ≥ 3% | found | as a warning | price within 15% | median error | unexpected "
        "| cost ≥ 10% | fails against the control |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in [*dict.fromkeys(result.kind for result in results), None]:
        of_kind = [result for result in results if name in (None, result.kind)]
        due = [result for result in of_kind if result.matters]
        matched = [result for result in due if result.reported]
        errors = [abs(r.cost_ns / r.truth_ns - 1) for r in matched if r.cost_ns is not None]
        cells = (
            name or "**all**",
            str(len(of_kind)),
            str(len(due)),
            str(len(matched)),
            str(sum("info" not in (result.reported or "") for result in matched)),
            str(sum(error <= 0.15 for error in errors)),
            f"{statistics.median(errors):.0%}" if errors else "",
            str(sum(len(result.unexpected) for result in of_kind)),
            str(sum(result.should_fail for result in of_kind)),
            str(sum(result.should_fail and bool(result.failures) for result in of_kind)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all kinds and sizes on all folders, print the table and what was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--host-speed", type=float, help="first make the hosts this many times as fast")
    parser.add_argument("--kind", action="append", help="only this kind of fault; repeatable")
    parser.add_argument("--out", type=Path, help="put the table between the marks of this file")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.folders
        if options.host_speed:
            folders = [perturbation_graph.with_faster_hosts(f, Path(scratch), options.host_speed) for f in folders]
        results = list(_measure_all(folders, kinds, options.seeds, options.first_seed, Path(scratch)))
    lines = table(results)
    print("\n".join(lines))
    print()
    for result in results:
        passes = result.should_fail and not result.failures
        if (result.matters and not result.reported) or result.unexpected or passes:
            print(
                f"{result.folder}, {result.kind} {result.size:.0%}, seed {result.seed}: costs {result.lost_ratio:.1%}, "
                f"found {result.reported}, unexpected {', '.join(result.unexpected) or 'none'}"
                f"{', passes against the control' if passes else ''}"
            )
    if options.out:
        put_between(options.out, "benchmarks.perturbed", lines)
    return 0


def _measure_all(
    folders: Iterable[Path], kinds: Sequence[Kind], seeds: int, first: int, scratch: Path
) -> Iterable[Result]:
    for folder in folders:
        job = perturbation_graph.load(folder.glob("*.json.gz"))
        with tempfile.TemporaryDirectory(dir=scratch) as written:
            control = Control.of(check_job(job, Path(written)))
        for kind in kinds:
            if len(job.ranks) < kind.needs_ranks:
                continue
            for size in SIZES:
                for seed in range(first, first + seeds):
                    result = measure(folder, kind, size, seed, scratch, control)
                    print(replace(result, folder=folder.name), file=sys.stderr)
                    yield result


if __name__ == "__main__":
    sys.exit(main())
