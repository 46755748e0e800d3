"""XPlane profiles to Traces: one for each device, with the calls of the host that launched its work where stated."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.readers.normalize import event_tables
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Args, Slice
from tracekit.ingest.readers.normalize.events import Event as ProfilerEvent
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.ingest.readers.xplane import planes
from tracekit.ingest.readers.xplane.planes import Event, Line, Plane
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.trace import Trace

_DEVICE = re.compile(r"/device:(?:[A-Z]+):(\d{1,6})$")
_HOST = re.compile(r"/host:(?!metadata|python)\w+")
_STREAM = re.compile(r"Stream #(\d{1,9})")
_OPS, _ASYNC_OPS, _STEPS = "XLA Ops", "Async XLA Ops", "Steps"
"""Lines of a TPU: its operations in order, those that run beside them, and its steps."""
_COLLECTIVES = {
    "all-reduce": "allreduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "ragged-all-to-all": "all_to_all", "collective-broadcast": "broadcast",
    "collective-permute": "send",
}  # fmt: skip
"""Collectives of XLA, github.com/openxla/xla hlo_opcode.h, in the spelling of PyTorch's profiler."""
_COLLECTIVE = re.compile(
    rf"%?({'|'.join(sorted(_COLLECTIVES, key=len, reverse=True))})(-start|-done)?(?:\.\d+)?(?:\s|$)"
)
_COPY, _SET = re.compile(r"(?i)mem_?cpy|^%?copy(-start|-done)?(\.\d+)?$"), re.compile(r"(?i)mem_?set")
_LAUNCH = re.compile(r"(?i)^(cu|cuda|hip)[A-Z]\w+$")
_CORRELATION, _STEP, _DETAILS = "correlation_id", "step_num", "memcpy_details"
_STATS = frozenset({_CORRELATION, _STEP, _DETAILS})
_SIZE = re.compile(r"\bsize:(\d{1,15})\b")
_BATCH = 1 << 14


def traces(path: str) -> Sequence[TraceInfo]:
    """Return the traces of a file, one for each device with work. Raises BadTraceError if no device has some."""
    read, problem = planes.read(path)
    numbers = [number for plane in read if (number := _device(plane)) is not None]
    if not numbers:
        named = ", ".join(dict.fromkeys(plane.name[:40] for plane in read[:8])) or problem or "it has no planes"
        raise BadTraceError(
            f"{path}: this is an XPlane profile without a device ({named}); profile steps that run on a GPU or TPU: "
            "jax.profiler.trace"
        )
    several = len(numbers) > 1
    return [TraceInfo(rank=number if several else None, shares_file=several) for number in sorted(set(numbers))]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a device: that of `info`, or the only one. Raises BadTraceError if it has no work."""
    listed, problem = planes.read(path)
    of_device = [p for p in listed if (n := _device(p)) is not None and (info.rank is None or n == info.rank)]
    work = [(stream, event) for plane in of_device for stream, event in _work(plane)]
    if not work:
        raise BadTraceError(f"{path}: no device work in this XPlane profile; profile a few steps: jax.profiler.trace")
    steps = [event for plane in of_device for event in _device_steps(plane)]
    calls = [(line, event) for plane in listed if _HOST.match(plane.name) for line, event in _calls(plane)]
    base_ns = min(event.start_ns for _, event in (*work, *calls))
    builder = ColumnBuilder(has_several_ranks=False)
    slices = _slices(work, calls, base_ns)
    while batch := list[ProfilerEvent](islice(slices, _BATCH)):
        builder.add(batch)
    builder.finish()
    read_events = event_tables.of_columns(builder, {"baseTimeNanoseconds": base_ns})
    issues = [("truncated", f"{path}: {problem}.", 0.0)] if problem else []
    if all(_CORRELATION not in event.stats for _, event in work):
        message = "The device runs whole compiled programs: its operations have no launches, so the host is not known."
        issues.append((schema.COMPILED_PROGRAM, message, 0.0))
    further = pl.DataFrame(issues, schema.DATA_QUALITY.schema, orient="row")
    trace = build_trace(read_events, path, rank=rank, window=window, further=further)
    return _in_device_steps(trace, steps) if steps and trace.steps["step"].null_count() else trace


def _device(plane: Plane) -> int | None:
    """Number of a device; None for a host and planes of other kinds."""
    match = _DEVICE.match(plane.name)
    return None if match is None or int(match[1]) >= MAX_RANKS else int(match[1])


def _work(plane: Plane) -> Iterator[tuple[int, Event]]:
    """Yield the work of a device with its stream. All other lines sum it up (XLA Modules, name scopes, source code)."""
    for line in plane.read_lines(_STATS):
        stream = _stream(line)
        if stream is None:
            continue
        for event in line.events:
            collective = _COLLECTIVE.match(event.name)
            # Among the operations in order, a start only begins a collective: the wait for it is that of the -done.
            if line.name != _OPS or collective is None or collective[2] != "-start":
                yield stream, event


def _stream(line: Line) -> int | None:
    match = _STREAM.match(line.name)
    if match is not None:
        return int(match[1])
    return {_OPS: 0, _ASYNC_OPS: 1}.get(line.name)


def _device_steps(plane: Plane) -> Iterator[Event]:
    """Yield the events of the line of steps: their names are numbers."""
    for line in plane.read_lines(frozenset()):
        if line.name == _STEPS:
            yield from (event for event in line.events if event.name.isdecimal() and len(event.name) < 16)


def _calls(plane: Plane) -> Iterator[tuple[int, Event]]:
    """Yield the events of a host with their thread."""
    for line in plane.read_lines(_STATS):
        yield from ((line.id, event) for event in line.events)


def _slices(work: Sequence[tuple[int, Event]], calls: Sequence[tuple[int, Event]], base_ns: int) -> Iterator[Slice]:
    """Yield the events as slices of PyTorch's profiler, times in µs from `base_ns`."""
    for stream, event in work:
        category, args = _device_work(event)
        args.device, args.stream = 0, stream
        start_us = (event.start_ns - base_ns) / 1000
        yield Slice(category, event.name, 0, stream, start_us, event.dur_ns / 1000, args)
    for thread, event in calls:
        category, name, call_args = _host_call(event)
        start_us = (event.start_ns - base_ns) / 1000
        yield Slice(category, name, "host", thread, start_us, event.dur_ns / 1000, call_args)


