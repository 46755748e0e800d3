"""Recorded multi-rank traces as a dependency graph, replayed with changes: what would have been recorded then.

An independent program: it reads Kineto JSON with the standard library and shares no code with tracekit, so what
tracekit says of a changed recording can be compared with what was changed. All times are in µs.

The graph of a recording:

- The host of a rank is one line in time. A pause inserted at a moment moves all that its threads do afterwards.
- A call that waits for the device (cudaStreamSynchronize, a copy to the host) ends when the awaited kernel has ended.
- A kernel starts when it was launched, when the kernel before it on its stream has ended, and when the kernel of
  another stream has ended that it waited for by an event: a call before its launch says so. A kernel that was launched
  before the recording waited for another stream's if it started as that one ended. A call that first loads the kernel's
  code, which can take 24 ms, launches at its end. A kernel that could have started, but did not while another stream's
  kernels occupied the device, starts when these end or pause. What it was later than all this stays.
- A collective's kernel ends, on every rank, as long after the last rank's start as it did in the recording.
- While another process has a rank's device (`Rank.taken`), no kernel of the rank starts, and the one that runs is
  paused unless it is about to end. A collective's kernel that runs is not paused: the other process waits for it.
"""

import bisect
import functools
import gzip
import json
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

from benchmarks import perturbation_output
from benchmarks.perturbation_events import (
    DEVICE,
    LATENCY_US,
    RUNTIME,
    Event,
    Kernel,
    Pause,
    collective_instances,
    kernel_of,
    recorded_waits,
)

_WAIT_CALL = re.compile(r"(cuda|hip)StreamWaitEvent")
_NEAR_US = 20.0
"""A kernel that starts this soon after another stream's kernel has ended may have waited for it: on an MI300 it does so
10 to 18 µs later."""
_DRAIN_US = 50.0
"""A kernel that ends this soon runs to its end before the device switches to another process."""
_ROOM_US = 50.0
"""A kernel that starts so long after it could have, while kernels of another stream run, waited for room."""
_HELD_UP_US = 1000.0
"""A kernel that holds another stream's up for so long fills the device."""
_FULL_RATIO = 0.9
"""They run for this share of the time."""
_INFINITY = float("inf")
_QUEUED_US = 30.0
"""A kernel that was launched this long before it started did not wait for its launch."""


