"""What findings cost, by replay: the same fault taken away from the recorded steps, where the replay can tell."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tracekit.analysis import contention
from tracekit.rule import Finding, Severity
from tracekit.trace import Run
from tracekit.whatif import saving, steps
from tracekit.whatif.nodes import WORK

CAUSE_OF: Mapping[str, str] = {
    "HOST001": "late-launch",
    "HOST002": "blocking-sync",
    "HOST003": "data-loading",
    "COMM001": "communication",
    "COMM002": "small-collectives",
    "COMM003": "micro-batch-reductions",
    "STREAM001": "give-way",
    "STREAM002": "shared-queue",
    "STREAM003": "slowed-compute",
    "STREAM004": "slowed-collectives",
    "RANK001": "straggler",
    "RANK002": "slow-link",
    "MEM002": "recomputation",
}
"""By rule: the cause whose absence its findings are priced by. Saves are CKPT001's own: by its log, over all steps."""
_MAX_ERROR = 0.02
_LAUNCHED = 0.9
"""Of a device's work the launch must be known of this share: else nothing says what it waited for."""
_LEAST_WORK = 100
"""Of less work on each rank no waits can be inferred."""


def priced(run: Run, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with the cost that a replay without their cause gives, where it is better known than theirs.

    That is for warnings of time lost on devices, one of a code, in runs that tell the launches of 90% of their work, do
    a hundred pieces of it or more on a rank, and are reproduced within 2%; a cost is per step of those that the finding
    names. All others stay as they are.
    """
    counts = Counter(each.code for each in findings)
    wanted = [each for each in findings if _is_priced(each, counts)]
    if not wanted or not run.table(contention.device_count)["devices"].sum() or not _is_reproduced(run):
        return list(findings)
    return [_priced(run, each) if each in wanted else each for each in findings]


def _is_priced(finding: Finding, counts: Mapping[str, int]) -> bool:
    told = finding.code in CAUSE_OF and counts[finding.code] == 1
    if finding.code == "STREAM002" and finding.subject:
        return False  # turns on a communicator: their cost depends on links that a replay does not know
    return told and finding.severity >= Severity.WARNING and finding.cost_ns > 0 and bool(finding.steps)


def _is_reproduced(run: Run) -> bool:
    for graph in saving.graphs_of(run):
        work = graph.column("what") == WORK
        if (
            work.sum() < _LEAST_WORK * graph.frame["rank"].n_unique()
            or (graph.launch[: graph.count][work] >= 0).sum() < _LAUNCHED * work.sum()
        ):
            return False
    replayed = saving.replayed(run)
    recorded_ns = steps.total_ns(replayed, "duration_ns")
    return recorded_ns > 0 and abs(steps.total_ns(replayed, "replayed_ns") - recorded_ns) <= _MAX_ERROR * recorded_ns


def _priced(run: Run, finding: Finding) -> Finding:
    found = saving.saving(run, CAUSE_OF[finding.code])
    if found.why_not or found.saved_ns <= 0:
        return finding
    count = found.steps.select("window", "step").n_unique()
    cost_ns = found.saved_ns * count // len(finding.steps)
    return replace(finding, cost_ns=cost_ns, impact=min(1.0, cost_ns / found.step_ns))
