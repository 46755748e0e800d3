"""Pauses of the host before the first device work of a recording count as those before the other steps do."""

import json

import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.loader import load
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.host import BLOCKING_SYNC, LATE_LAUNCH
from tracekit.rules.engine import check
from tracekit.rules.host import LateLaunch

STEPS, KERNELS, KERNEL_US, LAUNCH_US = 5, 25, 100, 10


def gpu_run(folder, pause_us, *, syncs=True, copies=False):
    """Return a run of five steps in which the host pauses, launches kernels, and waits for the device or not.

    With `copies`, it copies a batch to the device before it pauses.
    """
    events, host_us, device_us, number = [], 0.0, 0.0, 0
    for step in range(STEPS):
        began_us = host_us
        if copies:
            number += 1
            events.append(slice_("cuda_runtime", "cudaMemcpyAsync", host_us, 5, tid=1, correlation=number))
            where = {"device": 0, "stream": 8, "correlation": number, "bytes": 4096}
            events.append(slice_("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", host_us + 6, 5, tid=8, **where))
        host_us += pause_us(step)
        for _ in range(KERNELS):
            number += 1
            events.append(slice_("cpu_op", "aten::mm", host_us, LAUNCH_US, tid=1, **{"External id": number}))
            events.append(slice_("cuda_runtime", "cudaLaunchKernel", host_us + 3, 5, tid=1, correlation=number))
            start_us = max(host_us + LAUNCH_US, device_us)
            where = {"device": 0, "stream": 7, "correlation": number}
            events.append(slice_("kernel", "gemm", start_us, KERNEL_US, tid=7, **where))
            device_us, host_us = start_us + KERNEL_US, host_us + LAUNCH_US + 1
        if syncs:
            number += 1
            took_us = device_us - host_us + 2
            events.append(slice_("cuda_runtime", "cudaDeviceSynchronize", host_us, took_us, tid=1, correlation=number))
            host_us += took_us + 1
        events.append(slice_("user_annotation", f"ProfilerStep#{step}", began_us, host_us - began_us, tid=1))
        host_us += 1
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": events}
    (folder / "trace.json").write_text(json.dumps(document))
    return load(folder, cache=False)


# Without waits, a step takes as long as its kernels, if the host pauses and launches for less than that.
@pytest.mark.parametrize(("cause", "pause_us"), [(LATE_LAUNCH, 3000), (BLOCKING_SYNC, 2000)])
def test_the_first_step_loses_its_leading_pause_as_the_others_do(cause, pause_us, tmp_path):
    saving = savings.saving(gpu_run(tmp_path, lambda _: pause_us), cause.name)
    assert saving.saved_ns == pytest.approx(pause_us * 1000, rel=0.03)
    assert saving.step_ns == pytest.approx(pause_us * 1000 + KERNELS * KERNEL_US * 1000, rel=0.03)


@pytest.mark.parametrize("pause_us", [3000, 5000])
def test_waits_cost_no_more_than_the_host_waits_where_its_pauses_take_longer_than_the_kernels(pause_us, tmp_path):
    saving = savings.saving(gpu_run(tmp_path, lambda _: pause_us), BLOCKING_SYNC.name)
    # Steps are counted from the first device work, which the first pause precedes.
    launched_us = STEPS * (pause_us + KERNELS * (LAUNCH_US + 1) + 1) - (pause_us + LAUNCH_US)
    assert 0 < saving.saved_ns <= saving.step_ns - 1000 * launched_us / STEPS


def test_the_share_of_a_finding_is_that_of_a_whole_step(tmp_path):
    (found,) = check(gpu_run(tmp_path, lambda _: 3000), [LateLaunch()]).findings
    assert found.impact == pytest.approx(3000 / (3000 + KERNELS * KERNEL_US), rel=0.03)
    assert found.before_steps_ratio > 0


def test_a_pause_before_the_first_step_alone_is_that_of_starting_the_profiler(tmp_path):
    saving = savings.saving(gpu_run(tmp_path, lambda step: 3000 * (step == 0)), LATE_LAUNCH.name)
    assert saving.saved_ns < 200_000


def test_a_pause_that_queued_work_hides_in_the_other_steps_does_not_count(tmp_path):
    saving = savings.saving(gpu_run(tmp_path, lambda _: 1500, syncs=False), LATE_LAUNCH.name)
    assert saving.saved_ns < 200_000


def test_a_pause_after_the_first_copy_counts_as_far_as_the_other_steps_lose_it(tmp_path):
    """Work that is queued hides it there: the first step alone waits for its kernels."""
    saving = savings.saving(gpu_run(tmp_path, lambda _: 1500, syncs=False, copies=True), LATE_LAUNCH.name)
    assert saving.saved_ns < 100_000
