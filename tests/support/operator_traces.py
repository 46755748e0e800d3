"""Traces of operators that launch kernels, written as trees. Not a test.

    trace([("forward", [("aten::linear", [("aten::mm", 40)])])])

A leaf is an operator and how long its kernel takes in ns; a tuple of a name and a list is a slice around others.
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import polars as pl

from tracekit.model import schema
from tracekit.model.trace import Trace

Call: TypeAlias = "tuple[str, int] | tuple[str, int, str] | tuple[str, Sequence[Call]]"
"""An operator with the ns of its kernel, and possibly its shapes; or a slice around calls."""
HOST, STREAM, COMMUNICATION = 0, 1, 2
_HOST_NS = 2
_IDLE_NS = 10


def trace(*steps: Sequence[Call], rank: int = 0, idle_ns: int = _IDLE_NS, frames: Collection[str] = ()) -> Trace:
    """Return a trace whose kernels run one after the other; the device is idle for a while before each step's first.

    Names with ``::`` are operators, those of `frames` python frames, all others annotations. Kernels of an operator
    ``c10d::…`` communicate.
    """
    written = _Written(rank=rank, idle_ns=idle_ns, frames=frames)
    for number, calls in enumerate(steps):
        written.step(number, calls)
    return written.trace()


def linked(made: Trace, **forward: str) -> Trace:
    """Return the trace with a forward op for each backward one, both by a name that occurs once."""
    ids = dict(made.ops.select("name", "id").iter_rows())
    links = {ids[backward]: ids[of] for backward, of in forward.items()}
    forward_id = pl.col("id").replace_strict(links, default=None, return_dtype=pl.Int64).alias("forward_id")
    return made.replace(ops=made.ops.with_columns(forward_id))


class _Written:
    """The rows of a trace while its steps are written."""

    def __init__(self, *, rank: int, idle_ns: int, frames: Collection[str]) -> None:
        self.rank, self.idle_ns, self.frames = rank, idle_ns, frames
        self.ops: list[dict[str, object]] = []
        self.activities: list[dict[str, object]] = []
        self.steps: list[dict[str, object]] = []
        self.host_ns = self.device_ns = 0

    def step(self, number: int, calls: Sequence[Call]) -> None:
        begun_ns = self.host_ns
        marker = self._op(f"ProfilerStep#{number}", "annotation", None, number)
        first = len(self.activities)
        self.device_ns += self.idle_ns if number else 0
        for call in calls:
            self._call(call, marker, number)
        self._end(marker)
        start_ns = self.activities[first]["start_ns"]
        if self.steps:
            self.steps[-1]["end_ns"] = start_ns
        self.steps.append(
            {"step": number, "host_start_ns": begun_ns, "host_end_ns": self.host_ns, "start_ns": start_ns,
             "end_ns": self.device_ns, "device": 0}
        )  # fmt: skip

    def _call(self, call: Call, parent: int, step: int) -> None:
        name, inside = call[0], call[1]
        kind = "python" if name in self.frames else "cpu_op" if "::" in name else "annotation"
        op = self._op(name, kind, parent, step, call[2] if len(call) == 3 else None)
        if isinstance(inside, int):
            self._kernel(name, inside, op, step)
        else:
            for each in inside:
                self._call(each, op, step)
        self._end(op)

    def _kernel(self, name: str, dur_ns: int, op: int, step: int) -> None:
        launch = self._op("cudaLaunchKernel", "runtime", op, step)
        self._end(launch)
        is_communication = name.startswith("c10d::")
        start_ns = max(self.device_ns, self.host_ns)
        self.activities.append(
            {"id": len(self.activities), "launch_id": launch, "lane": COMMUNICATION if is_communication else STREAM,
             "name": f"kernel of {name}", "kind": "communication" if is_communication else "compute",
             "start_ns": start_ns, "dur_ns": dur_ns, "step": step}
        )  # fmt: skip
        self.device_ns = start_ns + dur_ns

    def _op(self, name: str, kind: str, parent: int | None, step: int, shapes: str | None = None) -> int:
        self.ops.append(
            {"id": len(self.ops), "parent_id": parent, "lane": HOST, "name": name, "kind": kind,
             "start_ns": self.host_ns, "step": step, "shapes": shapes}
        )  # fmt: skip
        self.host_ns += _HOST_NS
        return len(self.ops) - 1

    def _end(self, op: int) -> None:
        self.host_ns += _HOST_NS
        self.ops[op]["dur_ns"] = self.host_ns - int(str(self.ops[op]["start_ns"]))

    def trace(self) -> Trace:
        lanes = [
            {"lane": HOST, "name": "thread 1", "role": "host"},
            {"lane": STREAM, "device": 0, "stream": 7, "name": "stream 7", "role": "compute"},
            {"lane": COMMUNICATION, "device": 0, "stream": 9, "name": "stream 9", "role": "communication"},
        ]
        rows = {"lanes": lanes, "ops": self.ops, "activities": self.activities, "steps": self.steps}
        tables = {
            name: schema.TABLES[name].conform(pl.DataFrame(own, infer_schema_length=None)) for name, own in rows.items()
        }
        return Trace(rank=self.rank, window=0, path=f"operators-rank{self.rank}", **tables)
