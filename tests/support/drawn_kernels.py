"""Steps of kernels in a row on one device, each launched by an operator with recorded inputs; and rules' examples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from tests.support import drawn_traces
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

A100, V100, H100 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"
THREAD, STREAM = 1, 0
US = 1_000
Shape = Sequence[int]


@dataclass(frozen=True)
class Kernel:
    """A kernel of `us` µs, and the operator that launches it; without shapes, these were not recorded."""

    op: str
    us: int
    shapes: Sequence[Shape] | None = None
    dtype: str = "float"
    name: str = "vectorized_elementwise_kernel"
    strides: Sequence[Shape] | None = None
    grid: str | None = None
    phase: str | None = None


def trace(*kernels: Kernel, device: str = A100, steps: int = 2, around: str = "") -> Trace:
    """Return steps that launch the kernels one after the other, all under a host slice `around`."""
    ops: list[dict[str, object]] = []
    activities, windows, now = [], [], 0
    for step in range(steps):
        begin, outer = now, len(ops)
        ops.append({"id": outer, "name": around or "forward", "kind": "annotation"} | _at(begin, step))
        for kernel in kernels:
            activities.append(
                {"id": len(activities), "launch_id": len(ops), "lane": STREAM, "name": kernel.name, "kind": "compute"}
                | {"start_ns": now, "dur_ns": kernel.us * US, "step": step, "grid": kernel.grid}
                | {"phase": kernel.phase}
            )
            ops.append(_operator(kernel, len(ops), outer) | _at(now, step))
            now += kernel.us * US
        window = {"host_start_ns": begin, "host_end_ns": now, "start_ns": begin, "end_ns": now}
        windows.append({"step": step, "device": 0} | window)
    lanes = [
        {"lane": STREAM, "device": 0, "stream": 7, "name": "stream 7", "role": "compute"},
        {"lane": THREAD, "device": None, "name": "main", "role": "compute"},
    ]
    tables = {"lanes": lanes, "ops": ops, "activities": activities, "steps": windows}
    conformed = {
        name: schema.TABLES[name].conform(pl.DataFrame(rows, infer_schema_length=None)) for name, rows in tables.items()
    }
    return Trace(0, 0, "drawn", **conformed, header={"deviceProperties": [{"name": device, "numSms": 108}]})


def run(*kernels: Kernel, device: str = A100, around: str = "") -> Run:
    """Return a run of one rank with `trace`."""
    return drawn_traces.run(trace(*kernels, device=device, around=around))


def _at(start_ns: int, step: int) -> dict[str, object]:
    return {"lane": THREAD, "start_ns": start_ns, "dur_ns": 1, "step": step}


def _operator(kernel: Kernel, number: int, outer: int) -> dict[str, object]:
    op: dict[str, object] = {"id": number, "parent_id": outer, "name": kernel.op, "kind": "cpu_op"}
    if kernel.shapes is None:
        return op
    return op | {
        "shapes": json.dumps(list(map(list, kernel.shapes))),
        "dtypes": json.dumps([kernel.dtype] * len(kernel.shapes)),
        "strides": None if kernel.strides is None else json.dumps(list(map(list, kernel.strides))),
    }


# Examples of rules: each fires with the fault, and is silent without it ----------------------------------------------


def product(size: int, *, us: int, align: int, device: str = A100) -> Run:
    """Return a run of one product in 16 bits, `size` columns wide, and five aligned ones of half the roofline."""
    name = f"cutlass_80_tensorop_f16_s16816gemm_f16_128x128_nn_align{align}"
    aligned = Kernel("aten::mm", 224, [[4096, 4096], [4096, 1024]], "c10::Half", name.replace(f"n{align}", "n8"))
    judged = Kernel("aten::mm", us, [[4096, 4096], [4096, size]], "c10::Half", name)
    return run(judged, *[aligned] * 5, device=device)


def single(*, device: str = A100, name: str = "ampere_sgemm_128x64_nn", shapes: bool = True) -> Run:
    """Return a run of a product in 32 bits."""
    return run(Kernel("aten::mm", 2000, [[4096, 4096], [4096, 1024]] if shapes else None, name=name), device=device)


def adam(*operators: str, name: str = "AdamW", us: int = 100) -> Run:
    """Return a run whose optimizer launches a kernel per operator, `us` µs each, of steps of 5 ms."""
    shapes = [[1024, 1024]] * 2
    kernels = [Kernel(f"aten::{operator}", us, shapes, phase="optimizer") for operator in operators]
    rest_us = 5000 - us * len(kernels)
    rest = Kernel("aten::mm", rest_us, [[4096, 4096], [4096, 4096]], "c10::Half", "gemm", phase="forward")
    traced = trace(*kernels, rest, around=f"Optimizer.step#{name}.step")
    return drawn_traces.run(traced)


FOREACH_ADAM = tuple(f"_foreach_{name}" for name in ("lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_"))


def chain(*operators: str, us: int = 100, shape: Shape = (4096, 1024)) -> Run:
    """Return a run of elementwise operators in a row on tensors of one shape, and a product of 200 µs."""
    kernels = [Kernel(f"aten::{operator}", us, [shape]) for operator in operators]
    return run(*kernels, Kernel("aten::mm", 200, [[4096, 4096], [4096, 1024]], "c10::Half", "gemm"))


def waves(columns: int, *, us: int = 220, grid: str = "") -> Run:
    """Return a run of one product of 4096 rows, in tiles of 128 by 256, on 108 multiprocessors."""
    kernel = "ampere_fp16_s16816gemm_fp16_128x256_ldg8_f2f_stages_64x3_tn"
    shapes = [[4096, 4096], [4096, columns]]
    return run(Kernel("aten::mm", us, shapes, "c10::Half", kernel, grid=grid or f"32x{columns // 256}x1"))
