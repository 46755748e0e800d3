"""The gate against recorded truth: how often it cries wolf, and how often it finds a regression and names its cause.

    python -m benchmarks.gate --runs /tmp/gate-runs --out docs/lab/gate_accuracy.md

Trainings are recorded one after the other on this machine, without a fault and with one of five that make a step (of
checkpointing: training as a whole) take about 10% longer by real work. Each recording is checked against a baseline of
the five recordings without a fault right before it, as a build is checked against those of the main branch: one without
a fault must pass (A/A), one with a fault must fail, and its first cause must be the fault's (A/B). Recordings that are
in the folder already are reused, so that an interrupted series can be resumed.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tracekit
from benchmarks.documents import put_between
from tracekit.regression import baseline as baselines
from tracekit.regression import gate as checks
from tracekit.regression.baseline import Baseline, Recording
from tracekit.regression.gate import CheckResult
from tracekit.regression.metrics import METRICS, metric_of
from tracekit.regression.samples import job_samples
from tracekit.report import baseline_json as saved
from tracekit.rules import engine
from tracekit.rules.rule import Report, Severity

_OPTIONS = (
    "--device cpu --model micro --max-norm 0 --keep 1 --batch 8 --tokens 128 --strategy fsdp2 --world-size 2 "
    "--prefetch 1 --profile-wait 30 --profile-warmup 2 --profile-active 12 --steps 60 --checkpoint-every 10"
)
_TOKENS_PER_STEP = 2 * 8 * 128
HEALTHY = "healthy"
BASELINE_RECORDINGS = 5
_TIMES = tuple(metric.key for metric in METRICS if metric.fails_check and metric.unit.is_time)


@dataclass(frozen=True)
class Fault:
    """A regression: the trainers' option for it, and what each step, or save, then does in addition."""

    name: str
    option: str
    what: str


FAULTS = (
    Fault("compute", "more-compute=24", "each layer multiplies its output 24 times more"),
    Fault("communication", "more-communication=1024", "each layer adds up 1 MiB more over the ranks"),
    Fault("checkpointing", "small-tensors=70", "each save holds 70 small tensors more"),
    Fault("memory", "more-memory=60", "each layer keeps 60 copies of its output to the end of the step"),
    Fault("host", "late-launch=3ms", "Python is busy 3 ms before each layer; only times show it, no counter"),
)
_ROUND = (HEALTHY, "compute", "communication", HEALTHY, "checkpointing", "memory", HEALTHY, "host")


@dataclass(frozen=True, eq=False)
class Recorded:
    """One recording, checked."""

    kind: str
    report: Report
    recording: Recording


@dataclass(frozen=True, eq=False)
class CheckedRecording:
    """A recording compared with the baseline before it."""

    kind: str
    gate: CheckResult

    @property
    def has_failed(self) -> bool:
        return bool(self.gate.failures)

    @property
    def failed_by_time(self) -> bool:
        return any(change.metric in _TIMES for change in self.gate.regressions)

    @property
    def cause(self) -> str:
        return self.gate.causes[0].name if self.gate.causes else ""

    def change(self, metric: str) -> float | None:
        assert self.gate.comparison is not None
        changes = [change.change for change in self.gate.comparison.changes if change.metric == metric]
        return changes[0] if changes else None


def schedule(rounds: int) -> list[str]:
    """Kinds of recordings in order: as many without a fault as a baseline needs, then rounds."""
    return [HEALTHY] * BASELINE_RECORDINGS + list(_ROUND) * rounds


