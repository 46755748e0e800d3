"""Conversions between element types on a device: those that the next kernel reverts, and those of mixed precision."""

import pytest

from tests.support.gpu_hosts import GpuHost
from tracekit.ingest.loader import load
from tracekit.rules.cpu_ops import RepeatedCasts
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

STEPS, LAYERS, KERNEL_US, CAST_US = 4, 12, 200.0, 40.0
LONG, SHORT = "float", "c10::BFloat16"


def cast(host, cast_from, cast_to, columns=4096):
    inputs = {"Input type": [cast_to, cast_from, "Scalar"], "Input Dims": [[64, columns], [64, columns], []]}
    host.kernel("elementwise_copy", CAST_US, op="aten::copy_", inputs=inputs)


def job(folder, casts):
    """Return a run of layers, each of two kernels after the conversions that `casts(host, layer)` records."""
    host = GpuHost()
    for step in range(STEPS):
        with host.step(step):
            host.wait()
            for layer in range(LAYERS):
                casts(host, layer)
                host.kernel("gemm_a", KERNEL_US, op="aten::mm")
                host.kernel("gemm_b", KERNEL_US, op="aten::mm")
    host.wait()
    host.write(folder)
    return load(folder, cache=False)


def back_and_forth(host, layer):
    cast(host, SHORT, LONG)
    cast(host, LONG, SHORT)


def of_weights(host, layer):
    """Mixed precision converts each weight to the shorter type, and no result back."""
    cast(host, LONG, SHORT)
    cast(host, LONG, SHORT, columns=1024)


def around_compute(host, layer):
    cast(host, SHORT, LONG)
    host.kernel("softmax", CAST_US, op="aten::softmax")
    cast(host, LONG, SHORT)


def test_conversions_that_the_next_kernel_reverts_cost_their_time(tmp_path):
    (found,) = check(job(tmp_path, back_and_forth), [RepeatedCasts()]).findings
    assert found.severity is Severity.WARNING
    assert found.cost_ns == pytest.approx(1000 * 2 * CAST_US * LAYERS, rel=0.05)


@pytest.mark.parametrize("casts", [of_weights, around_compute])
def test_conversions_that_mixed_precision_needs_are_no_finding(casts, tmp_path):
    assert check(job(tmp_path, casts), [RepeatedCasts()]).findings == ()
