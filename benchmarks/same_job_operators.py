"""How often `compare --by operator` calls an operator better or worse although nothing changed.

    python -m benchmarks.same_job_operators FOLDER... [--seeds 0:6] [--out docs/lab/compare_accuracy.md]

Pairs of four kinds, each compared once:

- two ranks of a public recording: the same program on two devices;
- public recordings, replayed by `perturbation_graph`: each kernel takes what the same kernel took in another step, and
  each launch is as late as in another step;
- the steps of a recording in two halves of at least three steps;
- simulated jobs with other seeds of their jitter.

A row is a false alarm if its verdict is better or worse, and so is a pair with such a row.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import tracekit
from benchmarks import false_alarms, perturbation_graph
from benchmarks.documents import put_between
from tracekit.plan import hardware, models
from tracekit.regression import step_change, step_separation
from tracekit.regression.step_change import RunSteps
from tracekit.regression.thresholds import Verdict
from tracekit.simulate import faults, run
from tracekit.simulate import job as jobs

_CALLED = (Verdict.BETTER.value, Verdict.WORSE.value)


@dataclass
class Pairs:
    """The pairs of a kind: how many, how many rows they have, and which of these were called better or worse."""

    kind: str
    count: int = 0
    rows: int = 0
    alarms: list[str] = field(default_factory=list)
    alarmed: int = 0

    def add(self, before: RunSteps, after: RunSteps) -> None:
        """Compare two recordings of the same training."""
        rows = step_change.step_change(before, after, allow_different=True).rows
        called = rows.filter(rows["verdict"].is_in(_CALLED))
        self.count += 1
        self.rows += rows.height
        self.alarmed += not called.is_empty()
        for row in called.iter_rows(named=True):
            change = f"{row['before_ns'] / 1e6:.3f} to {row['after_ns'] / 1e6:.3f} ms"
            self.alarms.append(f"{row['name']} ({row['part']}): {row['verdict']}, {change}, {row['status']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all pairs, print the table and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="recordings, one job each")
    parser.add_argument("--seeds", default="0:6", help="of replays and simulated jitter (default: 0:6)")
    parser.add_argument("--out", type=Path, help="put the table between the marks of this file")
    options = parser.parse_args(arguments)
    first, _, stop = options.seeds.partition(":")
    with tempfile.TemporaryDirectory() as scratch:
        measured = list(_measure(options.folders, range(int(first), int(stop)), Path(scratch)))
    lines = table(measured)
    print("\n".join(lines))
    if options.out:
        put_between(options.out, "benchmarks.same_job_operators", lines)
    return 0


def table(measured: Sequence[Pairs]) -> list[str]:
    """Return the pairs of each kind as lines of Markdown."""
    total = Pairs("**all**", *(sum(getattr(pairs, name) for pairs in measured) for name in ("count", "rows")))
    total.alarms = [alarm for pairs in measured for alarm in pairs.alarms]
    total.alarmed = sum(pairs.alarmed for pairs in measured)
    rows = [
        f"| {pairs.kind} | {pairs.count} | {pairs.alarmed} | {pairs.rows:,} | {len(pairs.alarms)} |"
        for pairs in (*measured, total)
    ]
    heads = "| compared although nothing changed (A/A) | pairs | with a false alarm | rows | false alarms |"
    return [heads, "|---|---:|---:|---:|---:|", *rows]


def _measure(folders: Sequence[Path], seeds: range, scratch: Path) -> Iterator[Pairs]:
    for folder in folders:
        yield from _kept(_ranks(folder), _halves(folder, scratch), _replays(folder, seeds, scratch))
    for strategy in (jobs.DDP, jobs.FSDP2) if seeds else ():
        yield from _kept(_simulated_jobs(strategy, seeds, scratch))


def _kept(*measured: Pairs) -> Iterator[Pairs]:
    for pairs in measured:
        if pairs.count:
            for alarm in pairs.alarms:
                print(f"{pairs.kind}: {alarm}", file=sys.stderr)
            print(f"{pairs.kind}: {pairs.alarmed} of {pairs.count} pairs", file=sys.stderr, flush=True)
            yield pairs


def _ranks(folder: Path) -> Pairs:
    pairs = Pairs(f"{folder.name}: two of its ranks")
    files = sorted(folder.glob("*.json.gz"))
    return _compare_all(pairs, [_load(path) for path in files] if len(files) > 1 else [])


def _halves(folder: Path, scratch: Path) -> Pairs:
    steps = false_alarms.marked_steps(folder)
    middle = len(steps) // 2
    pairs = Pairs(f"{folder.name}: {middle} of its steps with {len(steps) - middle} others")
    if middle < step_separation.MIN_STEPS:
        return pairs
    recordings = []
    for name, part in (("first", steps[:middle]), ("second", steps[middle:])):
        out = scratch / name
        false_alarms.write_piece(folder, part, out)
        recordings.append(_load(out))
        shutil.rmtree(out)
    return _compare_all(pairs, recordings)


def _replays(folder: Path, seeds: Iterable[int], scratch: Path) -> Pairs:
    pairs = Pairs(f"{folder.name}, replayed with other steps' durations")
    if len(false_alarms.marked_steps(folder)) < step_separation.MIN_STEPS:
        return pairs
    recordings = []
    for seed in seeds:
        job = perturbation_graph.load(folder.glob("*.json.gz"))
        if not all(rank.kernels for rank in job.ranks):  # a recording on a CPU
            return pairs
        false_alarms.resample(job, random.Random(f"{folder.name} {seed}"))  # a draw to be repeated, no secret
        job.replay()
        out = scratch / "replay"
        out.mkdir()
        for rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, out / f"rank{rank.number}.pt.trace.json.gz")
        recordings.append(_load(out))
        shutil.rmtree(out)
    return _compare_all(pairs, recordings)


def _simulated_jobs(strategy: str, seeds: Iterable[int], scratch: Path) -> Pairs:
    model, machine = models.find("llama2-7b", layers=3), hardware.find("h100-80")
    recordings = []
    for seed in seeds:
        out = scratch / "simulated"
        job = jobs.Job(strategy, model, machine, 8, 2048, steps=4, seed=seed, ranks_written=3)
        run.simulate(faults.inject(job, ()), (), out, arguments={}, force=True)
        recordings.append(_load(out))
        shutil.rmtree(out)
    return _compare_all(Pairs(f"simulated jobs ({strategy}), seeds of the jitter"), recordings)


def _load(path: Path) -> RunSteps:
    return RunSteps.of(tracekit.load(str(path), cache=False))


def _compare_all(pairs: Pairs, recordings: Sequence[RunSteps]) -> Pairs:
    for before, after in combinations(recordings, 2):
        pairs.add(before, after)
    return pairs


if __name__ == "__main__":
    sys.exit(main())
