"""The accuracy of the rules on labelled runs: scores by rule and by fault, as Markdown."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.rules.registry import all_rules
from tracekit.simulate import faults

if TYPE_CHECKING:
    from benchmarks.labelled_pairs import Pair
    from benchmarks.labelled_runs import Judged

_DATA = "DATA"
_PLAIN = tuple(
    name for name, fault in faults.FAULTS.items() if fault.plain and not fault.traces_of
)  # the others: benchmarks.hybrid_runs
_SPREAD = "CKPT001"
_CLOSE = 0.1
_INTRODUCTION = """# Accuracy of the rules on labelled runs

    python -m benchmarks.labelled_runs --runs {count} --jobs {jobs} --out docs/lab/labelled_runs.md

{count} **simulated** runs, drawn with seed {seed}: five strategies, three machines, 8 to 64 GPUs of which three or
four ranks have a trace, three models of 3 to 6 layers, 2,048 to 8,192 tokens, one or two micro-batches, four steps; a
quarter of them without a fault, the rest with one of {faults} each, drawn again (at most six times) if it costs less
than the limit below. The same seed draws the same runs.

- *Right*: the rule warns, and the truth contains its code at 3% of the run or more (COMM001: 25%; it warns from 20%).
  A rank whose kernels are slower from some step on has a lower clock: STEP003 reports it instead of RANK001.
- *Missed*: the truth contains the code, and the rule does not warn. The cost of a strategy itself (give-way effect
  under fsdp1, exposed communication) must be found in runs without a fault; with another fault it may be part of that
  fault. Also missed are faults that four steps of three or four ranks do not prove: a suspicion that rests on few
  samples (STREAM004) is information; a slow link (RANK002) may be a late rank where ranks of its group have no trace;
  a stalled collective (STEP004) needs five others of its kind to compare with.
- *Wrong*: the rule warns, and the truth does not contain its code. Costs in between are not counted.
- *Cost off by*: error of the finding's cost per step against the truth, a simulation without the fault: median, and the
  share of findings within 10%. A finding costs what the mean step is shorter in a replay without its cause. CKPT001
  has none, because it spreads a save over the steps between saves; COMM001's cost is that of all communication, more
  than the cost of no-prefetch alone; HOST003 counts a load for each step, also before the first, where the simulator
  has none: a third more than the truth in four steps.
"""


@dataclass(frozen=True)
class Score:
    """The score of a rule: right and wrong warnings, misses, and the error of each cost."""

    code: str
    right: int
    wrong: int
    missed: int
    cost_errors: tuple[float, ...]

    @property
    def precision(self) -> float | None:
        """Return the share of warnings that are right; None without any."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else None

    @property
    def recall(self) -> float | None:
        """Return the share of faults that are found; None without any."""
        return self.right / (self.right + self.missed) if self.right + self.missed else None

    @property
    def cost_error(self) -> float | None:
        """Return the relative error of the median cost; None without any."""
        return statistics.median(self.cost_errors) if self.cost_errors else None

    @property
    def close(self) -> float | None:
        """Return the share of costs within 10%; None without any."""
        costs = self.cost_errors
        return sum(error <= _CLOSE for error in costs) / len(costs) if costs else None


def codes() -> list[str]:
    """Return the codes of all rules that can be scored, in order."""
    return sorted({rule.code for rule in all_rules() if not rule.code.startswith(_DATA)})


def score(runs: Sequence["Judged"], code: str) -> Score:
    """Return the score of the rule of a code on the runs."""
    right = [run for run in runs if run.reports_of(code) and run.must_be_found(code)]
    wrong = sum(run.is_wrong(code) for run in runs)
    missed = sum(run.is_missed(code) for run in runs)
    errors = [error for run in right if (error := _cost_error(run, code)) is not None]
    return Score(code, len(right), wrong, missed, tuple(errors))


def false_alarms(runs: Sequence["Judged"]) -> tuple[int, int]:
    """Return the number of wrong warnings on healthy runs, and the number of healthy runs."""
    healthy = [run for run in runs if not run.requested]
    warned = sum(run.is_wrong(finding.code) for run in healthy for finding in run.findings if _counts(finding.code))
    return warned, len(healthy)


