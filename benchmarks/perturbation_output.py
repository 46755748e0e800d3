"""A replayed recording as Kineto would have written it."""

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.perturbation_events import Event

if TYPE_CHECKING:
    from benchmarks.perturbation_graph import Rank


def document(rank: "Rank") -> dict[str, Any]:
    """Return a replayed recording, with the slices of the pauses that were put into it."""
    moved = {id(kernel.event): kernel for kernel in rank.kernels}
    starts = {(k.event["pid"], k.event["tid"], k.event["ts"]): k for k in rank.kernels}
    host = rank.host
    events = []
    for event in rank.events:
        copy = event.copy()
        kernel = moved.get(id(event)) or (
            starts.get((event.get("pid"), event.get("tid"), event.get("ts"))) if event.get("ph") == "f" else None
        )
        if kernel is not None and kernel.new_start is not None and kernel.new_end is not None:
            copy["ts"] = round(kernel.new_start, 3)
            if "dur" in copy:
                pieces = 1 if kernel.twin is None else 2
                copy["dur"] = round((kernel.new_end - kernel.new_start) / pieces, 3)
                if kernel.twin is not None:
                    events.append({**copy, "args": kernel.twin})
                    copy["ts"] = round(copy["ts"] + copy["dur"], 3)
        elif event.get("cat") == "gpu_user_annotation":
            _around_kernels(copy, event, rank)
        elif isinstance(event.get("ts"), int | float):
            copy["ts"] = round(host(event["ts"]), 3)
            if isinstance(event.get("dur"), int | float):
                # A call that waits can return earlier than recorded: what another thread began before is over then.
                copy["dur"] = round(max(host(event["ts"] + event["dur"]) - copy["ts"], 0.0), 3)
        events.append(copy)
    events.extend(_slices_of_pauses(rank))
    for event in events if rank.clock_us else ():
        if isinstance(event.get("ts"), int | float):
            event["ts"] = round(event["ts"] + rank.clock_us, 3)
    return {**rank.document, "traceEvents": events}


def _around_kernels(copy: Event, event: Event, rank: "Rank") -> None:
    low = bisect.bisect_left(rank.kernels, event["ts"] - 1, key=lambda kernel: kernel.start)
    high = bisect.bisect_right(rank.kernels, event["ts"] + event["dur"] + 1, key=lambda kernel: kernel.start)
    inside = [k for k in rank.kernels[low:high] if k.stream[1] == event["tid"] and k.new_end is not None]
    if inside:
        copy["ts"] = round(min(k.new_start or k.start for k in inside), 3)
        copy["dur"] = round(max(k.new_end or k.end for k in inside) - copy["ts"], 3)


def _slices_of_pauses(rank: "Rank") -> Iterable[Event]:
    pid, tid = rank.main_thread
    for pause, start, end in rank.placed:
        waited = max(end - start - pause.dur, 0.0) if pause.drains else 0.0
        for number, piece in enumerate(pause.slices):
            dur = piece["dur"]
            if dur is None:
                dur = max(end - start - piece["ts"], 1.0)
            elif number == 0:  # the first call, such as cudaFree, waits for the device
                dur += waited
            else:
                piece = {**piece, "ts": piece["ts"] + waited}
            start_us = round(start + piece["ts"], 3)
            yield {"ph": "X", "pid": pid, "tid": tid, **piece, "ts": start_us, "dur": round(dur, 3)}
