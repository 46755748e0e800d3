"""Inputs of operators from execution traces of the same process, for traces recorded without record_shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
from msgspec import Raw

from tracekit.errors import BadTraceError
from tracekit.ingest.readers import execution_trace
from tracekit.ingest.readers.execution_trace import ExecutionTrace, ExecutionTraces
from tracekit.ingest.readers.normalize.events import Event
from tracekit.ingest.readers.reader import Companion
from tracekit.model import schema, units

_COMPLETE = 0.95


class JoinedInputs:
    """Execution traces of a process, and which operators of its profiler trace they have.

    Nodes and operators are joined by the id of their record function, which is unique in a process, and their names.
    """

    def __init__(self, companions: Sequence[Companion], rank: int | None = None) -> None:
        """Read the execution traces among the companions of a trace; those that cannot be read become issues.

        Of a file that several ranks were merged into, they are those of this `rank`.
        """
        self._rank = rank
        self._traces: list[ExecutionTrace] = []
        self._issues: list[str] = []
        self._op_count = self._joined_count = 0
        for companion in companions:
            if isinstance(companion.reader, ExecutionTraces):
                self._load(companion.path)

    def _load(self, path: str) -> None:
        try:
            trace = execution_trace.load(path)
        except BadTraceError as error:
            self._issues.append(f"{error}.")
            return
        self._traces.append(trace)
        if trace.is_truncated:
            self._issues.append(f"{path}: the execution trace ends early; its {trace.node_count:,} nodes were read.")

    def __bool__(self) -> bool:
        return bool(self._traces)

    @property
    def data_quality(self) -> pl.DataFrame:
        """Return the issues of the execution traces, once the trace was read; columns as DATA_QUALITY."""
        return pl.DataFrame(list(self._found_issues()), schema.DATA_QUALITY.schema, orient="row")

    @property
    def groups(self) -> list[Any]:
        """Return the process groups that the execution traces list, as torch.distributed states them."""
        return [group for trace in self._traces for group in trace.groups]

    def complete(self, batch: Sequence[Event]) -> None:
        """Add the inputs of operators that have none to a batch of events, in place."""
        for event in batch:
            args = getattr(event, "args", None)
            if args is None or not args.record_id or (self._rank is not None and args.rank != self._rank):
                continue
            self._op_count += 1
            trace = next((t for t in self._traces if t.has(args.record_id, getattr(event, "name", None))), None)
            if trace is None:
                continue
            self._joined_count += 1
            inputs = None if bytes(args.input_dims) else trace.inputs_of(args.record_id, event.name)  # type: ignore[union-attr]
            if inputs is not None:
                args.input_dims, args.input_type, args.inputs, args.input_strides = map(Raw, inputs)

    def _found_issues(self) -> Iterator[tuple[str, str, float]]:
        yield from (("bad_companion", issue, 0.0) for issue in self._issues)
        joined_ratio = self._joined_count / max(self._op_count, 1)
        if self and not self._op_count:
            message = "The operators of this trace have no record function ids, so the execution trace adds no shapes."
            yield "unmatched_companion", message, 0.0
        elif self and joined_ratio < _COMPLETE:
            message = (
                f"The execution trace has {self._joined_count:,} of {self._op_count:,} operators of this trace "
                f"({units.share(joined_ratio)}), by the ids of their record functions; the others get no "
                "shapes from it."
            )
            yield "unmatched_companion", message, 0.0