def table(runs: Sequence["Judged"]) -> str:
    """Return the scores of all rules with a fault or a warning, as Markdown, and the codes of the others."""
    lines = ["| rule | right | wrong | missed | precision | recall | cost off by | within 10% |", f"|{'---|' * 8}"]
    scores = [score(runs, code) for code in codes()]
    for result in scores:
        if not (result.right or result.wrong or result.missed):
            continue
        shares = (result.precision, result.recall, result.cost_error, result.close)
        cells = " | ".join("" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {result.code} | {result.right} | {result.wrong} | {result.missed} | {cells} |")
    silent = [result.code for result in scores if not (result.right or result.wrong or result.missed)]
    return "\n".join(lines) + f"\n\nRules without a fault of their own in these runs: {', '.join(silent)}.\n"


def by_fault(runs: Sequence["Judged"]) -> str:
    """Return, for each requested fault, how often it was costly enough and how often it was found, as Markdown."""
    lines = ["| fault | rule | runs | costly enough | found | other wrong warnings |", f"|{'---|' * 6}"]
    for name in ("healthy", *_PLAIN):
        of_fault = [run for run in runs if run.fault == name]
        if not of_fault:
            continue
        code = faults.FAULTS[name].code if name in faults.FAULTS else ""
        matter = [run for run in of_fault if code and run.must_be_found(code)]
        found_count = sum(bool(run.reports_of(code)) for run in matter)
        wrong = sum(run.is_wrong(other) for run in of_fault for other in codes())
        counts = (str(len(matter)), str(found_count)) if code else ("", "")
        lines.append(f"| {name} | {code} | {len(of_fault)} | {counts[0]} | {counts[1]} | {wrong} |")
    return "\n".join(lines) + "\n"


def mistakes(run: "Judged") -> Iterator[str]:
    """Yield a line for each missed or wrong code of a run."""
    job = run.job
    where = f"{run.fault}, {job.strategy}, {job.model.name} of {job.model.layers} layers, {job.hardware.name}, "
    where += f"{job.gpus} GPUs, {job.seq} tokens, {job.micro_batches} micro-batches, seed {job.seed}"
    for code in codes():
        if run.is_missed(code):
            yield f"{code} missed at {run.share(code):.1%} of the run: {where}"
        if run.is_wrong(code):
            yield f"{code} wrong: {where}: {run.findings_of(code)[0].message}"


def document(runs: Sequence["Judged"], seed: int, pairs: Sequence["Pair"], *, jobs: int = 1) -> str:
    """Return all tables with their explanation."""
    warned, healthy = false_alarms(runs)
    parts = [
        _INTRODUCTION.format(count=len(runs), seed=seed, jobs=jobs, faults=f"{len(_PLAIN)} faults"),
        table(runs),
        f"Healthy runs: {healthy}, with {warned} warnings that the truth does not contain.\n",
        "## By fault\n",
        by_fault(runs),
    ]
    if pairs:
        parts += ["## Recorded pairs\n", _PAIRS, recorded_table(pairs)]
    return "\n".join(parts)


_PAIRS = """Recorded on CPUs by the trainers (`sample_traces/faults`), each fault with a healthy twin; findings on data
quality are left out. Faults that cost next to nothing on a CPU (reading values, allocator churn) are
information at most.
"""


def recorded_table(pairs: Sequence["Pair"]) -> str:
    """Return the findings on recorded faults and their healthy twins, as Markdown."""
    lines = ["| recorded fault | rule | on the fault | on its healthy twin |", f"|{'---|' * 4}"]
    lines += [f"| {pair.fault} | {pair.code} | {_list(pair.findings)} | {_list(pair.twin)} |" for pair in pairs]
    return "\n".join(lines) + "\n"


def _list(findings: Sequence[str]) -> str:
    return ", ".join(findings) or "nothing"


def _counts(code: str) -> bool:
    return not code.startswith(_DATA)


def _cost_error(run: "Judged", code: str) -> float | None:
    if code == _SPREAD:
        return None
    reported_ns = max(finding.cost_ns for finding in run.reports_of(code))
    true_ns = sum(fault.cost_ns * len(fault.steps) for fault in run.faults if fault.code == code) / run.job.steps
    return abs(reported_ns / true_ns - 1) if reported_ns else None
