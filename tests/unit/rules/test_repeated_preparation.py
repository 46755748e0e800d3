"""Hosts that load, benchmark or capture kernels in every step, while the device has nothing to do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kineto_files import slice_
from tracekit.analysis.host import host_stalls
from tracekit.ingest import loader
from tracekit.rules import engine, host
from tracekit.rules.rule import Finding

Event = dict[str, Any]
STEPS, KERNELS, KERNEL_US, PREPARATION_US = 6, 20, 100, 4_000


def load_module(at_us: float) -> Iterator[Event]:
    yield slice_("cuda_driver", "cuModuleLoadData", at_us, PREPARATION_US, tid=1)


def autotune(at_us: float) -> Iterator[Event]:
    yield slice_("user_annotation", "CachingAutotuner.benchmark_all_configs", at_us, PREPARATION_US, tid=1)


def capture(at_us: float) -> Iterator[Event]:
    """A graph of ten ops is recorded in half of the time, and instantiated in the other half."""
    half_us = PREPARATION_US / 2
    yield slice_("cuda_runtime", "cudaStreamBeginCapture", at_us, 5, tid=1)
    for op in range(10):
        yield slice_("cpu_op", "aten::mm", at_us + 10 + op * half_us / 11, half_us / 11 - 1, tid=1)
    yield slice_("cuda_runtime", "cudaStreamEndCapture", at_us + half_us - 5, 5, tid=1)
    yield slice_("cuda_runtime", "cudaGraphInstantiate", at_us + half_us, half_us, tid=1)


def pause(at_us: float) -> Iterator[Event]:
    yield slice_("cpu_op", "aten::mm", at_us, PREPARATION_US, tid=1)


def nothing(at_us: float) -> Iterator[Event]:
    yield from ()


def late_launch(
    folder: Path, prepare: Callable[[float], Iterator[Event]], steps: set[int], op: str = "aten::mm"
) -> Finding | None:
    """HOST001 of a loop that launches 20 kernels a step, and in some steps prepares something before the first one."""
    events, at_us, number = [], 0.0, 0
    for step in range(STEPS):
        begin_us = at_us
        if step in steps:
            events += prepare(at_us)
            at_us += PREPARATION_US
        for _ in range(KERNELS):
            number += 1
            events += [slice_("cpu_op", op, at_us, 8, tid=1)]
            events += [slice_("cuda_runtime", "cudaLaunchKernel", at_us + 2, 4, tid=1, correlation=number)]
            where = {"device": 0, "stream": 7, "correlation": number}
            events += [slice_("kernel", "gemm", at_us + 10, KERNEL_US, tid=7, **where)]
            at_us += KERNEL_US + 2
        events += [slice_("user_annotation", f"ProfilerStep#{step}", begin_us, at_us - begin_us, tid=1)]
    (folder / "rank0.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    report = engine.check(loader.load(str(folder), cache=False))
    return next((finding for finding in report.findings if finding.code == "HOST001"), None)


PREPARATIONS = {
    host_stalls.KERNEL_LOADING: load_module,
    host_stalls.AUTOTUNE: autotune,
    host_stalls.GRAPH_CAPTURE: capture,
}


@pytest.mark.parametrize("cause", PREPARATIONS)
def test_what_the_host_prepares_in_each_step_is_to_be_prepared_once(cause, tmp_path):
    finding = late_launch(tmp_path, PREPARATIONS[cause], set(range(STEPS)))
    assert finding is not None
    assert finding.fix == host._PREPARE_ONCE[cause].training
    # Before the first launch of a step the device still runs what the step before queued, for less than half a step.
    assert PREPARATION_US * 1000 - KERNELS * KERNEL_US * 500 < finding.cost_ns <= PREPARATION_US * 1000


@pytest.mark.parametrize("cause", PREPARATIONS)
def test_a_preparation_of_few_steps_is_no_cause_of_all(cause, tmp_path):
    finding = late_launch(tmp_path, PREPARATIONS[cause], {0, 1})
    assert finding is None or finding.fix != host._PREPARE_ONCE[cause].training


def test_an_op_that_takes_as_long_prepares_nothing(tmp_path):
    finding = late_launch(tmp_path, pause, set(range(STEPS)))
    assert finding is not None
    assert finding.fix not in {advice.training for advice in host._PREPARE_ONCE.values()}


@pytest.mark.parametrize(
    ("op", "advice"),
    [
        ("aten::mm", host._LESS_PYTHON.inference),  # a server may have had no request
        ("autograd::engine::evaluate_function: MmBackward0", host._LESS_PYTHON.training),
    ],
    ids=["inference", "training"],
)
def test_a_pause_in_which_the_host_calls_nothing_may_be_without_a_request_in_inference(op, advice, tmp_path):
    finding = late_launch(tmp_path, nothing, set(range(STEPS)), op)
    assert finding is not None
    assert finding.fix.startswith(advice.partition("{}")[0])
