"""How often `check --baseline` fails although nothing changed: whole checks of two recordings of one training.

    python -m benchmarks.false_alarms FOLDER... [--recordings RUNS] [--seeds 0:8] [--out docs/lab/gate_accuracy.md]

Pairs of four kinds, each checked at the default settings with the other as its baseline, in both directions:

- the steps of a public recording in two pieces (the first half and the second);
- public recordings of all ranks of a job, replayed by `perturbation_graph`: each kernel takes what the same kernel took
  in another step (or on another rank, where there is one step), and each launch is as late as in another step;
- trainings recorded one after the other by `benchmarks.gate` (RUNS): whole, and pieces of three and of five steps, at
  the same steps and at later ones;
- simulated jobs with other seeds of their jitter.
"""

import argparse
import bisect
import gzip
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, permutations
from pathlib import Path
from typing import Any, TypeVar

import tracekit
from benchmarks import perturbation_graph
from benchmarks.documents import put_between
from benchmarks.perturbation_events import Kernel, Pause
from benchmarks.perturbation_graph import Job, Rank
from tracekit.plan import hardware, models
from tracekit.regression import baseline as baselines
from tracekit.regression import gate
from tracekit.regression.baseline import Baseline
from tracekit.rules import engine
from tracekit.rules.rule import Report, Severity
from tracekit.simulate import faults, run
from tracekit.simulate import job as jobs

Document = dict[str, Any]
STEPS = (3, 5)
"""How many steps the pieces of recorded trainings have."""
_Item = TypeVar("_Item")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_DEVICE = (*_DEVICE, "gpu_user_annotation")
_LEAST_GAP_US = 2.0
"""Later launches by less than this are left as they are: it keeps the number of pauses small."""
_STALL_RATIO = 0.05
"""A launch that is later by more of a step is a stall, which stays in its step: one may be of a warm-up."""


@dataclass(frozen=True, eq=False)
class Checked:
    """A recording, checked, and a baseline of it."""

    name: str
    report: Report
    baseline: Baseline

    @classmethod
    def of(cls, folder: Path, name: str) -> "Checked":
        """Return a recording in a folder, checked."""
        report = engine.check(tracekit.load(str(folder), cache=False), facts=baselines.FACTS)
        return cls(name, report, baselines.of_reports([(report, report.run)]))


