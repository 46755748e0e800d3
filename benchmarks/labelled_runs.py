"""Accuracy of the rules: random simulated runs, with a known fault or none, judged by all rules.

    python -m benchmarks.labelled_runs --runs 200 --jobs 4 --out docs/lab/labelled_runs.md

The seed is random unless --seed is given. A rule must report a fault with its code if the cost is large enough, and
must not report a code that the truth does not contain; smaller costs are not counted, and a run whose fault costs less
is drawn again, at most six times. The cost of a setting itself must be found only in runs without another fault, which
may cause it too. The recorded pairs of faults and healthy twins in sample_traces/faults are judged as well.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from benchmarks import labelled_pairs, labelled_report
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.rules import unreported_causes
from tracekit.rules.engine import check
from tracekit.rules.rule import Finding, Severity
from tracekit.simulate import faults, memory, run
from tracekit.simulate.faults import Fault, FaultRequest
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, Job
from tracekit.simulate.run import KnownFault

STRATEGIES = (DDP, FSDP1, FSDP2, HSDP, YAFSDP)
_HEALTHY = 0.25  # share of the runs without a fault
_MATTERS = 0.03  # share of the run from which a fault must be found
_MATTERS_OF = {"COMM001": 0.25}  # it reports from 20% of the step
# Retries and stages of a save are parts of the same stall; a rank that is slower from some step on has a lower clock.
_SAME_AS = {"MEM007": "MEM001", "CKPT004": "CKPT001", "STEP003": "RANK001"}
_REPORTED_AS = {"RANK001": "STEP003"}
_MOST_DRAWS = 6  # draws of a run whose fault costs too little
_FULL = 0.9  # share of the device's memory that a healthy run may need


@dataclass(frozen=True)
class Judged:
    """One run: its requested and known faults, and the findings on it (warnings and errors)."""

    job: Job
    requested: tuple[str, ...]
    faults: tuple[KnownFault, ...]
    total_ns: int
    findings: tuple[Finding, ...]

    @property
    def fault(self) -> str:
        """Return the name of the requested fault; "healthy" for none."""
        return self.requested[0] if self.requested else "healthy"

    def share(self, code: str) -> float:
        """Return the share of the run that the faults of a code cost; 0 if there is none."""
        return sum(fault.cost_ns * len(fault.steps) for fault in self.faults if fault.code == code) / self.total_ns

    def must_be_found(self, code: str) -> bool:
        """Whether the rule of a code must report this run."""
        requested = {faults.FAULTS[name].code for name in self.requested}
        return (not requested or code in requested) and self.share(code) >= _MATTERS_OF.get(code, _MATTERS)

    def findings_of(self, code: str) -> list[Finding]:
        """Return the findings of a code."""
        # What a replay prices below the thresholds of a rule is no report of the rule.
        own = (finding for finding in self.findings if finding.subject != unreported_causes.SUBJECT)
        return [finding for finding in own if finding.code == code]

    def reports_of(self, code: str) -> list[Finding]:
        """Return the findings that report a fault of a code: its own, else those on a special case of it."""
        return self.findings_of(code) or self.findings_of(_REPORTED_AS.get(code, code))

    def is_missed(self, code: str) -> bool:
        """Whether a fault that must be reported was not."""
        return self.must_be_found(code) and not self.reports_of(code)

    def is_wrong(self, code: str) -> bool:
        """Whether the rule of a code reported a fault that the run does not have."""
        return bool(self.findings_of(code)) and self.share(code) <= 0 and self.share(_SAME_AS.get(code, code)) <= 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and simulate runs, judge them, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the runs (default: 1)")
    parser.add_argument("--fault", action="append", default=[], help="draw only this fault, or healthy; repeatable")
    parser.add_argument("--out", type=Path, default=None, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    runs: list[Judged] = []
    for number, result in enumerate(_judge_in_parallel(options.runs, seed, tuple(options.fault), options.jobs)):
        runs.append(result)
        for line in labelled_report.mistakes(result):
            sys.stderr.write(f"run {number}: {line}\n")
    pairs = [] if options.fault else labelled_pairs.judge_pairs()
    text = labelled_report.document(runs, seed, pairs, jobs=options.jobs)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def judge_runs(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[Judged]:
    """Yield judged runs drawn from a seed, with each fault equally often."""
    draw = random.Random(seed)
    kinds = [FAULT_OF[name] for name in only] or _kinds(draw, count)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            yield _judge_run(draw, kinds[number % len(kinds)], Path(folder) / str(number))


def _judge_in_parallel(count: int, seed: int, only: Sequence[str], jobs: int) -> Iterator[Judged]:
    """Yield runs as `judge_runs` does, from several processes with different seeds."""
    if jobs == 1:
        yield from judge_runs(count, seed, only)
        return
    shares = [count // jobs + (1 if number < count % jobs else 0) for number in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for part in [pool.submit(_part, share, seed + number, only) for number, share in enumerate(shares)]:
            yield from part.result()


def _part(count: int, seed: int, only: Sequence[str]) -> list[Judged]:
    return [replace(r, findings=tuple(map(_without_evidence, r.findings))) for r in judge_runs(count, seed, only)]


def _without_evidence(finding: Finding) -> Finding:
    return replace(finding, evidence=finding.evidence.clear())


_PLAIN = {name: fault for name, fault in faults.FAULTS.items() if fault.plain and not fault.traces_of}
FAULT_OF: dict[str, Fault | None] = {"healthy": None, **_PLAIN}


def _kinds(draw: random.Random, count: int) -> list[Fault | None]:
    listed = list(_PLAIN.values())
    faulty = count - round(_HEALTHY * count)
    kinds: list[Fault | None] = [None] * (count - faulty)
    while len(kinds) < count:
        kinds += draw.sample(listed, min(len(listed), count - len(kinds)))
    draw.shuffle(kinds)
    return kinds


def _judge_run(draw: random.Random, fault: Fault | None, out: Path) -> Judged:
    for attempt in range(_MOST_DRAWS):
        simulated = _simulate_run(draw, fault, out)
        if fault is None or simulated.must_be_found(fault.code) or attempt == _MOST_DRAWS - 1:
            break
    findings = check(tracekit.load(str(out), cache=False)).findings
    return replace(simulated, findings=tuple(finding for finding in findings if finding.severity >= Severity.WARNING))


def _simulate_run(draw: random.Random, fault: Fault | None, out: Path) -> Judged:
    """Return a simulated and written run, without findings."""
    while True:  # until a drawn job supports the fault and fits in memory
        job, requested = _draw_job(draw, fault)
        try:
            full = max(map(memory.peak_bytes, (job, faults.inject(job, requested))))
            if full <= _FULL * job.hardware.memory_bytes:
                done = run.simulate(job, requested, out, arguments={"seed": job.seed}, force=True)
                return Judged(
                    done.job,
                    tuple(request.fault.name for request in requested),
                    tuple(done.known_faults),
                    done.recording.total_ns,
                    (),
                )
        except InputError:
            continue


def _draw_job(draw: random.Random, fault: Fault | None) -> tuple[Job, tuple[FaultRequest, ...]]:
    strategy = draw.choice([name for name in STRATEGIES if fault is None or name in fault.strategies])
    model = models.find(draw.choice(("llama2-7b", "llama2-13b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    gpus = draw.choice((16, 32, 64) if strategy == HSDP else (8, 16, 32, 64))
    machine, seq = hardware.find(draw.choice(tuple(hardware.HARDWARE))), draw.choice((2048, 4096, 8192))
    job = Job(strategy, model, machine, gpus, seq, steps=4, seed=draw.randrange(1 << 20), ranks_written=3)
    job = replace(job, micro_batches=draw.choice((1, 1, 2)))
    return (job, ()) if fault is None else (job, (FaultRequest(fault, ()),))


if __name__ == "__main__":
    sys.exit(main())
