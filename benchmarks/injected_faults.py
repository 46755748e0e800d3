"""Faults of known size to put into recorded jobs: a slow rank, a data stall, a checkpoint and others."""

import bisect
import math
import random
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.perturbation_events import Event, Kernel, Pause
from benchmarks.perturbation_graph import Job, Rank

_RESOLUTION_US = 1.0
"""Distance of two moments that are told apart: some recordings count float64 µs since 1970, in steps of 0.25 µs."""
_FROM_HOST = re.compile(r"(?i)HtoD|Host ?-> ?Device")
_PRODUCT = re.compile(r"(?i)gemm|cutlass|cijk|conv|flash|fmha")
_ROUNDS = 6
"""How often contention is applied to its own result."""
_MOST_SLOWDOWN = 4.0
"""Collectives take a part of the device: kernels that need more waves of blocks are at most a few times slower."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    apply: Callable[[Job, float, random.Random], int | None]
    """Change the job by a share of its step; return the rank that is at fault, None if none or all are."""
    codes: tuple[str, ...]
    """Rules that may report it."""
    also: tuple[str, ...] = ()
    """Rules that may report its consequence besides."""
    needs_ranks: int = 1
    by_cost: bool = False
    """Its size is the share of a step that it costs, for how far transfers or kernels hide it depends on the job."""


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
    for start, end in steps_of(rank):
        at_us = _between_calls(rank, start + rng.uniform(0.2, 0.6) * (end - start))
        rank.pauses.append(Pause(at_us, size * _step_us(rank)))
    return rank.number


def blocking_pause(job: Job, size: float, rng: random.Random) -> int:
    """Let one rank synchronize with the device in every step and then compute on the host."""
    rank = rng.choice(job.ranks)
    for start, end in steps_of(rank):
        _drain(rank, start + rng.uniform(0.2, 0.6) * (end - start), size * _step_us(rank), "cudaDeviceSynchronize")
    return rank.number


def item_calls(job: Job, size: float, rng: random.Random) -> None:
    """Let every rank read scalars from the device, several times a step."""
    places = [rng.uniform(0.1, 0.9) for _ in range(round(20 * size) + 2)]
    for start, end in steps_of(job.ranks[0]):
        for place in places:
            for rank, at_us in _same_place(job, start + place * (end - start)):
                _drain(rank, at_us, size * _step_us(rank) / len(places), "aten::item")


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
    name = _drawn_by_transfer(job, rng, lambda kernel: kernel.event["name"])
    for members in job.instances:
        for _, kernel in members:
            if kernel.event["name"] == name:
                kernel.stretch = 1 + 8 * size


def contention(job: Job, size: float, _rng: random.Random) -> None:
    """Slow compute kernels down while a collective is on the device.

    What slower kernels delay changes what overlaps, so the slowdown is applied to its own result until that is steady.
    """
    slowdown = min(1 + 3 * size, _MOST_SLOWDOWN)
    for _ in range(_ROUNDS):
        job.replay()
        for rank in job.ranks:
            busy = sorted(_replayed_span(kernel) for kernel in rank.kernels if kernel.is_collective)
            for kernel in rank.kernels:
                if not kernel.is_collective:
                    start, stop = _replayed_span(kernel)
                    both = sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in busy)
                    alone_us = max(kernel.end - kernel.start, 1e-3)
                    kernel.stretch = min(slowdown, 1 + both * (1 - 1 / slowdown) / alone_us)


def allocation_retries(job: Job, size: float, rng: random.Random) -> None:
    """Let the allocator of every rank free its cache and allocate anew in every step."""
    for start, end in steps_of(job.ranks[0]):
        for rank, at_us in _same_place(job, start + rng.uniform(0.2, 0.6) * (end - start)):
            dur = size * _step_us(rank)
            calls = [_slice("cuda_runtime", "cudaFree", dur * i / 8, dur / 9) for i in range(4)]
            calls += [_slice("cuda_runtime", "cudaMalloc", dur * (4 + i) / 8, dur / 9) for i in range(4)]
            rank.pauses.append(Pause(_between_calls(rank, at_us), dur, drains=True, slices=tuple(calls)))


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
    start, end = rng.choice(steps_of(rank))
    at_us = _between_calls(rank, start + rng.uniform(0.1, 0.3) * (end - start))
    rank.pauses.append(Pause(at_us, 3 * size * _step_us(rank)))
    return rank.number


def late_group(job: Job, size: float, _rng: random.Random) -> None:
    """Let two ranks, as of one host, launch late in every step."""
    for rank in (job.ranks[0], job.ranks[-1]):
        for start, end in steps_of(rank):
            rank.pauses.append(Pause(_between_calls(rank, start + 0.1 * (end - start)), size * _step_us(rank)))


def time_sliced_device(job: Job, size: float, rng: random.Random) -> int:
    """Let another process have the device of one rank for time slices.

    NVIDIA's driver gives slices of one to a few ms. The other process takes one after as much time as makes its share
    of the device `size`; not while a collective is on the device, whose loss no single rank would show. What is delayed
    changes when that is, so the slices are chosen again until that is steady.
    """
    rank = rng.choice(job.ranks)
    slice_us, length_us = rng.uniform(1000, 2500), rank.end - rank.start
    slices, at_us = [], rank.start
    while at_us < rank.end + 2 * size * length_us:
        at_us += slice_us * (1 / size - 1) * rng.uniform(0.5, 1.5)
        slices.append((at_us, at_us + slice_us))
        at_us += slice_us
    for _ in range(_ROUNDS):
        job.replay()
        busy = sorted(_replayed_span(kernel) for kernel in rank.kernels if kernel.is_collective)
        rank.taken = [
            (begin, until) for begin, until in slices if not any(start < until and begin < end for start, end in busy)
        ]
    return rank.number


def clock_drop(job: Job, size: float, rng: random.Random) -> int:
    """Let the clock of one rank's device drop: its kernels are slower from some step on, all by one factor."""
    rank = rng.choice(job.ranks)
    steps = steps_of(rank)
    since = steps[len(steps) // 2][0] if len(steps) > 1 else (rank.start + rank.end) / 2
    for kernel in rank.kernels:
        if not kernel.is_collective and kernel.event["cat"] == "kernel" and kernel.start >= since:
            kernel.stretch = 1 + 3 * size
    return rank.number


def uneven_work(job: Job, size: float, rng: random.Random) -> None:
    """Let each rank's kernels take longer or shorter by a factor of its own in each step, as for uneven sequences.

    The mean over ranks stays: what it costs is what balancing the work saves.
    """
    parts = [_compute_of_steps(rank) for rank in job.ranks]
    for place in range(len(parts[0])):
        factors = [1 + 3 * size * (rng.random() - 0.5) for _ in parts]
        mean = statistics.fmean(factors)
        for rank_parts, factor in zip(parts, factors, strict=True):
            for kernel in rank_parts[place]:
                kernel.stretch = factor / mean


def heating(job: Job, size: float, rng: random.Random) -> int:
    """Let the clock of one rank's device fall steadily: its kernels take longer and longer."""
    rank = rng.choice(job.ranks)
    for kernel in rank.kernels:
        if not kernel.is_collective and kernel.event["cat"] == "kernel":
            kernel.stretch = 1 + 6 * size * max(0.0, kernel.start - rank.start) / (rank.end - rank.start)
    return rank.number


def slow_last_step(job: Job, size: float, rng: random.Random) -> int:
    """Let the kernels of one rank take longer in the last step."""
    rank = rng.choice(job.ranks)
    for kernel in _compute_of_steps(rank)[-1]:
        kernel.stretch = 1 + 6 * size
    return rank.number


def slow_every_second_step(job: Job, size: float, rng: random.Random) -> int:
    """Let the kernels of one rank take longer in every second step."""
    rank = rng.choice(job.ranks)
    for kernels in _compute_of_steps(rank)[1::2]:
        for kernel in kernels:
            kernel.stretch = 1 + 6 * size
    return rank.number


def slow_pair(job: Job, size: float, rng: random.Random) -> None:
    """Let two ranks be slower in exchanges of all with all: they end these later than the others."""
    pair = rng.sample(job.ranks, 2)
    for members in job.instances:
        for rank, kernel in members:
            if "SendRecv" in kernel.event["name"] and rank in pair:
                kernel.stretch = 1 + 8 * size


def background_save(job: Job, size: float, rng: random.Random) -> None:
    """Let a save in the background slow the kernels of all ranks for half of one step."""
    place = rng.randrange(len(steps_of(job.ranks[0])))
    for rank in job.ranks:
        kernels = _compute_of_steps(rank)[place]
        first = kernels[0].start
        until = statistics.median(kernel.start for kernel in kernels)
        for kernel in rank.kernels:
            if not kernel.is_collective and first <= kernel.start <= until:
                kernel.stretch = 1 + 6 * size


def slow_copies(job: Job, size: float, _rng: random.Random) -> None:
    """Slow copies from the host down, as without pinned memory or behind a narrow link."""
    for rank in job.ranks:
        for kernel in rank.kernels:
            if kernel.event["cat"] == "gpu_memcpy" and _FROM_HOST.search(kernel.event["name"]):
                kernel.stretch = 1 + 20 * size


def delayed_stream(job: Job, size: float, rng: random.Random) -> None:
    """Let each kernel of one stream of compute start later than it could, on all ranks."""
    counts: dict[object, int] = {}
    for kernel in job.ranks[0].kernels:
        if not kernel.is_collective and kernel.event["cat"] == "kernel":
            counts[kernel.stream[1]] = counts.get(kernel.stream[1], 0) + 1
    stream = rng.choices(list(counts), [math.sqrt(count) for count in counts.values()])[0]
    for rank in job.ranks:
        delay = size * _step_us(rank) * len(steps_of(rank)) / counts[stream]
        for kernel in rank.kernels:
            if kernel.stream[1] == stream and not kernel.is_collective:
                kernel.delay = delay


def slow_group_link(job: Job, size: float, rng: random.Random) -> None:
    """Let the collectives of one process group transfer more slowly, those of other groups of its kind not."""
    group = _drawn_by_transfer(job, rng, lambda kernel: str(kernel.group))
    for members in job.instances:
        for _, kernel in members:
            if str(kernel.group) == group:
                kernel.stretch = 1 + 8 * size


def slow_rank_link(job: Job, size: float, rng: random.Random) -> int:
    """Let one rank's link be slow: its exchanges of all with all end later, its other collectives on all members."""
    rank = rng.choice(job.ranks)
    for members in job.instances:
        if any(member is rank for member, _ in members):
            for member, kernel in members:
                if member is rank or "SendRecv" not in kernel.event["name"]:
                    kernel.stretch = 1 + 8 * size
    return rank.number


def link_degrades(job: Job, size: float, _rng: random.Random) -> None:
    """Let all collectives transfer more slowly from the middle of the recording on."""
    for members in job.instances[len(job.instances) // 2 :]:
        for _, kernel in members:
            kernel.stretch = 1 + 16 * size


def retransmits(job: Job, size: float, rng: random.Random) -> None:
    """Let one collective in five transfer far more slowly, now and then."""
    for members in job.instances:
        stretch = 1 + 40 * size if rng.random() < 1 / 5 else 1.0
        for _, kernel in members:
            kernel.stretch = stretch


def late_collectives(job: Job, size: float, rng: random.Random) -> int:
    """Let the host of one rank be late directly before each collective."""
    rank = rng.choice(job.ranks)
    launches = [launch for launch in _collective_launches(rank) if launch > rank.steps_start]
    lost_us = size * _step_us(rank) * len(steps_of(rank))
    rank.pauses.extend(Pause(_ops_begin(rank, launch), lost_us / len(launches)) for launch in launches)
    return rank.number


def launched_twice(job: Job, size: float, rng: random.Random) -> int:
    """Let one rank launch kernels of some names twice in a row."""
    rank = rng.choice(job.ranks)
    calls = {event["args"]["correlation"]: event for event in rank.calls if "correlation" in event.get("args", {})}
    compute = [k for k in rank.kernels if not k.is_collective and k.event["cat"] == "kernel" and k.launch is not None]
    names = sorted({kernel.event["name"] for kernel in compute})
    chosen = set(rng.sample(names, max(1, round(min(1.0, 3 * size) * len(names)))))
    for number, kernel in enumerate(kernel for kernel in compute if kernel.event["name"] in chosen):
        call, correlation = calls[kernel.event["args"]["correlation"]], 10**8 + number
        kernel.stretch, kernel.twin = 2.0, {**kernel.event["args"], "correlation": correlation}
        launch = {**call, "args": {**call["args"], "correlation": correlation}, "ts": 0.5, "dur": 4.0}
        rank.pauses.append(Pause(float(call["ts"]) - _RESOLUTION_US / 2, 5.0, slices=(launch,)))
    return rank.number


def slow_layer(job: Job, size: float, rng: random.Random) -> None:
    """Let the kernels of one part of every step, such as a layer, take longer on all ranks."""
    place = rng.uniform(0.1, 0.8)
    for rank in job.ranks:
        for kernels in _compute_of_steps(rank):
            first = round(place * len(kernels))
            for kernel in kernels[first : first + len(kernels) // 8]:
                kernel.stretch = 1 + 12 * size


def late_optimizer(job: Job, size: float, _rng: random.Random) -> None:
    """Let all hosts pause before the last tenth of each step."""
    for start, end in steps_of(job.ranks[0]):
        for rank, at_us in _same_place(job, end - 0.1 * (end - start)):
            rank.pauses.append(Pause(_between_calls(rank, at_us), size * _step_us(rank)))


def slow_memory(job: Job, size: float, rng: random.Random) -> int:
    """Let the kernels of one rank that are bound by memory (no matrix products) take longer."""
    rank = rng.choice(job.ranks)
    for kernel in rank.kernels:
        if not kernel.is_collective and not _PRODUCT.search(kernel.event["name"]):
            kernel.stretch = 1 + 6 * size
    return rank.number


def power_cap(job: Job, size: float, _rng: random.Random) -> None:
    """Let the kernels of all ranks take longer in the second half of the recording."""
    for rank in job.ranks:
        for kernel in rank.kernels:
            if not kernel.is_collective and kernel.start >= (rank.steps_start + rank.end) / 2:
                kernel.stretch = 1 + 3 * size


def jitter(job: Job, size: float, rng: random.Random) -> None:
    """Let the hosts of all ranks pause at random moments, as when other processes take their cores."""
    for rank in job.ranks:
        for start, end in steps_of(rank):
            for _ in range(8):
                at_us = _between_calls(rank, rng.uniform(start, end))
                rank.pauses.append(Pause(at_us, size * _step_us(rank) * rng.expovariate(8)))


_LATE = ("RANK001", "RANK004")
"""Rules on late ranks: the rank at fault may straggle alone, or together with another one."""

KINDS = (
    Kind("slow rank", slow_rank, (*_LATE, "RANK003"), needs_ranks=2),
    Kind("late host of one rank", late_host, (*_LATE, "HOST001"), ("RANK003",), needs_ranks=2),
    # A pause after a wait that found the device almost idle is a late launch.
    Kind("blocking pause of one rank", blocking_pause, ("HOST002", *_LATE, "HOST001"), ("RANK003",), needs_ranks=2),
    Kind("reading scalars", item_calls, ("HOST002",), ("HOST001",)),
    Kind("data stall", data_stall, ("HOST003",)),
    Kind("data stall of one rank", data_stall_of_one, ("HOST003", *_LATE), ("RANK003",), needs_ranks=2),
    Kind("slow collectives", slow_collectives, ("RANK002", "COMM001", "TP002"), ("STREAM004",), by_cost=True),
    Kind("slow link of a group", slow_group_link, ("RANK002", "COMM001", "TP002"), ("STREAM004",), 2, by_cost=True),
    Kind("slow link of a rank", slow_rank_link, ("RANK002", "COMM001", "TP002"), ("STREAM004",), 2, by_cost=True),
    Kind("contention", contention, ("STREAM003",), ("COMM001",), by_cost=True),
    Kind("allocation retries", allocation_retries, ("MEM001", "MEM007")),
    Kind("checkpoint", checkpoint, ("CKPT001", "CKPT002", "CKPT003")),
    Kind("save without a name", nameless_save, ("STEP001", "HOST001", "HOST002")),
    Kind("clock skew", clock_skew, ()),
    Kind("missing rank", missing_rank, (), ("DATA001",), needs_ranks=3),
    Kind("one pause of one rank", pause_of_one, ("STEP001", *_LATE, "HOST001"), ("RANK003",), needs_ranks=2),
    Kind("time-sliced device", time_sliced_device, ("STREAM005",), (*_LATE, "RANK003")),
    Kind("clock drop", clock_drop, ("STEP003",), (*_LATE, "RANK003", "STEP001")),
    Kind("uneven work", uneven_work, ("RANK003", *_LATE, "RANK005", "STEP001"), needs_ranks=2),
    Kind("heating", heating, ("STEP003",), (*_LATE, "RANK003", "STEP001")),
    Kind("slow last step", slow_last_step, ("STEP003", "STEP001", "RANK005"), (*_LATE, "RANK003")),
    Kind("slow in every second step", slow_every_second_step, ("RANK005", *_LATE), ("RANK003", "STEP001")),
    Kind("slow pair in all-to-alls", slow_pair, ("RANK002", "COMM001", "RANK003", *_LATE), needs_ranks=3),
    Kind("save in the background", background_save, ("STEP003", "STEP001", "CKPT001", "CKPT002")),
    Kind("slow copies from the host", slow_copies, ("HOST004", "HOST002", "HOST003")),
    Kind("delayed stream", delayed_stream, ("STREAM005", "STREAM002", "HOST001")),
    Kind("link degrades", link_degrades, ("RANK002", "STEP004", "COMM001", "TP002"), ("STREAM004",)),
    Kind("retransmitted transfers", retransmits, ("STEP004", "RANK002", "COMM001", "TP002"), ("STREAM004",)),
    Kind("late before collectives", late_collectives, (*_LATE, "HOST001", "RANK003"), needs_ranks=2),
    Kind("kernels launched twice", launched_twice, (*_LATE, "RANK003", "HOST001"), needs_ranks=2),
    Kind("slow layer", slow_layer, ("STEP003",)),
    Kind("late optimizer", late_optimizer, ("HOST001", "HOST002")),
    Kind("slow memory of one rank", slow_memory, (*_LATE, "RANK003"), needs_ranks=2),
    Kind("power cap", power_cap, ("STEP003", "STEP001")),
    Kind("host jitter", jitter, ("HOST001", "RANK003", *_LATE)),
    Kind("late launches of two ranks", late_group, ("RANK004", "RANK001", "HOST001", "RANK003"), needs_ranks=3),
)


def steps_of(rank: Rank) -> list[tuple[float, float]]:
    return rank.steps or [(rank.start, rank.end)]


def _drawn_by_transfer(job: Job, rng: random.Random, key: Callable[[Kernel], str]) -> str:
    """Key of a collective, drawn with the probability of its transfer time, for the others cost nothing."""
    times: dict[str, float] = {}
    for members in job.instances:
        transfer = members[0][1].end - max(kernel.start for _, kernel in members)
        times[key(members[0][1])] = times.get(key(members[0][1]), 0.0) + max(transfer, 0.0)
    return rng.choices(sorted(times), [times[value] for value in sorted(times)])[0]


def _compute_of_steps(rank: Rank) -> list[list[Kernel]]:
    """Kernels that are no collectives, by the step in which they were launched."""
    begins = [start for start, _ in steps_of(rank)]
    parts: list[list[Kernel]] = [[] for _ in begins]
    for kernel in rank.kernels:
        place = bisect.bisect_right(begins, kernel.start if kernel.launch is None else kernel.launch) - 1
        if not kernel.is_collective and place >= 0:
            parts[place].append(kernel)
    return parts


def _step_us(rank: Rank) -> float:
    """Return the median step's length: a change takes as long in a step that is longer."""
    return statistics.median(end - start for start, end in steps_of(rank))


def _replayed_span(kernel: Kernel) -> tuple[float, float]:
    """Start and end of a kernel in the last replay."""
    start = kernel.start if kernel.new_start is None else kernel.new_start
    return start, kernel.end if kernel.new_end is None else kernel.new_end


def _slice(category: str, name: str, at_us: float, dur: float | None) -> Event:
    return {"cat": category, "name": name, "ts": at_us, "dur": dur, "args": {}}


def _between_calls(rank: Rank, at_us: float) -> float:
    """Return the first moment from `at_us` on at which the host is in no op or runtime call.

    Python runs only there: a pause inside a call, such as a cudaMalloc, would be a longer call instead.
    """
    for event in rank.host_slices:
        if event["ts"] > at_us:
            break
        if event["cat"] != "user_annotation":
            at_us = max(at_us, float(event["ts"] + event["dur"]) + _RESOLUTION_US)
    return at_us


def _ops_begin(rank: Rank, launch: float) -> float:
    """Moment directly before the outermost op around a launch."""
    around = (e for e in rank.host_slices if e["cat"] != "user_annotation" and e["ts"] <= launch <= e["ts"] + e["dur"])
    return float(min((event["ts"] for event in around), default=launch)) - _RESOLUTION_US


def _drain(rank: Rank, at_us: float, dur: float, name: str) -> None:
    at_us = _between_calls(rank, at_us)
    if name.startswith("cuda"):
        slices = (_slice("cuda_runtime", name, 0.5, None),)
    else:
        slices = (
            _slice("cpu_op", name, 0.1, None),
            _slice("cpu_op", "aten::_local_scalar_dense", 0.2, None),
            _slice("cuda_runtime", "cudaStreamSynchronize", 0.5, None),
        )
    # The call ends when the device has done its work; what follows is Python's.
    rank.pauses.append(Pause(at_us, 0.0, drains=True, slices=slices))
    rank.pauses.append(Pause(at_us, dur))


def _load_data(rank: Rank, size: float) -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    pieces = (_slice("user_annotation", name, 0.0, None),)
    # What precedes the first kernel of an unmarked recording belongs to no window: load in its middle.
    starts = [start + 1 for start, _ in rank.steps] or [_between_calls(rank, (rank.start + rank.end) / 2)]
    rank.pauses.extend(Pause(start, size * _step_us(rank), slices=pieces) for start in starts)


def _save(job: Job, size: float, rng: random.Random, name: str | None) -> None:
    start, end = rng.choice(steps_of(job.ranks[0]))
    pieces = (_slice("user_annotation", name, 0.0, None),) if name else ()
    for rank, at_us in _same_place(job, end - 0.02 * (end - start)):
        rank.pauses.append(Pause(_between_calls(rank, at_us), 5 * size * _step_us(rank), drains=True, slices=pieces))


def _same_place(job: Job, at_us: float) -> Iterable[tuple[Rank, float]]:
    """Yield when each rank's host is where the first rank's is at a time: between the same two collectives.

    Pauses of all ranks at different collectives would add up. Ranks without collectives are at the same part of their
    recording.
    """
    launches = [_collective_launches(rank) for rank in job.ranks]
    after = len(launches[0]) - bisect.bisect_right(launches[0], at_us)
    first, last = _around(job.ranks[0], launches[0], after)
    share = (at_us - first) / max(last - first, 1e-3)
    for rank, rank_launches in zip(job.ranks, launches, strict=True):
        first, last = _around(rank, rank_launches, after)
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