@dataclass
class Pairs:
    """How many pairs of a kind were checked, and what failed of each that did."""

    kind: str
    count: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, before: Checked, after: Checked) -> None:
        """Check one recording with another as its baseline."""
        failed = gate.judge(after.report, Severity.ERROR, baseline=before.baseline).failures
        self.count += 1
        if failed:
            self.failures.append(f"{after.name} against {before.name}: {', '.join(failed)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all pairs, print the table and what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="public recordings, one job each")
    parser.add_argument("--recordings", type=Path, help="trainings that benchmarks.gate recorded")
    parser.add_argument("--seeds", default="0:8", help="of replays and simulated jitter (default: 0:8)")
    parser.add_argument("--out", type=Path, help="put the table between the marks of this file")
    options = parser.parse_args(arguments)
    first, _, stop = options.seeds.partition(":")
    seeds = range(int(first), int(stop))
    with tempfile.TemporaryDirectory() as scratch:
        measured = list(_measure(options.folders, options.recordings, seeds, Path(scratch)))
    lines = table(measured)
    print("\n".join(lines))
    if options.out:
        put_between(options.out, "benchmarks.false_alarms", lines)
    return 0


def table(measured: Sequence[Pairs]) -> list[str]:
    """Return the pairs of each kind as lines of Markdown."""
    total = Pairs("**all**", sum(pairs.count for pairs in measured), [f for pairs in measured for f in pairs.failures])
    rows = [f"| {pairs.kind} | {pairs.count} | {len(pairs.failures)} |" for pairs in (*measured, total)]
    return ["| compared although nothing changed (A/A) | pairs | failed |", "|---|---:|---:|", *rows]


def _measure(folders: Sequence[Path], recordings: Path | None, seeds: range, scratch: Path) -> Iterator[Pairs]:
    for pairs in chain(
        (_halves(folder, scratch) for folder in folders),
        (_replays(folder, seeds, scratch) for folder in folders),
        _of_recordings(recordings, scratch) if recordings else (),
        (_simulated_jobs(strategy, seeds, scratch) for strategy in (jobs.DDP, jobs.FSDP2) if seeds),
    ):
        if pairs.count:
            for failure in pairs.failures:
                print(f"{pairs.kind}: {failure}", file=sys.stderr)
            print(f"{pairs.kind}: {len(pairs.failures)} of {pairs.count} failed", file=sys.stderr, flush=True)
            yield pairs


def _halves(folder: Path, scratch: Path) -> Pairs:
    steps = marked_steps(folder)
    middle = len(steps) // 2
    pairs = Pairs(f"{folder.name}: {middle} of {len(steps)} steps with {len(steps) - middle} others")
    if middle:
        _add_all(pairs, _pieces(folder, [steps[:middle], steps[middle:]], scratch))
    return pairs


def _replays(folder: Path, seeds: Iterable[int], scratch: Path) -> Pairs:
    pairs = Pairs(f"{folder.name}, replayed with other steps' durations")
    if len(list(folder.glob("*.json.gz"))) > 1:
        _add_all(pairs, [_replay(folder, seed, scratch) for seed in seeds])
    return pairs


def _of_recordings(folder: Path, scratch: Path) -> Iterator[Pairs]:
    paths = sorted(path for path in folder.glob("[0-9]*-healthy") if path.is_dir())
    complete = Pairs("recorded trainings, whole, with the one before or after")
    for recordings in pairwise(Checked.of(path, path.name) for path in paths):
        _add_all(complete, recordings)
    yield complete
    for count in STEPS:
        same, later = (
            Pairs(f"{count} steps of them, the same"),
            Pairs(f"{count} steps of them, with {count} later ones"),
        )
        pieces = (_pieces(path, [marked_steps(path)[:count], marked_steps(path)[-count:]], scratch) for path in paths)
        for before, after in pairwise(pieces):
            _add_all(same, [before[0], after[0]])
            _add_all(same, [before[1], after[1]])
            _add_all(later, [before[0], after[1]])
            _add_all(later, [before[1], after[0]])
        yield same
        yield later


def _simulated_jobs(strategy: str, seeds: Iterable[int], scratch: Path) -> Pairs:
    pairs = Pairs(f"simulated jobs ({strategy}), seeds of the jitter")
    model, machine = models.find("llama2-7b", layers=3), hardware.find("h100-80")
    recordings = []
    for seed in seeds:
        out = scratch / "simulated"
        job = jobs.Job(strategy, model, machine, 8, 2048, steps=4, seed=seed, ranks_written=3)
        run.simulate(faults.inject(job, ()), (), out, arguments={}, force=True)
        recordings.append(Checked.of(out, f"seed {seed}"))
        shutil.rmtree(out)
    _add_all(pairs, recordings)
    return pairs


def _add_all(pairs: Pairs, recordings: Sequence[Checked]) -> None:
    for before, after in permutations(recordings, 2):
        pairs.add(before, after)


# Pieces of recordings ------------------------------------------------------------------------------------------------


def _pieces(folder: Path, parts: Sequence[Sequence[int]], scratch: Path) -> list[Checked]:
    """Return pieces of a recording, each of some of its steps, checked."""
    pieces = []
    for number, steps in enumerate(parts):
        out = scratch / f"{folder.name}-{number}"
        write_piece(folder, steps, out)
        pieces.append(Checked.of(out, f"{folder.name} steps {steps[0]} to {steps[-1]}"))
        shutil.rmtree(out)
    return pieces


def write_piece(folder: Path, steps: Sequence[int], out: Path) -> None:
    """Write a recording cut to some neighbouring steps to a new folder."""
    out.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".gz":
            _write(piece(_read(path), steps), out / path.name)
        elif path.suffix == ".jsonl":
            lines = (line for line in path.read_text().splitlines(True) if json.loads(line).get("step") in steps)
            (out / path.name).write_text("".join(lines))
        elif path.is_file():
            shutil.copy(path, out / path.name)


def piece(document: Document, steps: Sequence[int]) -> Document:
    """Return a Kineto document cut to some neighbouring steps, with the device work that these launched."""
    marks = _marks(document)
    start, end = marks[steps[0]][0], marks[steps[-1]][1]
    events = document["traceEvents"]
    launched = {
        _correlation(event) for event in events if event.get("cat") not in _DEVICE and start <= event.get("ts", 0) < end
    } - {None}

    def is_inside(event: Document) -> bool:
        if event.get("ph") == "M":
            return True
        if event.get("cat") in _DEVICE:
            return _correlation(event) in launched
        if event.get("cat") == "ac2g":
            return event.get("id") in launched
        return bool(start <= event.get("ts", 0) < end)

    return {**document, "traceEvents": [event for event in events if is_inside(event)]}


def marked_steps(folder: Path) -> list[int]:
    """Return the steps that all ranks of a folder mark, in order."""
    marked = [set(_marks(_read(path))) for path in folder.glob("*.json.gz")]
    return sorted(set.intersection(*marked)) if marked else []


def _marks(document: Document) -> dict[int, tuple[float, float]]:
    return {
        int(event["name"].partition("#")[2]): (event["ts"], event["ts"] + event["dur"])
        for event in document["traceEvents"]
        if event.get("cat") not in _ON_DEVICE and str(event.get("name")).startswith("ProfilerStep#")
    }


def _correlation(event: Document) -> object:
    arguments = event.get("args", {})
    return arguments.get("correlation") if isinstance(arguments, dict) else None


def _read(path: Path) -> Document:
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        document: Document = json.load(file)
    return document


def _write(document: Document, path: Path) -> None:
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        json.dump(document, file)


# Replays with resampled durations ------------------------------------------------------------------------------------


def _replay(folder: Path, seed: int, scratch: Path) -> Checked:
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    resample(job, random.Random(f"{folder.name} {seed}"))
    job.replay()
    out = scratch / f"{folder.name}-{seed}"
    out.mkdir()
    for rank, document in zip(job.ranks, job.documents(), strict=True):
        perturbation_graph.write(document, out / f"rank{rank.number}.pt.trace.json.gz")
    checked = Checked.of(out, f"seed {seed}")
    shutil.rmtree(out)
    return checked


def resample(job: Job, rng: random.Random) -> None:
    """Let each kernel take what it took in another step, and each launch be as late as in another step.

    The kernel of the same name and number within its step is the same kernel. Where ranks have one step, those of the
    other ranks are.
    """
    steps = min(len(rank.steps) for rank in job.ranks)
    groups = [[rank] for rank in job.ranks] if steps > 1 else [job.ranks]
    for ranks in groups:
        for same in _same([place for rank in ranks for place in _kernels_by_step(rank)]):
            for kernel in same:
                other = rng.choice(same)
                kernel.stretch = max(other.end - other.start, 0.1) / max(kernel.end - kernel.start, 0.1)
        for launches in _same([place for rank in ranks for place in _launches_by_step(rank)]):
            for launch in launches:
                later_us = rng.choice(launches).gap_us - launch.gap_us
                if _LEAST_GAP_US < later_us < _STALL_RATIO * launch.step_us:
                    launch.rank.pauses.append(Pause(launch.at_us, later_us))


@dataclass(frozen=True)
class _Launch:
    """A runtime call, and how long after the one before it began."""

    rank: Rank
    at_us: float
    gap_us: float
    step_us: float


def _same(steps: Iterable[dict[tuple[str, int], _Item]]) -> list[list[_Item]]:
    """Groups of what has one name and number within its step."""
    together: dict[tuple[str, int], list[_Item]] = defaultdict(list)
    for step in steps:
        for place, item in step.items():
            together[place].append(item)
    return [items for items in together.values() if len(items) > 1]


def _kernels_by_step(rank: Rank) -> list[dict[tuple[str, int], Kernel]]:
    ordered = [kernel for kernel in rank.kernels if kernel.launch is not None and not kernel.is_collective]
    return _by_step(rank, ordered, lambda kernel: kernel.launch or 0.0, lambda kernel: str(kernel.event["name"]))


def _launches_by_step(rank: Rank) -> list[dict[tuple[str, int], _Launch]]:
    step_us = statistics.median(end - start for start, end in rank.steps or [(rank.start, rank.end)])
    calls = [call for call in rank.calls if (call["pid"], call["tid"]) == rank.main_thread]
    launches = [
        (str(call["name"]), _Launch(rank, call["ts"], call["ts"] - before["ts"] - before["dur"], step_us))
        for before, call in pairwise(calls)
        if "Synchronize" not in before["name"] and "Memcpy" not in before["name"]
    ]
    by_step = _by_step(rank, launches, lambda item: item[1].at_us, lambda item: item[0])
    return [{place: launch for place, (_, launch) in step.items()} for step in by_step]


def _by_step(
    rank: Rank, items: Iterable[_Item], time_of: Callable[[_Item], float], name: Callable[[_Item], str]
) -> list[dict[tuple[str, int], _Item]]:
    spans = rank.steps or [(rank.start, rank.end)]
    counts: list[Counter[str]] = [Counter() for _ in spans]
    grouped: list[dict[tuple[str, int], _Item]] = [{} for _ in spans]
    starts = [start for start, _ in spans]
    for item in items:
        step = bisect.bisect_right(starts, time_of(item)) - 1
        if step >= 0:
            counts[step][name(item)] += 1
            grouped[step][name(item), counts[step][name(item)]] = item
    return grouped


if __name__ == "__main__":
    sys.exit(main())