def record(folder: Path, kinds: Sequence[str]) -> None:
    """Record what is not there yet. Ends with what a training said that fails."""
    options = {fault.name: ["--fault", fault.option] for fault in FAULTS}
    for number, kind in enumerate(kinds):
        out = folder / f"{number:04d}-{kind}"
        if out.is_dir():
            continue
        partial = out.with_suffix(".partial")
        command = [sys.executable, "-m", "instrumented_trainers", *_OPTIONS.split(), *options.get(kind, [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--out", str(partial), "--overwrite"],
            check=False, capture_output=True, text=True, timeout=600, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        shutil.rmtree(partial / "checkpoints")  # the log describes them
        partial.rename(out)
        print(f"{out.name} of {len(kinds)}", file=sys.stderr, flush=True)


def check_recordings(folder: Path) -> list[Recorded]:
    """Return all recordings of a folder in the order they were made."""
    recordings = []
    for path in sorted(folder.glob("[0-9]*-*")):
        if path.suffix:
            continue
        run = tracekit.load(str(path), cache=False)
        report = engine.check(run, facts=baselines.FACTS)
        recordings.append(Recorded(path.name.partition("-")[2], report, Recording.of(run, report)))
    return recordings


def check_all(recorded: Sequence[Recorded], count: int = BASELINE_RECORDINGS) -> Iterator[CheckedRecording]:
    """Yield each recording compared with the `count` recordings without a fault before it."""
    healthy: list[Recorded] = []
    for recording in recorded:
        if len(healthy) >= count:
            before = [earlier.recording for earlier in healthy[-count:]]
            base = Baseline("before", baselines.fingerprint(recording.report.run), tuple(before))
            yield CheckedRecording(recording.kind, checks.judge(recording.report, Severity.ERROR, baseline=base))
        if recording.kind == HEALTHY:
            healthy.append(recording)


def lines(recorded: Sequence[Recorded]) -> list[str]:
    """Return the tables, as lines of Markdown."""
    checked_recordings = list(check_all(recorded))
    table = [
        "| what was done | recordings | failed | right cause first | failed by time alone | step, wall | processors |",
        "|---|---:|---:|---:|---:|---:|---:|",
        _row("nothing (A/A)", [result for result in checked_recordings if result.kind == HEALTHY], None),
    ]
    table += [_row(f"{f.name}: {f.what}", [e for e in checked_recordings if e.kind == f.name], f.name) for f in FAULTS]
    healthy = [entry.recording for entry in recorded if entry.kind == HEALTHY]
    return [*table, "", *_spreads(healthy), "", _machine_load(healthy)]


def _row(label: str, checks_of_kind: Sequence[CheckedRecording], cause: str | None) -> str:
    failed = [result for result in checks_of_kind if result.has_failed]
    right = "" if cause is None else str(sum(result.cause == cause for result in failed))
    by_time = sum(result.failed_by_time for result in checks_of_kind)
    wall, processors = (_median_change(checks_of_kind, metric) for metric in ("step_time_ns", "cpu_time_ns"))
    return f"| {label} | {len(checks_of_kind)} | {len(failed)} | {right} | {by_time} | {wall} | {processors} |"


def _median_change(checks_of_kind: Sequence[CheckedRecording], metric: str) -> str:
    changes = [change for result in checks_of_kind if (change := result.change(metric)) is not None]
    return f"{statistics.median(changes):+.1%}" if changes else ""


def _spreads(recordings: Sequence[Recording]) -> list[str]:
    """Return by how much recordings of the same differ: within five in a row, and over all of them."""
    table = ["| metric | five in a row | all |", "|---|---:|---:|"]
    medians: dict[str, list[float]] = {}
    for recording in recordings:
        for metric, values in job_samples(recording.samples).items():
            medians.setdefault(metric, []).append(float(np.median(values)))
    for metric, values in medians.items():
        if len(values) < 2 * BASELINE_RECORDINGS or not np.mean(values):
            continue
        unit = 1.0 if metric_of(metric).is_share else float(np.mean(values))
        windows = [np.var(values[n : n + 5], ddof=1) for n in range(len(values) - 4)]
        table.append(f"| {metric} | {np.sqrt(np.mean(windows)) / unit:.1%} | {np.std(values, ddof=1) / unit:.1%} |")
    return table


def _machine_load(recordings: Sequence[Recording]) -> str:
    """Sentence on how busy the machine was with other things."""
    shares = []
    for recording in recordings:
        samples = job_samples(recording.samples)
        step_s = _TOKENS_PER_STEP / float(np.median(samples["tokens_per_second"]))
        shares.append(float(np.median(samples["cpu_time_ns"])) / 1e9 / step_s)
    return (
        f"How busy the machine was with other work: a rank's process ran for {statistics.median(shares):.0%} of a "
        f"step's time ({min(shares):.0%} to {max(shares):.0%}), where on an idle machine it runs for nearly all of it."
    )


def cost(run: Path, healthy: Sequence[Recorded], rounds: int = 7) -> tuple[float, int]:
    """Ratio of a check with a baseline to one without, by CPU time in turns, and the baseline's bytes."""
    base = Baseline("before", {}, tuple(entry.recording for entry in healthy[:BASELINE_RECORDINGS]))
    path = run.parent / "baseline.json"
    path.write_text(saved.render(base), encoding="utf-8")
    times_ns: dict[bool, list[int]] = {False: [], True: []}
    for number in range(2 * rounds):
        with_baseline = bool(number % 2)
        began_ns = time.process_time_ns()
        loaded = tracekit.load(str(run), cache=False)
        facts = baselines.FACTS if with_baseline else ()
        report = engine.check(loaded, facts=facts)
        if with_baseline:
            checks.judge(report, Severity.ERROR, baseline=saved.read(path), allow_different=True)
        times_ns[with_baseline].append(time.process_time_ns() - began_ns)
    return statistics.median(times_ns[True]) / statistics.median(times_ns[False]), path.stat().st_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, check and print the tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 3 recordings without and 5 with a fault")
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where recordings lie, and are made")
    parser.add_argument("--no-record", action="store_true", help="take the recordings that are there, and make none")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the tables between the marks in this file")
    options = parser.parse_args(arguments)
    options.runs.mkdir(parents=True, exist_ok=True)
    if not options.no_record:
        record(options.runs, schedule(options.rounds))
    recorded = check_recordings(options.runs)
    table = lines(recorded)
    healthy = [entry for entry in recorded if entry.kind == HEALTHY]
    ratio, size_bytes = cost(Path(recorded[-1].report.run.path), healthy)
    table += [
        "",
        f"A check with a baseline of {BASELINE_RECORDINGS} recordings ({size_bytes / 1000:.0f} kB) takes {ratio:.2f} "
        "times the processor time of one without.",
    ]
    print("\n".join(table))
    if options.out:
        put_between(options.out, "benchmarks.gate", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
