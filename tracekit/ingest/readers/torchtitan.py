"""Logs of torchtitan's structured logger: the spans of each step of its training loop, one JSON object a line.

Format: github.com/pytorch/torchtitan torchtitan/observability/structured_logger (0.3.0). A span is two records of a
thread, NAME_start and NAME_end, with the step and the time in µs since 1970; the second states the duration in ms. The
trainer's spans are step and, in it, fetching_batch, fwd_bwd, optim, collect_dist_metrics, checkpoint_save and eval.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from tracekit import conventions
from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks, lines
from tracekit.ingest.readers.normalize import event_tables, numbers
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Event, Slice
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema, units
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.trace import Trace

_MARK = b'"torchtitan.structured_logger"'
_HEAD_BYTES = 64 << 10
_MAX_LINE_BYTES = 1 << 20
_BATCH = 1 << 14
_NAME = re.compile(r"\.global_rank_\d+\.[^/]*\.jsonl(\.gz|\.zst)?$", re.I)
_RANK = re.compile(rb'"rank"\s*:\s*(\d{1,7})\s*[,}]')
_PROCESS_ID = re.compile(rb'"pid"\s*:\s*(\d{1,9})\s*[,}]')
_TIME = re.compile(rb'"time_us"\s*:\s*(\d{1,16})\s*[,}]')
_SPAN, _START, _END = "event", "_start", "_end"
_STEP, _DATA, _TOKENS = "step", "fetching_batch", "global_valid_tokens"
_PHASES = {_DATA: conventions.DATA, "optim": conventions.OPTIMIZER, "checkpoint_save": conventions.CHECKPOINT}
"""Spans of the trainer that are phases of a step."""
_SPANS = {name: conventions.span_name(phase) for name, phase in _PHASES.items()} | {
    "eval": conventions.span_name(conventions.EVALUATION)
}
_WORK = ("fwd_bwd", "forward_backward", "optim", "optim_step", "collect_dist_metrics")
"""Spans in which the trainer computes, or waits for what it has launched."""
_MOST_US = numbers.MOST_NS // 1000
_US_NS = 1000
_MOST_NAME = 200
_MOST_OPEN = 64


class TorchtitanLogs(Reader):
    """Reads the JSON lines of torchtitan's structured logger, plain, gzip or zstd: the steps of one rank."""

    name = "torchtitan structured log"
    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst")
    contents = "steps of a rank and the spans of torchtitan's training loop; no operators, no device"
    is_log = True

    def has_name(self, name: str) -> bool:
        """Return whether a file is named as torchtitan names it: SOURCE.global_rank_0.TIME.jsonl."""
        return _NAME.search(name) is not None

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the first lines name torchtitan's logger."""
        start = head[:_HEAD_BYTES]
        return start.lstrip()[:1] == b"{" and _MARK in start and b'"log_type_name"' in start

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the rank, process and start of a log, by its first record."""
        rank, process, time = (pattern.search(head) for pattern in (_RANK, _PROCESS_ID, _TIME))
        return [
            TraceInfo(
                rank=None if rank is None or int(rank[1]) >= MAX_RANKS else int(rank[1]),
                process_id=None if process is None else int(process[1]),
                start_ns=None if time is None else int(time[1]) * _US_NS,
            )
        ]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return a trace with steps, spans and metrics. Raises BadTraceError if the log has no complete step."""
        return _Log(path).trace(rank, window)


class _Record(msgspec.Struct, gc=False):
    log_type: Any = None
    log_type_name: Any = None
    event_name: Any = None
    step: Any = None
    time_us: Any = None
    value: Any = None
    tid: Any = None
    task_name: Any = None


_DECODER = msgspec.json.Decoder(_Record)


@dataclass(frozen=True)
class _Span:
    """A span; times in µs."""

    name: str
    step: int | None
    thread: int
    start_us: float
    dur_us: float


