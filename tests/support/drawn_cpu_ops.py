"""CPU runs of ops with input shapes and element types: each step calls them one after the other."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import polars as pl

from tests.support import drawn_traces
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

US = 1000
NODE = "autograd::engine::evaluate_function: AddBackward0"
PauseOf: TypeAlias = Callable[[int, int], int]
"""The pause in µs before an op of a step, by the numbers of both."""


class Op(NamedTuple):
    """A call: its operator, its time, the shape of its tensor, its element type, that to which it copies ("").

    `node` is the slice of autograd around it (""), `inner` an op with an argument that takes all but `self_us` of its
    time (""). Where `is_needed`, backward refers to it. `phase` is that of training.
    """

    name: str
    us: int
    shape: tuple[int, ...] = (512, 128)
    dtype: str = "float"
    cast_to: str = ""
    node: str = ""
    inner: str = ""
    argument: str = "0"
    self_us: int = 0
    is_needed: bool = False
    phase: str | None = None


def trace(ops: Sequence[Op], steps: int = 4, pause_us: int | PauseOf = 1) -> Trace:
    """Trace of a CPU rank in which each step calls these ops, with a pause of Python before each."""
    calls, activities, bounds, now_ns = [], [], [], 0
    for step in range(steps):
        began_ns = now_ns
        for number_in_step, op in enumerate(ops):
            now_ns += (pause_us if isinstance(pause_us, int) else pause_us(step, number_in_step)) * US
            parent = None
            if op.node:
                parent = len(calls)
                around = {"id": parent, "lane": 0, "kind": "cpu_op", "step": step, "name": op.node}
                calls.append(around | {"start_ns": now_ns, "dur_ns": op.us * US})
            number = len(calls)
            call = {"id": number, "parent_id": parent, "lane": 0, "kind": "cpu_op", "step": step}
            call |= {"start_ns": now_ns, "dur_ns": op.us * US, "name": op.name, "phase": op.phase}
            shapes = f"[{list(op.shape)}, {list(op.shape)}, []]"
            calls.append(call | {"shapes": shapes, "dtypes": f'["{op.dtype}", "{op.dtype}", "Scalar"]'})
            activity = {name: call[name] for name in ("lane", "name", "step", "start_ns", "dur_ns")}
            activities.append(activity | {"id": number, "launch_id": number, "kind": "compute"})
            if op.inner:
                inner = call | {"id": number + 1, "parent_id": number, "name": op.inner, "shapes": shapes}
                calls.append(inner | {"dur_ns": (op.us - op.self_us) * US, "arguments": f"[null, {op.argument}]"})
            if op.is_needed:
                calls.append(call | {"id": len(calls), "parent_id": None, "name": NODE, "forward_id": number})
            if op.cast_to:
                inner = call | {"id": number + 1, "parent_id": number, "name": "aten::copy_", "shapes": shapes}
                calls.append(inner | {"dtypes": f'["{op.cast_to}", "{op.dtype}", "Scalar"]'})
            now_ns += op.us * US
        row = {"step": step, "host_start_ns": began_ns, "host_end_ns": now_ns, "start_ns": began_ns, "end_ns": now_ns}
        bounds.append(row | {"device": None})
    lanes = [{"lane": 0, "device": None, "stream": 0, "name": "python", "role": "compute"}]
    tables = {"lanes": lanes, "activities": activities, "ops": calls, "steps": bounds}
    conformed = {
        name: schema.TABLES[name].conform(pl.DataFrame(rows, infer_schema_length=None)) for name, rows in tables.items()
    }
    return Trace(rank=0, window=0, path="drawn-rank0", **conformed)


def run(ops: Sequence[Op], steps: int = 4, pause_us: int | PauseOf = 1) -> Run:
    """Run of one such rank."""
    return drawn_traces.run(trace(ops, steps, pause_us))
