"""Whether `compare` decides, and names what was changed: pairs with a planted change, and pairs without one.

    python -m benchmarks.compare_verdicts [FOLDER…] [--recordings RUNS…] [--out docs/lab/compare_verdicts.md]

Changes of 10, 20, 50 and 100% of a step are planted

- in simulated jobs, between two seeds of their jitter: each fault has the size at which the job's mean step is so much
  longer, after a warm-up;
- in public recordings of all ranks of a job (FOLDER), replayed by `perturbation_graph`: before and after take other
  steps' durations (`false_alarms.resample`), and the truth is how much longer the replay with the fault takes;
- in trainings on CPUs (RUNS, made by ``--record``) while other programs use the processors.

A pair is decided if its verdict is worse, and right if the first contribution that the sentence names is the planted
one. Pairs without a change (A/A) are two seeds, two replays, two recordings, and the steps of a recording in halves:
none may be worse or better.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import polars as pl

import tracekit
from benchmarks import false_alarms, injected_changes, injected_faults, perturbation_graph
from benchmarks.documents import put_between
from benchmarks.perturbation_graph import Job as RecordedJob
from tracekit.analysis.host import step_parts
from tracekit.plan import hardware, models
from tracekit.regression import comparison
from tracekit.regression.comparison import Comparison, RunSamples
from tracekit.regression.metrics import STEP_TIME
from tracekit.regression.thresholds import Verdict
from tracekit.report import step_verdict
from tracekit.simulate import engine, faults, run
from tracekit.simulate import job as jobs

SIZES = (0.1, 0.2, 0.5, 1.0)
_BISECTIONS = 18
_WARM_UP, _STEPS = 4, 6
"""Steps of simulated jobs: a late host costs nothing until it has used up its lead."""
_ATTEMPTS, _MAX_FACTOR = 4, 8.0
_LEAST_SHARE, _MOST_SHARE = 0.75, 1.5
"""A fault has a size if it makes the step longer by so many times it."""
_DECIDED = (Verdict.WORSE, Verdict.BETTER)
SIMULATED: dict[str, tuple[str, float, str]] = {
    "dataloader-stall": ("us", 4.0, step_parts.DATA),
    "late-launch": ("us", 4.0, step_parts.LAUNCH),
    "host-sync": ("us", 4.0, step_parts.LAUNCH),
    "slow-rank:1": ("", 12.0, step_parts.COMPUTE),
    "slow-network": ("", 60.0, step_parts.COMMUNICATION),
}
"""Faults: the unit of their size, the largest (in steps, or as a factor), and the kind of time that they lengthen."""
_REPLAYED: dict[str, tuple[str, ...]] = {
    "data stall": (step_parts.DATA,),
    "data stall of one rank": (step_parts.DATA,),
    "slow rank": (step_parts.COMPUTE,),
    "late host of one rank": (step_parts.LAUNCH,),
    "blocking pause of one rank": (step_parts.LAUNCH,),
    "slow collectives": (step_parts.COMMUNICATION,),
    "allocation retries": (step_parts.ALLOCATOR,),
}
_KINDS = {kind.name: kind for kind in injected_faults.KINDS}
OPERATOR = "one operator slower"
_TRAINING = (
    "--device cpu --model micro --max-norm 0 --batch 8 --tokens 128 --strategy ddp --world-size 2 --profile-wait 6 "
    "--profile-warmup 2 --profile-active 6 --steps 14 --checkpoint-every 100"
)
HEALTHY = "healthy"
_TRAINED = {
    step_parts.DATA: {"dataloader=6ms": 0.1, "dataloader=15ms": 0.2, "dataloader=40ms": 0.5, "dataloader=80ms": 1.0},
    step_parts.LAUNCH: {"late-launch=3ms": 0.1, "late-launch=8ms": 0.2, "late-launch=20ms": 0.5},
    step_parts.COMPUTE: {"more-compute=60": 0.1, "more-compute=150": 0.2},
    step_parts.COMMUNICATION: {
        "more-communication=3000": 0.1,
        "more-communication=4096": 0.2,
        "more-communication=6000": 0.2,
    },
}
"""Faults of trainings, by the kind of time that they lengthen, with their size in steps on idle processors."""


@dataclass(frozen=True)
class Outcome:
    """What one comparison says."""

    population: str
    fault: str
    size: float
    """0 for A/A."""
    is_decided: bool
    is_named: bool
    off_ns: int
    """How far the contributions are from the change of the step."""
    sentence: str

    @classmethod
    def of(
        cls,
        population: str,
        fault: str,
        size: float,
        compared: Comparison,
        expected: Callable[[Comparison], bool] = lambda _: True,
    ) -> "Outcome":
        step = compared.step
        assert step is not None
        verdicts = (Verdict.WORSE,) if size else _DECIDED
        off_ns = sum(part.change_ns for part in compared.contributions) - step_verdict.step_total(step)
        is_decided = step.verdict in verdicts
        return cls(population, fault, size, is_decided, expected(compared), off_ns, step_verdict.headline(compared))


def names(kinds: Sequence[str], operator: str = "") -> Callable[[Comparison], bool]:
    """Return a predicate: the first contribution that the sentence names is of one of these kinds."""

    def is_named(compared: Comparison) -> bool:
        reasons = step_verdict.reasons(compared)
        if not reasons or reasons[0].kind not in kinds:
            return False
        return not operator or any(part.name == operator[:80] for part in reasons[0].parts[:1])

    return is_named


# Simulated jobs ------------------------------------------------------------------------------------------------------


def simulated_pairs(seeds: range, scratch: Path) -> Iterator[Outcome]:
    """Yield the outcomes of simulated pairs, planted and A/A."""
    for strategy in (jobs.DDP, jobs.FSDP2):
        population = f"simulated {strategy}, 8 GPUs"
        healthy = [simulate(simulated_job(strategy, seed), scratch) for seed in seeds]
        for before, after in permutations(healthy, 2):
            yield Outcome.of(population, "", 0.0, comparison.compare(before, after))
        for fault, (unit, largest, kind) in SIMULATED.items():
            for size in SIZES:
                for before, seed in zip(healthy, seeds, strict=True):
                    job = with_growth(simulated_job(strategy, seed + 500), fault, unit, largest, size)
                    if job is not None:
                        compared = comparison.compare(before, simulate(job, scratch))
                        yield Outcome.of(population, fault.partition(":")[0], size, compared, names([kind]))


def simulated_job(strategy: str, seed: int) -> jobs.Job:
    """Return a job on 8 GPUs of one node without a fault."""
    model, machine = models.find("llama2-7b", layers=3), hardware.find("h100-80")
    return jobs.Job(strategy, model, machine, 8, 2048, steps=_WARM_UP + _STEPS, seed=seed, ranks_written=2)


def with_growth(healthy: jobs.Job, fault: str, unit: str, largest: float, growth: float) -> jobs.Job | None:
    """Return the job with a fault of the size that makes it longer by this share; None where no size does."""
    step_ns = _steady_ns(healthy)
    target_ns = step_ns * (1 + growth)

    def at(size: float) -> jobs.Job:
        argument = f"{size * step_ns / 1000:.0f}us" if unit else f"{size:.4f}"
        return faults.inject(healthy, [faults.parse(f"{fault}:{argument}")])

    low, high = (0.0, largest) if unit else (1.0001, largest)
    if _steady_ns(at(high)) < target_ns:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _steady_ns(at(middle)) < target_ns else (low, middle)
    return at(high)


def _steady_ns(job: jobs.Job) -> float:
    """Mean step after the warm-up."""
    return (engine.total_ns(job) - engine.total_ns(replace(job, steps=_WARM_UP))) / _STEPS


def simulate(job: jobs.Job, scratch: Path) -> RunSamples:
    """Return the samples of a simulated job after its warm-up."""
    out = scratch / "simulated"
    run.simulate(job, (), out, arguments={}, force=True)
    side = _samples(out)
    return replace(side, samples=side.samples.filter(pl.col("step") >= _WARM_UP))


# Public recordings, replayed -----------------------------------------------------------------------------------------


def replayed_pairs(folder: Path, seeds: range, scratch: Path) -> Iterator[Outcome]:
    """Yield the outcomes of pairs of replays of one job, planted and A/A."""
    population = f"{folder.name}, replayed"
    unchanged = [_write_samples(_resample(folder, seed), scratch / "replay") for seed in seeds]
    for before, after in permutations(unchanged, 2):
        yield Outcome.of(population, "", 0.0, _compare(before, after))
    for number, before in enumerate(unchanged):
        clean, seed = unchanged[(number + 1) % len(unchanged)], seeds[(number + 1) % len(seeds)]
        for fault in (*_REPLAYED, OPERATOR):
            for size in SIZES:
                planted = _with_step_growth(folder, seed, scratch, clean, fault=fault, size=size)
                if planted is not None:
                    after, operator = planted
                    expected = names(_REPLAYED.get(fault, (step_parts.COMPUTE,)), operator)
                    yield Outcome.of(population, fault, size, _compare(before, after), expected)


def _with_step_growth(
    folder: Path, seed: int, scratch: Path, clean: RunSamples, *, fault: str, size: float
) -> tuple[RunSamples, str] | None:
    """Return a replay with a fault that makes the step longer by about this share, and the operator that it slows.

    None where the fault does not: what slower kernels or a late host cost depends on what they overlap.
    """
    strength = size
    for _ in range(_ATTEMPTS):
        draw = random.Random(f"{folder.name} {fault} {seed}")  # a draw to be repeated, no secret
        job = _resample(folder, seed)
        if fault == OPERATOR:
            operator = _slow_operator(job, strength, draw)
        else:
            operator, kind = "", _KINDS[fault]
            needs_others = step_parts.COMMUNICATION in _REPLAYED[fault]
            if len(job.ranks) < kind.needs_ranks or (needs_others and not job.instances):
                return None
            kind.apply(job, strength, draw)
        after = _write_samples(job, scratch / "replay")
        growth = _step_ns(after) / _step_ns(clean) - 1
        if _LEAST_SHARE * size <= growth <= _MOST_SHARE * size:
            return after, operator
        strength *= min(_MAX_FACTOR, max(1 / _MAX_FACTOR, size / growth)) if growth > 0.005 else _MAX_FACTOR
    return None


def _resample(folder: Path, seed: int) -> RecordedJob:
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    false_alarms.resample(job, random.Random(f"{folder.name} {seed}"))
    return job


def _write_samples(job: RecordedJob, out: Path) -> RunSamples:
    """Return the samples of a replayed job."""
    job.replay()
    out.mkdir()
    try:
        for rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, out / f"rank{rank.number}.pt.trace.json.gz")
        return _samples(out)
    finally:
        shutil.rmtree(out)


def _slow_operator(job: RecordedJob, growth: float, draw: random.Random) -> str:
    """Make the kernels of one operator slower on all ranks; return the operator."""
    operators = [injected_changes.kernels_by_operator(rank) for rank in job.ranks]
    operator = draw.choice(injected_changes.drawable(operators))
    own_us = sum(kernel.end - kernel.start for kernels in operators for kernel in kernels.get(operator, ()))
    steps_us = sum(end - start for rank in job.ranks for start, end in injected_faults.steps_of(rank))
    for kernels in operators:
        for kernel in kernels.get(operator, ()):
            kernel.stretch *= 1 + growth * steps_us / own_us
    return operator


def _step_ns(side: RunSamples) -> float:
    times = side.samples.filter(pl.col("metric") == STEP_TIME).group_by("step").agg(pl.col("value").max())
    return float(str(times["value"].median()))


# Trainings on CPUs ---------------------------------------------------------------------------------------------------


def record(folder: Path, rounds: int) -> None:
    """Record trainings on this machine, whatever else runs on it, that are not there yet."""
    kinds = [kind for faults_of_kind in _TRAINED.values() for fault in faults_of_kind for kind in (HEALTHY, fault)]
    for number, kind in enumerate(kinds * rounds):
        out = folder / f"{number:04d}-{kind}"
        if out.is_dir():
            continue
        partial = out.with_suffix(".partial")
        fault = [] if kind == HEALTHY else ["--fault", kind]
        command = [sys.executable, "-m", "instrumented_trainers", *_TRAINING.split(), *fault, "--out", str(partial)]
        subprocess.run([*command, "--overwrite"], check=True, capture_output=True, timeout=600)
        shutil.rmtree(partial / "checkpoints", ignore_errors=True)
        partial.rename(out)


def trained_pairs(folder: Path) -> Iterator[Outcome]:
    """Yield the outcomes of recorded trainings, each pair in both directions, and of their halves."""
    population = "trainings on busy CPUs"
    paths = [path for path in sorted(folder.glob("[0-9]*-*")) if path.suffix != ".partial"]
    sides = {path.name: _samples(path) for path in paths}
    healthy = {name: side for name, side in sides.items() if name.endswith(HEALTHY)}
    for before, after in permutations(healthy.values(), 2):
        yield Outcome.of(population, "", 0.0, comparison.compare(before, after))
    for side in sides.values():
        yield from _halves("halves of trainings", side)
    for kind, sizes in _TRAINED.items():
        for name, after in sides.items():
            fault = name.partition("-")[2]
            for before in healthy.values() if fault in sizes else ():
                compared = comparison.compare(before, after)
                yield Outcome.of(population, fault.partition("=")[0], sizes[fault], compared, names([kind]))


def _halves(population: str, side: RunSamples) -> Iterator[Outcome]:
    """Yield the outcomes of the first half of a recording's steps with the second, in both directions."""
    steps = side.samples.filter(pl.col("metric") == STEP_TIME)["step"].unique().sort()
    middle = len(steps) // 2
    if middle < 2:
        return
    parts = [
        replace(side, samples=side.samples.filter(pl.col("step").is_in(half.implode())))
        for half in (steps[:middle], steps[middle:])
    ]
    for before, after in permutations(parts, 2):
        yield Outcome.of(population, "", 0.0, comparison.compare(before, after))