def _device_work(event: Event) -> tuple[str, Args]:
    correlation = event.stats.get(_CORRELATION)
    args = Args(correlation=correlation if isinstance(correlation, int) and correlation > 0 else None)
    collective = _COLLECTIVE.match(event.name)
    if collective is not None:
        args.collective = _COLLECTIVES[collective[1]]
        return "collective_comm", args
    if _SET.search(event.name):
        return "gpu_memset", args
    if _COPY.search(event.name):
        size = _SIZE.search(str(event.stats.get(_DETAILS, "")))
        args.bytes = None if size is None else int(size[1])
        return "gpu_memcpy", args
    return "kernel", args


def _host_call(event: Event) -> tuple[str, str, Args | None]:
    """Category, name and arguments of a call: of the device's runtime, a mark of a step, or an annotation."""
    correlation, step = event.stats.get(_CORRELATION), event.stats.get(_STEP)
    if isinstance(correlation, int) and correlation > 0:
        return "cuda_runtime", event.name, Args(correlation=correlation)
    if isinstance(step, int) and step >= 0:
        return "user_annotation", f"ProfilerStep#{step}", None
    category = "cuda_runtime" if _LAUNCH.match(event.name) else "user_annotation"
    return category, event.name, None


def _in_device_steps(trace: Trace, steps: Sequence[Event]) -> Trace:
    """The trace with the steps that a TPU states itself: its work has no launches by which steps could be told."""
    ordered = sorted(steps, key=lambda step: step.start_ns)
    rows = [(int(step.name), step.start_ns, step.start_ns + step.dur_ns) for step in ordered]
    marks = pl.DataFrame(rows, schema=["step", "start_ns", "end_ns"], orient="row").unique("step", maintain_order=True)
    windows = marks.with_columns(host_start_ns="start_ns", host_end_ns="end_ns", device=pl.lit(0))
    placed = (
        trace.activities.drop("step")
        .sort("start_ns")
        .join_asof(marks.sort("start_ns").rename({"start_ns": "step_ns"}), left_on="start_ns", right_on="step_ns")
    )
    step = pl.when(pl.col("start_ns") < pl.col("end_ns")).then("step")
    activities = placed.with_columns(step.alias("step")).sort("id").select(trace.activities.columns)
    issues = trace.data_quality.filter(~pl.col("kind").is_in(["no_steps", "steps_from_repetition"]))
    return trace.replace(steps=schema.STEPS.conform(windows), activities=activities, data_quality=issues)