class Rank:
    """One rank's recording."""

    def __init__(self, document: dict[str, Any], number: int) -> None:
        self.document, self.number = document, number
        events: list[Event] = document["traceEvents"]
        self.events = events
        spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
        calls = {
            event["args"]["correlation"]: event
            for event in spans
            if event.get("cat") in RUNTIME and "correlation" in event.get("args", {})
        }
        self.calls = sorted((e for e in spans if e.get("cat") in RUNTIME), key=lambda event: event["ts"])
        self.kernels = sorted(
            (kernel_of(event, calls) for event in spans if event.get("cat") in DEVICE), key=lambda k: (k.start, k.end)
        )
        host = [e for e in spans if e.get("cat") in ("cpu_op", "user_annotation", "Operator", *RUNTIME)]
        self.host_slices = sorted(host, key=lambda event: event["ts"])
        self.steps = sorted(
            (float(e["ts"]), float(e["ts"] + e["dur"]))
            for e in host
            if str(e["name"]).startswith("ProfilerStep#") and e["cat"] == "user_annotation"
        )
        threads: dict[tuple[Any, Any], float] = defaultdict(float)
        for event in host:
            threads[event["pid"], event["tid"]] += 1
        self.main_thread = max(threads, key=lambda thread: threads[thread])
        self._waits = tuple(recorded_waits(self.kernels, self.calls))
        self.pauses: list[Pause] = [*self._waits]
        self._fill: list[tuple[Kernel, float]] = []
        self._collectives = [kernel for kernel in self.kernels if kernel.is_collective]
        self._link()
        self._shifts: list[tuple[float, float]] = []
        self._resolved = 0
        self.taken: list[tuple[float, float]] = []
        """When another process has the device: disjoint, sorted, in time of the replay."""
        self._resolving = float("inf")
        """Moment of the pause whose length is being computed."""
        self.clock_us = 0.0
        """How much later than in the recording its clock is."""
        self.host_speed = 1.0
        """How many times as fast as in the recording its host is; it waits for the device as long as that needs."""
        self.placed: list[tuple[Pause, float, float]] = []
        """Each pause of the replay with its start and end."""

    @property
    def start(self) -> float:
        """When the recording's first piece of host or device work starts."""
        return min(float(self.host_slices[0]["ts"]), self.kernels[0].start)

    @property
    def end(self) -> float:
        """When its last kernel ends."""
        return max(kernel.end for kernel in self.kernels)

    @property
    def new_end(self) -> float:
        """The same after the replay."""
        return max(kernel.new_end or kernel.end for kernel in self.kernels)

    @property
    def steps_start(self) -> float:
        """When its host begins the first step; without marked steps, when the recording starts."""
        return self.steps[0][0] if self.steps else self.start

    @property
    def first_of_steps(self) -> Kernel:
        """The first work that is launched in a step; without marked steps, the first work."""
        in_steps = (k for k in self.kernels if k.launch is not None and k.launch >= self.steps_start)
        return next(in_steps, self.kernels[0]) if self.steps else self.kernels[0]

    def without_changes_in_steps(self) -> None:
        """Undo the changes to the host and to the work that is launched from the first step on."""
        first = self.first_of_steps
        begin = first.start if first.new_start is None else first.new_start
        self.pauses = [pause for pause in self.pauses if pause.call is not None or pause.at_us < self.steps_start]
        self.taken = [span for span in self.taken if span[0] < begin]
        for kernel in self.kernels:
            if not self.steps or (kernel.launch is not None and kernel.launch >= self.steps_start):
                kernel.stretch, kernel.delay = 1.0, 0.0

    def undo_changes(self) -> None:
        """Undo all changes to the host, to the work and to the clock, and forget the last replay."""
        self.pauses, self.taken, self.clock_us, self.host_speed = [*self._waits], [], 0.0, 1.0
        for kernel in self.kernels:
            kernel.stretch, kernel.delay, kernel.twin = 1.0, 0.0, None
        self.prepare()

    def _link(self) -> None:
        waits = [float(call["ts"]) for call in self.calls if _WAIT_CALL.match(call["name"])]
        by_launch = sorted((k for k in self.kernels if k.launch is not None), key=lambda k: k.launch or 0.0)
        follows_wait = set()
        next_wait = 0
        for previous, kernel in zip([None, *by_launch], by_launch, strict=False):
            since = previous.launch if previous is not None and previous.launch is not None else -1.0
            while next_wait < len(waits) and waits[next_wait] <= since:
                next_wait += 1
            if next_wait < len(waits) and waits[next_wait] <= (kernel.launch or 0.0):
                follows_wait.add(id(kernel))
        last: dict[tuple[Any, Any], Kernel] = {}
        ends: list[tuple[float, int]] = []
        for index, kernel in enumerate(self.kernels):
            before = last.get(kernel.stream)
            if before is not None:
                kernel.after.append(before)
            # What has no launch was launched before the recording began, and what it waits for is not recorded.
            queued = kernel.launch is None or (not waits and kernel.start - kernel.launch > _QUEUED_US)
            idle = before is None or kernel.start - before.end > 2
            collective = self._awaited_collective(kernel, before) if id(kernel) in follows_wait else None
            if collective is not None:
                kernel.after.append(collective)
            elif id(kernel) in follows_wait or kernel.is_collective or (queued and idle):
                near = _NEAR_US if not kernel.is_collective else 1e12
                kernel.after.extend(self._last_before(kernel, ends, near=near))
            last[kernel.stream] = kernel
            bisect.insort(ends, (kernel.end, index))
        self._link_room()

    def _awaited_collective(self, kernel: Kernel, before: Kernel | None) -> Kernel | None:
        """Return the last collective that ended while a kernel waited, though launched and next on its stream.

        After a call for such a wait the kernel need not start at once: other kernels may leave it no room yet.
        """
        if kernel.is_collective:
            return None
        ready = max(kernel.submitted + LATENCY_US, before.end if before is not None else kernel.submitted)
        ended = (
            other
            for other in self._collectives
            if ready < other.end <= kernel.start + 1
            and other.stream != kernel.stream
            and (other.launch is None or (kernel.launch is not None and other.launch <= kernel.launch))
        )
        return max(ended, key=lambda other: other.end, default=None)

    def _link_room(self) -> None:
        """Find which kernels waited for room on the device: without them, they would have been less late."""
        done: list[Kernel] = []
        for kernel in self.kernels:
            ready = self._ready(kernel)
            if kernel.start - ready > _ROOM_US:
                done = [other for other in done if other.end > kernel.start - 1e6]
                candidates = [
                    other
                    for other in done
                    if other.end > ready and other.stream != kernel.stream and not other.is_collective
                ]
                running = [other for other in candidates if other.end > kernel.start - _NEAR_US]
                occupants = [other for other in candidates if running and other.stream == running[-1].stream]
                busy = sum(min(other.end, kernel.start) - max(other.start, ready) for other in occupants)
                kernel.room = occupants if busy > _FULL_RATIO * (kernel.start - ready) else []
            done.append(kernel)
        self._fill = self._filling()

    def _filling(self) -> list[tuple[Kernel, float]]:
        """Return the kernels that left another stream no room for a ms or more, with the time of their last blocks."""
        early: dict[int, tuple[Kernel, float]] = {}
        for kernel in self.kernels:
            if kernel.room and kernel.start - self._ready(kernel) >= _HELD_UP_US:
                last = kernel.room[-1]
                early_us = early.get(id(last), (last, last.end - last.start))[1]
                early[id(last)] = last, min(early_us, max(last.end - kernel.start, 0.0))
        return list(early.values())

    def _after_filling(self, kernel: Kernel, new_start: float) -> float:
        """Start of a kernel where it finds room: not while one fills the device that started before it.

        What started before it in the recording does not depend on it, whatever changes.
        """
        if kernel.is_collective or kernel.launch is None:
            return new_start
        for other, early in self._fill:
            both = kernel.start < other.end - early  # they ran together in the recording, or in the other order
            if other.stream == kernel.stream or both or other.launch is None or other.launch > kernel.launch:
                continue
            end = resolve(other, self) - early
            if self.starts_at(other) <= new_start < end:
                new_start = end
        return new_start

    def _ready(self, kernel: Kernel) -> float:
        """Earliest start of a kernel in the recording, by its launch and what it depends on."""
        if kernel.launch is None:
            return kernel.start
        return max([kernel.submitted + LATENCY_US, *(min(other.end, kernel.start) for other in kernel.after)])

    def _has_room(self, kernel: Kernel, new_ready: float) -> float:
        """Moment in the replay at which the kernels that occupied the device leave room: when they end or pause."""
        ended, new_ended = self._ready(kernel), new_ready
        for other in kernel.room:
            if other.launch is not None and other.launch >= self._resolving:
                return new_ended  # the host launches it only after the device has done all before
            idle = max(other.start - ended, 0.0)
            if self.starts_at(other) > new_ended + idle + _ROOM_US:
                return new_ended
            early = max(other.end - kernel.start, 0.0)  # its last blocks leave room
            ended, new_ended = other.end - early, max(resolve(other, self) - early, new_ready)
        return new_ended

    def _last_before(self, kernel: Kernel, ends: list[tuple[float, int]], *, near: float) -> Iterable[Kernel]:
        """Yield the last kernel of another stream that ended before this one started and was launched before it."""
        position = bisect.bisect_right(ends, (kernel.start + 1, len(self.kernels)))
        for end, index in reversed(ends[max(0, position - 64) : position]):
            other = self.kernels[index]
            if kernel.start - end > near:
                return
            launched_before = other.launch is None or (kernel.launch is not None and other.launch <= kernel.launch)
            if other.stream != kernel.stream and launched_before:
                yield other
                return

    def host(self, time: float) -> float:
        """Moment in the replay of a moment of the host's."""
        while self._resolved < len(self.pauses) and self.pauses[self._resolved].at_us <= time:
            pause = self.pauses[self._resolved]
            shift = self._shifts[-1][1] if self._shifts else 0.0
            self._resolved += 1
            outer, self._resolving = self._resolving, pause.at_us
            self._shifts.append((pause.at_us, self._after(pause, shift)))
            self._resolving = outer
            at_us = self._sped_up(pause.at_us)
            self.placed.append((pause, at_us + shift, at_us + self._shifts[-1][1]))
        count = bisect.bisect_right(self._shifts, (time, _INFINITY))
        return self._sped_up(time) + (self._shifts[count - 1][1] if count else 0.0)

    def _sped_up(self, time: float) -> float:
        """Moment of a moment of the host's if all that it does is faster."""
        return time if self.host_speed == 1 else self.start + (time - self.start) / self.host_speed

    def _after(self, pause: Pause, shift: float) -> float:
        """Return by how much the host is later after a pause."""
        if pause.call is not None:
            start, end = pause.call
            if pause.awaits is None:
                return shift
            waited = pause.awaits.end > start
            called = (min(end - start, 5.0) if waited else end - start) / self.host_speed
            tail = max(end - pause.awaits.end, 0.0) if waited else 3.0
            earliest = self._sped_up(start) + shift + called
            return max(earliest, resolve(pause.awaits, self) + tail) - self._sped_up(end)
        at_us = self._sped_up(pause.at_us)
        start = at_us + shift
        if pause.drains:
            launched = [k for k in self.kernels if k.launch is not None and k.launch < pause.at_us]
            start = max([start, *(resolve(kernel, self) for kernel in launched[-400:])])
        return start + pause.dur - at_us

    def prepare(self) -> None:
        """Sort the pauses; called before a replay."""
        self.pauses.sort(key=lambda pause: pause.at_us)
        self._shifts, self._resolved, self.placed = [], 0, []
        self._resolving = float("inf")
        for kernel in self.kernels:
            kernel.new_start = kernel.new_end = None

    def starts_at(self, kernel: Kernel) -> float:
        """Start of a kernel in the replay."""
        if kernel.new_start is None:
            ready, new_ready = -1e300, -1e300
            if kernel.launch is not None:
                latency = min(LATENCY_US, kernel.start - kernel.submitted)
                ready, new_ready = kernel.submitted + latency, self.host(kernel.submitted) + latency
            for other in kernel.after:
                overlap = max(other.end - kernel.start, 0.0)  # such as of a kernel launched early by its predecessor
                ready, new_ready = max(ready, other.end - overlap), max(new_ready, resolve(other, self) - overlap)
            if kernel.room:
                ready, new_ready = min(kernel.room[-1].end, kernel.start), self._has_room(kernel, new_ready)
            kernel.new_start = kernel.start if ready == -1e300 else new_ready + max(kernel.start - ready, 0.0)
            if self._fill:
                kernel.new_start = self._after_filling(kernel, kernel.new_start)
            kernel.new_start = self._free_from(kernel.new_start + kernel.delay)
        return kernel.new_start

    def _free_from(self, time: float) -> float:
        """Return the first moment from `time` on at which the device is not taken."""
        index = bisect.bisect_right(self.taken, (time, float("inf"))) - 1
        return max(time, self.taken[index][1]) if index >= 0 else time

    def ends_at(self, start: float, duration: float) -> float:
        """End of a kernel that runs for a duration while the device is not taken."""
        end = start + duration
        for begin, until in self.taken[bisect.bisect_right(self.taken, (start, float("inf"))) :]:
            if begin > end - _DRAIN_US:
                break
            end += until - begin
        return end


