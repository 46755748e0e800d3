"""What `check` says of real recordings into which an independent program put a trouble of known cost.

    python -m benchmarks.perturbed FOLDER… [--seeds 3] [--out FILE]

Each FOLDER holds the recordings of all ranks of one job. `perturbation_graph` replays them with one change, such as a
rank whose kernels are slower, and writes what would have been recorded. A change is found if `check` reports it with
the right code and rank, and the control (the recording replayed unchanged) does not, or at a lower cost. Each changed
recording is also checked with the control as its baseline, at the default settings: what costs 10% or more should fail.
"""

import argparse
import bisect
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from benchmarks import perturbation_graph
from benchmarks.documents import put_between
from benchmarks.perturbation_graph import Event, Job, Kernel, Pause, Rank
from tracekit.regression import baseline as baselines
from tracekit.regression import gate
from tracekit.regression.baseline import Baseline
from tracekit.rules import engine
from tracekit.rules.rule import Finding, Report, Severity

SIZES = (0.05, 0.12, 0.3)
"""How large a change is, as a share of a step."""
_RESOLUTION_US = 1.0
"""Distance of two moments that are told apart: some recordings count float64 µs since 1970, in steps of 0.25 µs."""
_ROUNDS = 6
"""How often contention is applied to its own result."""
MATTERS = 0.03
"""What costs a smaller share of the recording need not be found."""
FAILS = 0.1
"""What costs this share of the recording should fail a check against the control."""
_NOTHING_SLOWER = ("clock skew", "missing rank")


@dataclass(frozen=True)
class Kind:
    """A kind of trouble."""

    name: str
    apply: Callable[[Job, float, random.Random], int | None]
    """Change the job by a share of its step; return the rank that is at fault, None if none or all are."""
    codes: tuple[str, ...]
    """Rules that may report it."""
    also: tuple[str, ...] = ()
    """Rules that may report its consequence besides."""
    needs_ranks: int = 1


def slow_rank(job: Job, size: float, rng: random.Random) -> int:
    """Slow the compute kernels of one rank down."""
    rank = rng.choice(job.ranks)
    for kernel in rank.kernels:
        if not kernel.is_collective:
            kernel.stretch = 1 + 3 * size
    return rank.number


def late_host(job: Job, size: float, rng: random.Random) -> int:
    """Let the host of one rank pause in every step, without waiting for the device."""
    rank = rng.choice(job.ranks)
    for start, end in _steps(rank):
        at = _between_calls(rank, start + rng.uniform(0.2, 0.6) * (end - start))
        rank.pauses.append(Pause(at, size * _step_us(rank)))
    return rank.number


def blocking_pause(job: Job, size: float, rng: random.Random) -> int:
    """Let one rank synchronize with the device in every step and then compute on the host."""
    rank = rng.choice(job.ranks)
    for start, end in _steps(rank):
        _drain(rank, start + rng.uniform(0.2, 0.6) * (end - start), size * _step_us(rank), "cudaDeviceSynchronize")
    return rank.number


def item_calls(job: Job, size: float, rng: random.Random) -> None:
    """Let every rank read scalars from the device, several times a step."""
    places = [rng.uniform(0.1, 0.9) for _ in range(round(20 * size) + 2)]
    for start, end in _steps(job.ranks[0]):
        for place in places:
            for rank, at in _same_place(job, start + place * (end - start)):
                _drain(rank, at, size * _step_us(rank) / len(places), "aten::item")


def data_stall(job: Job, size: float, _rng: random.Random) -> None:
    """Let every rank wait for its data loader at the start of every step."""
    for rank in job.ranks:
        _load_data(rank, size)


def data_stall_of_one(job: Job, size: float, rng: random.Random) -> int:
    """Let one rank wait for its data loader at the start of every step."""
    rank = rng.choice(job.ranks)
    _load_data(rank, size)
    return rank.number


