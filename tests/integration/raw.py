"""Kineto traces in plain Python, for tests that recompute by hand what tracekit claims. Uses nothing of tracekit."""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path


class Slice:
    """One X event, in exact ns on the trace's own clock plus its base."""

    def __init__(self, event: dict, base: int) -> None:
        self.name, self.cat = event["name"], event.get("cat", "")
        self.place = (event.get("pid"), event.get("tid"))
        self.args = event.get("args", {})
        self.start = base + int((Decimal(event["ts"]) * 1000).to_integral_value())
        self.end = self.start + int((Decimal(event.get("dur", 0)) * 1000).to_integral_value())

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


class RawTrace:
    def __init__(self, path: str | Path) -> None:
        with gzip.open(path, "rt", errors="replace") as file:
            document = json.load(file, parse_float=Decimal)
        self.base = int(document.get("baseTimeNanoseconds") or 0)
        self.events = document["traceEvents"]
        self.work: tuple[list[Slice], dict[tuple, list[tuple[int, int]]]] | None = None
        self.slices = [Slice(event, self.base) for event in self.events if event.get("ph") == "X"]
        marks = [s for s in self.slices if re.match(r"ProfilerStep#\d+$", s.name) and s.cat != "gpu_user_annotation"]
        self.steps = {int(s.name.split("#")[1]): s.span for s in sorted(marks, key=lambda s: s.start)}

    def of(self, *cats: str) -> list[Slice]:
        return [s for s in self.slices if s.cat in cats]

    def step_at(self, at: int) -> int | None:
        return next((step for step, (start, end) in self.steps.items() if start <= at < end), None)


def union(spans) -> list[tuple[int, int]]:
    joined: list[list[int]] = []
    for start, end in sorted(s for s in spans if s[1] > s[0]):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [(a, b) for a, b in joined]


def length(spans) -> int:
    return sum(end - start for start, end in union(spans))


def common(a, b) -> list[tuple[int, int]]:
    """The time that two sets share, by a walk over both."""
    a, b, found, i, j = union(a), union(b), [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(a, b) -> list[tuple[int, int]]:
    ends = sorted(edge for span in [*union(a), *union(b)] for edge in span)
    if not ends:
        return []
    holes = [(ends[0], ends[0]), *union(b), (ends[-1], ends[-1])]
    outside = [(left[1], right[0]) for left, right in pairwise(holes)]
    return common(a, outside)


def exposed_on_device(trace: RawTrace, step: int) -> tuple[int, int, int]:
    """Exposed communication, hidden communication and duration of one step's device window, from kernels."""
    launches = {
        s.args["correlation"]: s.start for s in trace.of("cuda_runtime", "cuda_driver") if "correlation" in s.args
    }
    kernels = trace.of("kernel")
    compute = [k for k in kernels if not k.name.startswith("nccl")]
    busy = defaultdict(int)
    for k in compute:
        busy[k.args["stream"]] += k.end - k.start
    main = max(busy, key=busy.__getitem__)
    first: dict[int, int] = {}
    for k in trace.of("kernel", "gpu_memcpy", "gpu_memset"):
        launched = launches.get(k.args.get("correlation"))
        of = None if launched is None else trace.step_at(launched)
        if k.args["stream"] == main and of is not None:
            first[of] = min(first.get(of, k.start), k.start)
    later = [start for start in first.values() if start > first[step]]
    ends = [
        k.end
        for k in trace.of("kernel", "gpu_memcpy", "gpu_memset")
        if k.args.get("correlation") in launches and trace.step_at(launches[k.args["correlation"]]) is not None
    ]
    window = [(first[step], min(later) if later else max(ends))]
    exchange = common(window, [k.span for k in kernels if k.name.startswith("nccl")])
    computing = [k.span for k in compute]
    return length(minus(exchange, computing)), length(common(exchange, computing)), length(window)


def work_on_host(trace: RawTrace) -> tuple[list[Slice], dict[tuple, list[tuple[int, int]]]]:
    """The gloo slices of a CPU run, and by thread the spans in which it computes. Of a trace it is found once."""
    if trace.work is None:
        trace.work = _work_on_host(trace)
    return trace.work


def _work_on_host(trace: RawTrace) -> tuple[list[Slice], dict[tuple, list[tuple[int, int]]]]:
    gloo = [s for s in trace.slices if s.name.startswith("gloo:")]
    busy_with_it = {s.place for s in gloo}
    computing = defaultdict(list)
    for s in trace.of("cpu_op"):
        waits_or_wraps = re.match(r"(autograd|torch|c10d|_c10d_functional)::", s.name)
        if s.place not in busy_with_it and re.match(r"\w+::", s.name) and not waits_or_wraps:
            computing[s.place].append(s.span)
    for place in computing:
        waits = [s.span for s in trace.slices if s.place == place and re.match(r"(c10d|_c10d_functional)::", s.name)]
        computing[place] = minus(computing[place], waits)
    return gloo, computing


def exposed_on_host(trace: RawTrace, step: int) -> tuple[int, int, int]:
    """The same of a CPU run: gloo slices against dispatcher ops of the other threads, without c10d slices."""
    gloo, computing = work_on_host(trace)
    main = max(computing, key=lambda place: length(computing[place]))
    starts = [start for start, _ in computing[main]]
    first = {of: starts[bisect_right(starts, span[0] - 1)] for of, span in trace.steps.items()}
    compute = [span for spans in computing.values() for span in spans]
    later = [start for start in first.values() if start > first[step]]
    last = max(span[1] for span in [*compute, *(s.span for s in gloo)] if trace.step_at(span[0]) is not None)
    window = [(first[step], min(later) if later else last)]
    exchange = common(window, [s.span for s in gloo])
    return length(minus(exchange, compute)), length(common(exchange, compute)), length(window)


def idle_of_devices(trace: RawTrace) -> list[tuple[int, int]]:
    busy = union(s.span for s in trace.of("kernel", "gpu_memcpy", "gpu_memset"))
    return [(left[1], right[0]) for left, right in pairwise(busy)]


def device_calls(trace: RawTrace) -> list[Slice]:
    calls = [s for s in trace.of("cuda_runtime") if re.match(r"(cuda|hip)(Host)?(Malloc|Free)", s.name)]
    return sorted(calls, key=lambda s: s.start)


def stall(call: Slice, following: Slice | None, idle: list[tuple[int, int]]) -> int:
    """Idle time during a call, and after it up to the next work or call, for no longer than the call was hidden."""
    during = length(common([call.span], idle))
    hidden = call.end - call.start - during
    behind = next((end - call.end for start, end in idle if start <= call.end < end), 0)
    until = following.start - call.end if following else behind
    return during + max(0, min(behind, hidden, until))