class _Log:
    """The spans and scalars of one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spans: list[_Span] = []
        self._tokens: dict[int, float] = {}
        self._open: dict[tuple[Any, ...], list[_Record]] = {}
        self._bad_lines = self._unmatched = 0
        blocks = Blocks(path)
        for line in lines(blocks, _MAX_LINE_BYTES):
            self._add(line)
        self._broken = blocks.broken
        self._unmatched += sum(map(len, self._open.values()))

    def trace(self, rank: int, window: int) -> Trace:
        """Return the trace. Raises BadTraceError if no step is complete."""
        if not any(span.name == _STEP and span.step is not None for span in self._spans):
            raise BadTraceError(
                f"{self._path}: this torchtitan log has no complete step; name the logs of its trainer, "
                "training.global_rank_N.*.jsonl"
            )
        base_us = min(span.start_us for span in self._spans)
        builder = ColumnBuilder(has_several_ranks=False)
        builder.clock.thousandths = True  # whole µs are the resolution of the format
        for first in range(0, len(self._spans), _BATCH):
            batch: list[Event] = []
            for span in self._spans[first : first + _BATCH]:
                batch += _slices(span, base_us)
            builder.add(batch)
        builder.finish()
        read = event_tables.of_columns(builder, {"baseTimeNanoseconds": round(base_us * _US_NS)})
        issues = pl.DataFrame(list(self._issues()), schema.DATA_QUALITY.schema, orient="row")
        built = build_trace(read, self._path, rank=rank, window=window, further=issues)
        return built.replace(steps=_whole_steps(built.steps), metrics=self._metrics())

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            record = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._bad_lines += 1
            return
        name, time_us = record.log_type_name, _time_us(record.time_us)
        if not isinstance(name, str) or time_us is None:
            self._bad_lines += 1
        elif record.log_type == _SPAN and name.endswith(_START):
            stack = self._open.setdefault(_key(record, name.removesuffix(_START)), [])
            stack.append(record)
            if len(stack) > _MOST_OPEN:
                self._unmatched += 1
                del stack[0]
        elif record.log_type == _SPAN and name.endswith(_END):
            self._close(record, name.removesuffix(_END), time_us)
        elif record.event_name == _TOKENS and isinstance(record.value, int | float) and _step(record) is not None:
            self._tokens[_step(record) or 0] = float(record.value)

    def _close(self, end: _Record, name: str, end_us: float) -> None:
        stack = self._open.get(_key(end, name))
        if not stack:
            self._unmatched += 1
            return
        start = stack.pop()
        start_us = _time_us(start.time_us)
        if start_us is None or end_us < start_us:
            self._bad_lines += 1
            return
        thread = end.tid if type(end.tid) is int else 0
        self._spans.append(_Span(name[:_MOST_NAME], _step(end), thread, start_us, end_us - start_us))

    def _metrics(self) -> pl.DataFrame:
        rows: list[tuple[int, str, float]] = []
        waits_us: dict[int, float] = {}
        for span in self._spans:
            if span.name == _DATA and span.step is not None:
                waits_us[span.step] = waits_us.get(span.step, 0.0) + span.dur_us
        for span in self._spans:
            if span.name != _STEP or span.step is None:
                continue
            rows.append((span.step, conventions.STEP_TIME_METRIC, span.dur_us * _US_NS))
            if span.step in waits_us:
                rows.append((span.step, conventions.DATA_WAIT_METRIC, waits_us[span.step] * _US_NS))
            if span.step in self._tokens and span.dur_us:
                rows.append((span.step, conventions.TOKENS_METRIC, self._tokens[span.step] / span.dur_us * 1e6))
        return pl.DataFrame(rows, schema=schema.METRICS.schema, orient="row")

    def _issues(self) -> Iterator[tuple[str, str, float]]:
        message = "torchtitan logs spans of its training loop on the host: neither operators nor the device is known."
        yield schema.SPANS_ONLY, message, 0.0
        if self._bad_lines:
            yield "bad_log", f"{self._path}: left out {units.count(self._bad_lines, 'line')} without a record.", 0.0
        if self._unmatched:
            message = f"{self._path}: left out {units.count(self._unmatched, 'span')} without a start or an end."
            yield "bad_log", message, 0.0
        if self._broken:
            yield "truncated", f"{self._path}: {self._broken}.", 0.0


def _whole_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps that last from their mark to the next: an evaluation or save after the work of a step belongs to it."""
    end_ns = pl.col("host_start_ns").shift(-1).fill_null(pl.col("host_end_ns"))
    return steps.sort("host_start_ns").with_columns(start_ns=pl.col("host_start_ns"), end_ns=end_ns)


def _slices(span: _Span, base_us: float) -> Iterator[Slice]:
    """The slices of a span: a mark of the step, a phase, and work of the training loop."""
    start_us = span.start_us - base_us
    if span.name == _STEP:
        yield Slice("user_annotation", f"ProfilerStep#{span.step}", 0, span.thread, start_us, span.dur_us)
        # Time without work counts for the step of the work after it: that of a save or evaluation is of this step.
        yield Slice("cpu_op", "torchtitan::step_end", 0, span.thread, start_us + span.dur_us - 1, 1)
        return
    yield Slice("user_annotation", _SPANS.get(span.name, span.name), 0, span.thread, start_us, span.dur_us)
    if span.name in _WORK:
        yield Slice("cpu_op", f"torchtitan::{span.name}", 0, span.thread, start_us, span.dur_us)


def _key(record: _Record, name: str) -> tuple[Any, ...]:
    return (name, str(record.tid), str(record.task_name))


def _step(record: _Record) -> int | None:
    return record.step if type(record.step) is int and 0 <= record.step < 1 << 62 else None


def _time_us(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_US:
        return None
    return value
