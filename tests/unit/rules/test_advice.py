"""Advice follows what is recorded: training or inference with PyTorch, or a program without PyTorch."""

import json

import pytest

from tests.support.kineto_files import slice_
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.ingest.loader import load
from tracekit.rules import late_work, outlier_steps
from tracekit.rules.engine import check

PYTORCH = ("torch", ".item()", "DataLoader", "Python", "gc.", "optimizer", "profiler.step")
TRAINING = ("DataLoader", "optimizer", "gradient", "loss", "training")


def record(folder, *, op, kernel, last_kernel, header):
    """A device that is idle before each of the kernels: the host waits for a copy, and then launches late."""
    events, at_us = [], 0.0
    for call in range(1, 200):
        name = last_kernel if call % 10 == 0 else f"{kernel}_{call % 10}"
        if call % 5 == 0:
            events.append(slice_("cuda_runtime", "cudaMemcpyAsync", at_us, 40, tid=1, correlation=1000 + call))
            where = {"device": 0, "stream": 7, "correlation": 1000 + call, "bytes": 4096}
            events.append(slice_("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at_us + 30, 5, tid=7, **where))
            events.append(
                slice_("cuda_runtime", "cudaStreamSynchronize", at_us + 40, 5, tid=1, correlation=2000 + call)
            )
            at_us += 50
        if op:
            events.append(slice_("cpu_op", op, at_us + 100, 30, tid=1))
        events.append(slice_("cuda_runtime", "cudaLaunchKernel", at_us + 110, 5, tid=1, correlation=call))
        events.append(slice_("kernel", name, at_us + 120, 60, tid=7, device=0, stream=7, correlation=call))
        at_us += 200
    (folder / "trace.json").write_text(json.dumps({**header, "traceEvents": events}))
    return load(folder, cache=False)


@pytest.mark.parametrize(
    ("program", "op", "kernel", "last_kernel"),
    [
        (Program.TRAINING, "aten::mm", "void at::native::elementwise", "multi_tensor_apply_kernel"),
        (Program.INFERENCE, "aten::mm", "void at::native::elementwise", "softmax"),
        (Program.OTHER, None, "jacobi", "residual"),
    ],
)
def test_advice_names_only_what_the_program_has(program, op, kernel, last_kernel, tmp_path):
    header = {"nsight_systems_version": "2025.1"} if op is None else {}
    run = record(tmp_path, op=op, kernel=kernel, last_kernel=last_kernel, header=header)
    assert workload.program(run) is program
    fixes = {finding.code: finding.fix for finding in check(run).findings}
    assert {"HOST001", "HOST002"} & fixes.keys()
    words = {Program.TRAINING: (), Program.INFERENCE: TRAINING, Program.OTHER: PYTORCH}[program]
    about_the_program = [fix for code, fix in fixes.items() if not code.startswith("DATA")]
    # The fixes of stalls and of slow hosts, too, whether or not this run has any.
    stalls = [*outlier_steps._FIXES.values(), outlier_steps._FIX_ONE, outlier_steps._FIX_ALL, outlier_steps._FIX_GRAPH]
    about_the_program += [advice.suited_to(run) for advice in (*stalls, late_work.SLOW_HOST)]
    assert not [fix for fix in about_the_program for word in words if word in fix]