def _samples(path: Path) -> RunSamples:
    return RunSamples.of(tracekit.load(str(path), cache=False), path.name)


def _compare(before: RunSamples, after: RunSamples) -> Comparison:
    return comparison.compare(before, after, allow_different=True)


# The table -----------------------------------------------------------------------------------------------------------


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a row per population, and one per fault and size, as lines of Markdown."""
    rows = list(outcomes)
    lines = ["| planted | size | pairs | worse | named first |", "|---|---:|---:|---:|---:|"]
    planted: dict[tuple[float, str], list[Outcome]] = defaultdict(list)
    for row in rows:
        if row.size:
            planted[row.size, f"{row.fault} ({row.population})"].append(row)
            planted[row.size, "**all**"].append(row)
    for (size, label), some in sorted(planted.items()):
        decided, named = (sum(values) for values in zip(*((r.is_decided, r.is_named) for r in some), strict=True))
        lines.append(f"| {label} | {size:.0%} | {len(some)} | {decided} | {named} |")
    lines += ["", "| compared although nothing changed (A/A) | pairs | worse or better |", "|---|---:|---:|"]
    unchanged: dict[str, list[Outcome]] = defaultdict(list)
    for row in rows:
        if not row.size:
            unchanged[row.population].append(row)
            unchanged["**all**"].append(row)
    for population, some in sorted(unchanged.items()):
        lines.append(f"| {population} | {len(some)} | {sum(row.is_decided for row in some)} |")
    off_ns = max((abs(row.off_ns) for row in rows), default=0)
    return [*lines, "", f"The contributions of all pairs add up to the change of the step within {off_ns} ns."]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all pairs, print the table and what is wrong; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="public recordings of all ranks of a job")
    parser.add_argument("--recordings", nargs="+", default=(), type=Path, metavar="RUNS", help="trainings on CPUs")
    parser.add_argument("--record", type=int, default=0, metavar="ROUNDS", help="record so many rounds of trainings")
    parser.add_argument("--seeds", type=int, default=3, help="pairs of each fault and size (default: 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put the tables between the marks of this file")
    options = parser.parse_args(arguments)
    seeds = range(100, 100 + options.seeds)
    if options.recordings and options.record:
        options.recordings[0].mkdir(parents=True, exist_ok=True)
        record(options.recordings[0], options.record)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tracekit-verdicts-") as scratch:
        populations = [
            simulated_pairs(seeds, Path(scratch)),
            *(replayed_pairs(f, seeds, Path(scratch)) for f in options.folders),
        ]
        populations += map(trained_pairs, options.recordings)
        for population in populations:
            for outcome in population:
                outcomes.append(outcome)
                if outcome.is_decided is not bool(outcome.size) or not outcome.is_named:
                    print(f"{outcome.population}, {outcome.fault} {outcome.size:.0%}: {outcome.sentence}", flush=True)
    lines = table(outcomes)
    print("\n".join(lines))
    if options.out:
        put_between(options.out, "benchmarks.compare_verdicts", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