def slow_collectives(job: Job, size: float, rng: random.Random) -> None:
    """Let collectives of one name transfer data more slowly, in all groups and steps.

    Names with more transfer time are more likely: others cost nothing. Nothing in the recording shows how fast they
    could be, so that no slow link is to be found: only that more communication is exposed.
    """
    times: dict[str, float] = {}
    for members in job.instances:
        transfer = members[0][1].end - max(kernel.start for _, kernel in members)
        name = members[0][1].event["name"]
        times[name] = times.get(name, 0.0) + max(transfer, 0.0)
    name = rng.choices(sorted(times), [times[each] for each in sorted(times)])[0]
    for members in job.instances:
        for _, kernel in members:
            if kernel.event["name"] == name:
                kernel.stretch = 1 + 8 * size


def contention(job: Job, size: float, _rng: random.Random) -> None:
    """Slow compute kernels down while a collective is on the device.

    What slower kernels delay changes what overlaps, so the slowdown is applied to its own result until that is steady.
    """
    slowdown = 1 + 3 * size
    for _ in range(_ROUNDS):
        job.replay()
        for rank in job.ranks:
            busy = sorted(_placed(kernel) for kernel in rank.kernels if kernel.is_collective)
            for kernel in rank.kernels:
                if not kernel.is_collective:
                    start, stop = _placed(kernel)
                    both = sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in busy)
                    alone = max(kernel.end - kernel.start, 1e-3)
                    kernel.stretch = min(slowdown, 1 + both * (1 - 1 / slowdown) / alone)


def allocation_retries(job: Job, size: float, rng: random.Random) -> None:
    """Let the allocator of every rank free its cache and allocate anew in every step."""
    for start, end in _steps(job.ranks[0]):
        for rank, at in _same_place(job, start + rng.uniform(0.2, 0.6) * (end - start)):
            dur = size * _step_us(rank)
            calls = [_slice("cuda_runtime", "cudaFree", dur * i / 8, dur / 9) for i in range(4)]
            calls += [_slice("cuda_runtime", "cudaMalloc", dur * (4 + i) / 8, dur / 9) for i in range(4)]
            rank.pauses.append(Pause(_between_calls(rank, at), dur, drains=True, slices=tuple(calls)))


def checkpoint(job: Job, size: float, rng: random.Random) -> None:
    """Let all ranks save a checkpoint at the end of one step."""
    _save(job, size, rng, "DistributedCheckpoint.save_checkpoint")


def nameless_save(job: Job, size: float, rng: random.Random) -> None:
    """Let all ranks save a checkpoint that no span names."""
    _save(job, size, rng, None)


def clock_skew(job: Job, size: float, rng: random.Random) -> None:
    """Let the clock of one rank be late by more than a step: nothing is slower."""
    rank = rng.choice(job.ranks)
    rank.clock_us = (1 + 10 * size) * _step_us(rank)


def missing_rank(job: Job, _size: float, rng: random.Random) -> None:
    """Leave the recording of one rank out: nothing is slower."""
    job.ranks.remove(rng.choice(job.ranks[1:]))


def pause_of_one(job: Job, size: float, rng: random.Random) -> int:
    """Let the host of one rank pause once, as for a garbage collection, for as long as it takes to be seen."""
    rank = rng.choice(job.ranks)
    start, end = rng.choice(_steps(rank))
    at = _between_calls(rank, start + rng.uniform(0.1, 0.3) * (end - start))
    rank.pauses.append(Pause(at, 3 * size * _step_us(rank)))
    return rank.number


def late_group(job: Job, size: float, _rng: random.Random) -> None:
    """Let two ranks, as of one host, launch late in every step."""
    for rank in (job.ranks[0], job.ranks[-1]):
        for start, end in _steps(rank):
            rank.pauses.append(Pause(_between_calls(rank, start + 0.1 * (end - start)), size * _step_us(rank)))


