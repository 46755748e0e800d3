"""What `perturbation_graph` reads of a recording: work on devices, and calls that wait for it. All times are in µs."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.perturbation_graph import Rank

Event = dict[str, Any]

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME = {"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"}
LATENCY_US = 4.0
"""Least time from a launch to the start of its kernel."""
_SYNC_CALL = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize")
_COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)
_CALL_US = 10.0
"""A launching call takes a few µs; one that takes longer does something else before it launches."""


@dataclass
class Kernel:
    """A piece of work on a device, with what it depends on."""

    event: Event
    start: float
    end: float
    stream: tuple[Any, Any]
    launch: float | None
    """Start of the call that launched it."""
    submitted: float = 0.0
    """The same for a call that takes longer because it first loads code: it launches at its end."""
    after: list["Kernel"] = field(default_factory=list)
    members: list[tuple["Rank", "Kernel"]] = field(default_factory=list)
    """Of a collective: its kernels on all ranks, this one included."""
    room: list["Kernel"] = field(default_factory=list)
    """Kernels of another stream that occupied the device until it started, though it could have started before."""
    stretch: float = 1.0
    """Factor for the time that it takes; of a collective, for its transfer."""
    delay: float = 0.0
    """Time by which it starts later than it could."""
    twin: dict[str, Any] | None = None
    """Arguments of the first of two equal kernels, if it is launched twice: each takes half of the time of both."""
    new_start: float | None = None
    new_end: float | None = None

    @functools.cached_property
    def is_collective(self) -> bool:
        """Whether it exchanges data with other ranks."""
        return self.event["cat"] == "kernel" and _COLLECTIVE.search(self.event["name"]) is not None

    @functools.cached_property
    def group(self) -> tuple[str, str] | None:
        """Process group of a collective: its ranks and its name; None where the recording does not state them."""
        args = self.event.get("args", {})
        ranks = args.get("Process Group Ranks")
        return (str(ranks), str(args.get("Process Group Name"))) if ranks else None


@dataclass(frozen=True)
class Pause:
    """Time inserted on the host: at a moment, or (awaits) where a recorded call waits for the device until `at`."""

    at_us: float
    dur: float
    drains: bool = False
    """The host first waits until the device has done all that was launched before."""
    awaits: Kernel | None = None
    call: tuple[float, float] | None = None
    """Start and end of a recorded call that waits."""
    slices: tuple[Event, ...] = ()
    """Slices to record for the pause: ts and dur are relative to it; a dur of None is that of the pause."""


def kernel_of(event: Event, calls: dict[Any, Event]) -> Kernel:
    """Return the work of a device event, launched by the call with its correlation id."""
    call = calls.get(event.get("args", {}).get("correlation"))
    start = float(event["ts"])
    launch = None if call is None else min(float(call["ts"]), start)
    kernel = Kernel(event, start, start + float(event["dur"]), (event["pid"], event["tid"]), launch)
    kernel.submitted = launch or 0.0
    if call is not None and launch is not None and event["cat"] != "gpu_memcpy":  # the call of a copy may wait for it
        returned = float(call["ts"] + call["dur"])
        kernel.submitted = max(launch, min(returned - _CALL_US, start - LATENCY_US))
    return kernel


def collective_instances(ranks: "Sequence[Rank]") -> "list[list[tuple[Rank, Kernel]]]":
    """Collectives of all ranks by process group, in the order of time; all end together, so they match from the last.

    Where one does not state its group, all are of one group.
    """
    collectives = [(rank, kernel) for rank in ranks for kernel in rank.kernels if kernel.is_collective]
    are_grouped = all(kernel.group is not None for _, kernel in collectives)
    sequences: dict[object, dict[int, list[tuple[Rank, Kernel]]]] = defaultdict(lambda: defaultdict(list))
    for rank, kernel in collectives:
        sequences[kernel.group if are_grouped else None][rank.number].append((rank, kernel))
    instances = []
    for by_rank in sequences.values():
        if len(by_rank) < (2 if are_grouped else len(ranks)) or len(ranks) < 2:
            continue
        for place in range(1, min(map(len, by_rank.values())) + 1):
            members = [sequence[-place] for sequence in by_rank.values()]
            names = {kernel.event["name"] for _, kernel in members}
            if len(names) != 1:
                raise ValueError(f"the ranks' collectives differ: {sorted(names)}")
            instances.append(members)
    return sorted(instances, key=lambda members: max(kernel.start for _, kernel in members))


def recorded_waits(kernels: Sequence[Kernel], calls: Sequence[Event]) -> Iterable[Pause]:
    """Yield the calls in which the host waits for the device, with the kernel that each waits for.

    `calls` are sorted by time.
    """
    of_call = {kernel.event.get("args", {}).get("correlation"): kernel for kernel in kernels}
    launched: list[Kernel] = []
    for call in calls:
        start, end = float(call["ts"]), float(call["ts"] + call["dur"])
        kernel = of_call.get(call.get("args", {}).get("correlation"))
        if kernel is not None:
            launched.append(kernel)
        if kernel is not None and _is_copy_to_host(kernel) and start <= kernel.end <= end + 5:
            yield Pause(end, 0.0, awaits=kernel, call=(start, end))
        elif _SYNC_CALL.match(call["name"]):
            awaited = _awaited_work(call, launched[-300:], end + 2)
            yield Pause(end, 0.0, awaits=awaited, call=(start, end))


def _is_copy_to_host(kernel: Kernel) -> bool:
    name = kernel.event["name"].replace(" ", "").replace("->", "to")
    return kernel.event["cat"] == "gpu_memcpy" and "DtoH" in name


def _awaited_work(call: Event, launched: Sequence[Kernel], by: float) -> Kernel | None:
    """Return the work for which a call waits: the last to end by then of what was launched before, if it ended by then.

    A call on a stream directly after a copy's launch is that of the copy's op, which waits for the copy.
    """
    last = launched[-1] if launched else None
    if last is not None and "StreamSynchronize" in call["name"] and last.event["cat"] == "gpu_memcpy":
        launched = [kernel for kernel in launched if kernel.stream == last.stream]
    ended = max((kernel for kernel in launched if kernel.end <= by), key=lambda kernel: kernel.end, default=None)
    if "Device" in call["name"] and ended is not None:
        latest = max(launched, key=lambda kernel: kernel.end)
        return latest if latest.end <= by else ended
    return ended