class Job:
    """The recordings of all ranks of a job."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self._recorded_ranks = tuple(ranks)
        self.instances = collective_instances(ranks)
        for members in self.instances:
            for _, kernel in members:
                kernel.members = members

    def undo_changes(self) -> None:
        """Make it the job that was read: with all ranks, and without changes or a replay."""
        self.ranks = [*self._recorded_ranks]
        for rank in self.ranks:
            rank.undo_changes()

    def replay(self) -> None:
        """Compute when everything happens with the changes made to pauses and kernels."""
        for rank in self.ranks:
            rank.prepare()

        def run() -> None:
            for rank in self.ranks:
                for kernel in rank.kernels:
                    resolve(kernel, rank)

        # The graph is deep: a kernel depends on the one before it, and so on. The limit is restored, since with this
        # one deeply nested JSON would crash the process.
        limit, stack_bytes = sys.getrecursionlimit(), threading.stack_size()
        sys.setrecursionlimit(1_000_000)
        threading.stack_size(1 << 29)
        try:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        finally:
            sys.setrecursionlimit(limit)
            threading.stack_size(stack_bytes)

    def documents(self) -> list[dict[str, Any]]:
        """Return the replayed recordings, as Kineto would have written them."""
        return [perturbation_output.document(rank) for rank in self.ranks]

    @property
    def lost_us(self) -> float:
        """How much longer the replayed recording is than the original: of the rank that ends last."""
        return max(rank.new_end for rank in self.ranks) - max(rank.end for rank in self.ranks)

    def lost_in_steps_us(self) -> float:
        """Replay, and return how much longer the steps are for the changes in them: of the rank with the longest.

        Steps begin with the first work that is launched in them. What changes before it, such as slow kernels that were
        queued when the recording began, is in both replays: with the changes in the steps, and without them.
        """
        changes = [(r, r.pauses, r.taken, [(k, k.stretch, k.delay) for k in r.kernels]) for r in self.ranks]
        for rank in self.ranks:
            rank.without_changes_in_steps()
        self.replay()
        begins = [rank.first_of_steps.new_start or 0.0 for rank in self.ranks]
        before = [rank.new_end for rank in self.ranks]
        for rank, pauses, busy_spans, stretches in changes:
            rank.pauses, rank.taken = pauses, busy_spans
            for kernel, stretch, delay in stretches:
                kernel.stretch, kernel.delay = stretch, delay
        self.replay()
        after = [rank.new_end for rank in self.ranks]
        return max(end - begin for end, begin in zip(after, begins, strict=True)) - max(
            end - begin for end, begin in zip(before, begins, strict=True)
        )


def resolve(kernel: Kernel, rank: Rank) -> float:
    """End of a kernel in the replay."""
    if kernel.new_end is None:
        start = rank.starts_at(kernel)
        duration = kernel.end - kernel.start
        if not kernel.members:
            kernel.new_end = rank.ends_at(start, duration * kernel.stretch)
        else:
            last = max(other.start for _, other in kernel.members)
            new_last = max(owner.starts_at(other) for owner, other in kernel.members)
            transfer = kernel.end - last
            kernel.new_end = (
                new_last + transfer * kernel.stretch if transfer > 0 else max(start + duration, new_last + transfer)
            )
    return kernel.new_end


def load(paths: Iterable[Path]) -> Job:
    """Read the recordings of a job: one file a rank, in the order of ranks, or one file that merges those of all."""
    documents = [part for path in sorted(paths) for part in _read(path)]
    return Job([Rank(document, number) for number, document in enumerate(documents)])


def with_faster_hosts(folder: Path, written: Path, speed: float) -> Path:
    """Write the recordings of a job again as if its hosts were faster, such as for a device that limits the step."""
    job = load(folder.glob("*.json.gz"))
    for rank in job.ranks:
        rank.host_speed = speed
    job.replay()
    target = written / f"{folder.name}@{speed:g}"
    target.mkdir()
    for rank, document in zip(job.ranks, job.documents(), strict=True):
        write(document, target / f"rank{rank.number:05d}.pt.trace.json.gz")
    return target


def write(document: dict[str, Any], path: Path) -> None:
    """Write a recording, compressed."""
    path.write_bytes(igzip.compress(msgspec.json.encode(document), compresslevel=1))  # ten times as fast as json, gzip


@functools.lru_cache(maxsize=8)  # each case of a folder reads the same files, and changes none of the events
def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        return _of_ranks(json.load(file))


def _of_ranks(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the documents of which one was merged: its events name their rank, and each rank has its own pids."""
    rank_of = {
        event["pid"]: event["args"]["rank"]
        for event in document["traceEvents"]
        if event.get("cat") in DEVICE | RUNTIME and "rank" in event.get("args", {})
    }
    if len(set(rank_of.values())) < 2:
        return [document]
    events = defaultdict(list)
    for event in document["traceEvents"]:
        if event.get("pid") in rank_of:
            events[rank_of[event["pid"]]].append(event)
    return [
        {
            **document,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(events)},
            "traceEvents": events[rank],
        }
        for rank in sorted(events)
    ]