def time_sliced_device(job: Job, size: float, rng: random.Random) -> int:
    """Let another process have the device of one rank for time slices.

    NVIDIA's driver gives slices of one to a few ms. The other process takes one after as much time as makes its share
    of the device `size`; not while a collective is on the device, whose loss no single rank would show. What is delayed
    changes when that is, so the slices are chosen again until that is steady.
    """
    rank = rng.choice(job.ranks)
    slice_us, length_us = rng.uniform(1000, 2500), rank.end - rank.start
    slices, at = [], rank.start
    while at < rank.end + 2 * size * length_us:
        at += slice_us * (1 / size - 1) * rng.uniform(0.5, 1.5)
        slices.append((at, at + slice_us))
        at += slice_us
    for _ in range(_ROUNDS):
        job.replay()
        busy = sorted(_placed(kernel) for kernel in rank.kernels if kernel.is_collective)
        rank.taken = [
            (begin, until) for begin, until in slices if not any(start < until and begin < end for start, end in busy)
        ]
    return rank.number


def clock_drop(job: Job, size: float, rng: random.Random) -> int:
    """Let the clock of one rank's device drop: its kernels are slower from some step on, all by one factor."""
    rank = rng.choice(job.ranks)
    steps = _steps(rank)
    since = steps[len(steps) // 2][0] if len(steps) > 1 else (rank.start + rank.end) / 2
    for kernel in rank.kernels:
        if not kernel.is_collective and kernel.event["cat"] == "kernel" and kernel.start >= since:
            kernel.stretch = 1 + 3 * size
    return rank.number


KINDS = (
    Kind("slow rank", slow_rank, ("RANK001",), ("RANK003",), needs_ranks=2),
    Kind("late host of one rank", late_host, ("RANK001", "HOST001"), ("RANK003",), needs_ranks=2),
    # A pause after a wait that found the device almost idle is a late launch.
    Kind("blocking pause of one rank", blocking_pause, ("HOST002", "RANK001", "HOST001"), ("RANK003",), needs_ranks=2),
    Kind("reading scalars", item_calls, ("HOST002",), ("HOST001",)),
    Kind("data stall", data_stall, ("HOST003",)),
    Kind("data stall of one rank", data_stall_of_one, ("HOST003", "RANK001"), ("RANK003",), needs_ranks=2),
    Kind("slow collectives", slow_collectives, ("RANK002", "COMM001"), ("STREAM004",)),
    Kind("contention", contention, ("STREAM003",), ("COMM001",)),
    Kind("allocation retries", allocation_retries, ("MEM001", "MEM007")),
    Kind("checkpoint", checkpoint, ("CKPT001", "CKPT002", "CKPT003")),
    Kind("save without a name", nameless_save, ("STEP001", "HOST001", "HOST002")),
    Kind("clock skew", clock_skew, ()),
    Kind("missing rank", missing_rank, (), ("DATA001",), needs_ranks=3),
    Kind("one pause of one rank", pause_of_one, ("STEP001", "RANK001", "HOST001"), ("RANK003",), needs_ranks=2),
    Kind("time-sliced device", time_sliced_device, ("STREAM005",), ("RANK001", "RANK003")),
    Kind("clock drop", clock_drop, ("STEP003",), ("RANK001", "RANK003", "STEP001")),
    Kind("late launches of two ranks", late_group, ("RANK001", "HOST001", "RANK003"), needs_ranks=3),
)


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
    """The same for each step."""
    found: str | None
    """The code and severity that report it; None if none does."""
    cost_ns: float | None
    """What the finding says that it costs a step, beyond the control's."""
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

    findings: Sequence[Finding]
    baseline: Baseline

    @classmethod
    def of(cls, report: Report) -> "Control":
        """Return a control by its report."""
        return cls(report.findings, baselines.of_reports([(report, report.run)]))


def measure(folder: Path, kind: Kind, size: float, seed: int, scratch: Path, control: Control) -> Result:
    """Change a job's recordings, check them, and compare with the control."""
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    steps = max(len(_steps(job.ranks[0])), 1)
    culprit = kind.apply(job, size, random.Random(f"{folder.name} {kind.name} {size} {seed}"))
    length_us = max(rank.end for rank in job.ranks) - min(rank.start for rank in job.ranks)
    with tempfile.TemporaryDirectory(dir=scratch) as written:
        report = checked(job, Path(written))
        failures = gate.judge(report, Severity.ERROR, baseline=control.baseline).failures
    findings = report.findings
    truth_ns = 1000 * job.lost_us / steps
    found, cost_ns = _matching(findings, control.findings, kind.codes, culprit, truth_ns)
    known = {(finding.code, finding.subject) for finding in control.findings}
    allowed = {*kind.codes, *kind.also}
    unexpected = [
        f"{finding.code} {finding.subject}"
        for finding in findings
        if finding.severity >= Severity.WARNING
        and finding.code not in allowed
        and (finding.code, finding.subject) not in known
    ]
    return Result(
        folder.name,
        kind.name,
        size,
        seed,
        job.lost_us / length_us,
        truth_ns,
        found,
        cost_ns,
        tuple(unexpected),
        failures,
    )


def checked(job: Job, folder: Path) -> Report:
    """Replay a job, write its recordings to a folder, and return what `check` finds, measured for a baseline."""
    job.replay()
    for rank, document in zip(job.ranks, job.documents(), strict=True):
        perturbation_graph.write(document, folder / f"rank{rank.number}.pt.trace.json.gz")
    run = tracekit.load(str(folder), cache=False)
    return engine.check(run, facts=baselines.FACTS)


def _matching(
    findings: Sequence[Finding], control: Sequence[Finding], codes: Sequence[str], culprit: int | None, truth_ns: float
) -> tuple[str | None, float | None]:
    """Return code and severity of the finding that reports the change, and its cost: warnings first, then by `codes`.

    The first code is that of the cause itself. The others cost more where the control has a trouble of its own.
    """
    fitting = [finding for finding in findings if finding.code in codes]
    for finding in sorted(fitting, key=lambda f: (f.severity < Severity.WARNING, codes.index(f.code), -f.cost_ns)):
        before = max((each.cost_ns for each in control if each.id == finding.id), default=0)
        right_rank = culprit is None or not finding.ranks or culprit in finding.ranks
        if right_rank and finding.cost_ns - before >= truth_ns / 4:
            return f"{finding.code} {finding.severity.name.lower()}", finding.cost_ns - before
    return None, None


def _steps(rank: Rank) -> list[tuple[float, float]]:
    return rank.steps or [(rank.start, rank.end)]


def _step_us(rank: Rank) -> float:
    """Return the median step's length: a change takes as long in a step that is longer."""
    return statistics.median(end - start for start, end in _steps(rank))


def _placed(kernel: Kernel) -> tuple[float, float]:
    """Return when a kernel runs in the last replay."""
    start = kernel.start if kernel.new_start is None else kernel.new_start
    return start, kernel.end if kernel.new_end is None else kernel.new_end


def _slice(category: str, name: str, at: float, dur: float | None) -> Event:
    return {"cat": category, "name": name, "ts": at, "dur": dur, "args": {}}


def _between_calls(rank: Rank, at: float) -> float:
    """Return the first moment from `at` on at which the host is in no op or runtime call.

    Python runs only there: a pause inside a call, such as a cudaMalloc, would be a longer call instead.
    """
    for event in rank.host_slices:
        if event["ts"] > at:
            break
        if event["cat"] != "user_annotation":
            at = max(at, float(event["ts"] + event["dur"]) + _RESOLUTION_US)
    return at


def _drain(rank: Rank, at: float, dur: float, name: str) -> None:
    at = _between_calls(rank, at)
    if name.startswith("cuda"):
        slices = (_slice("cuda_runtime", name, 0.5, None),)
    else:
        slices = (
            _slice("cpu_op", name, 0.1, None),
            _slice("cpu_op", "aten::_local_scalar_dense", 0.2, None),
            _slice("cuda_runtime", "cudaStreamSynchronize", 0.5, None),
        )
    # The call ends when the device has done its work; what follows is Python's.
    rank.pauses.append(Pause(at, 0.0, drains=True, slices=slices))
    rank.pauses.append(Pause(at, dur))


def _load_data(rank: Rank, size: float) -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    pieces = (_slice("user_annotation", name, 0.0, None),)
    # What precedes the first kernel of an unmarked recording belongs to no window: load in its middle.
    starts = [start + 1 for start, _ in rank.steps] or [_between_calls(rank, (rank.start + rank.end) / 2)]
    rank.pauses.extend(Pause(start, size * _step_us(rank), slices=pieces) for start in starts)


def _save(job: Job, size: float, rng: random.Random, name: str | None) -> None:
    start, end = rng.choice(_steps(job.ranks[0]))
    pieces = (_slice("user_annotation", name, 0.0, None),) if name else ()
    for rank, at in _same_place(job, end - 0.02 * (end - start)):
        rank.pauses.append(Pause(_between_calls(rank, at), 5 * size * _step_us(rank), drains=True, slices=pieces))


def _same_place(job: Job, at: float) -> Iterable[tuple[Rank, float]]:
    """Yield when each rank's host is where the first rank's is at a time: between the same two collectives.

    Pauses of all ranks at different collectives would add up. Ranks without collectives are at the same part of their
    recording.
    """
    launches = [_collective_launches(rank) for rank in job.ranks]
    after = len(launches[0]) - bisect.bisect_right(launches[0], at)
    first, last = _around(job.ranks[0], launches[0], after)
    share = (at - first) / max(last - first, 1e-3)
    for rank, own in zip(job.ranks, launches, strict=True):
        first, last = _around(rank, own, after)
        yield rank, first + share * (last - first)


def _collective_launches(rank: Rank) -> list[float]:
    return sorted(kernel.launch for kernel in rank.kernels if kernel.is_collective and kernel.launch is not None)


def _around(rank: Rank, launches: list[float], after: int) -> tuple[float, float]:
    """Return the last launch with more than `after` launches behind it, and the next one."""
    before = len(launches) - after - 1
    return (
        launches[before] if before >= 0 else float(rank.host_slices[0]["ts"]),
        launches[-after] if after else float(rank.host_slices[-1]["ts"]),
    )


def table(results: Sequence[Result]) -> list[str]:
    """Return the results as lines of Markdown: for each kind of trouble, over all recordings."""
    lines = [
        "| trouble | recordings | cost ≥ 3% | found | as a warning | price within 15% | median error | unexpected "
        "| cost ≥ 10% | fails against the control |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in [*dict.fromkeys(result.kind for result in results), None]:
        those = [result for result in results if name in (None, result.kind)]
        due = [result for result in those if result.matters]
        found = [result for result in due if result.found]
        errors = [abs(r.cost_ns / r.truth_ns - 1) for r in found if r.cost_ns is not None]
        cells = (
            name or "**all**",
            str(len(those)),
            str(len(due)),
            str(len(found)),
            str(sum("info" not in (result.found or "") for result in found)),
            str(sum(error <= 0.15 for error in errors)),
            f"{statistics.median(errors):.0%}" if errors else "",
            str(sum(len(result.unexpected) for result in those)),
            str(sum(result.should_fail for result in those)),
            str(sum(result.should_fail and bool(result.failures) for result in those)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all kinds and sizes on all folders, print the table and what was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kind", action="append", help="only this kind of trouble; repeatable")
    parser.add_argument("--out", type=Path, help="put the table between the marks of this file")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    with tempfile.TemporaryDirectory() as scratch:
        results = list(_measured(options.folders, kinds, options.seeds, options.first_seed, Path(scratch)))
    lines = table(results)
    print("\n".join(lines))
    print()
    for result in results:
        passes = result.should_fail and not result.failures
        if (result.matters and not result.found) or result.unexpected or passes:
            print(
                f"{result.folder}, {result.kind} {result.size:.0%}, seed {result.seed}: costs {result.lost_ratio:.1%}, "
                f"found {result.found}, unexpected {', '.join(result.unexpected) or 'none'}"
                f"{', passes against the control' * passes}"
            )
    if options.out:
        put_between(options.out, "benchmarks.perturbed", lines)
    return 0


def _measured(
    folders: Iterable[Path], kinds: Sequence[Kind], seeds: int, first: int, scratch: Path
) -> Iterable[Result]:
    for folder in folders:
        job = perturbation_graph.load(folder.glob("*.json.gz"))
        with tempfile.TemporaryDirectory(dir=scratch) as written:
            control = Control.of(checked(job, Path(written)))
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
