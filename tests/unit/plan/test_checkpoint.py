"""The sizes and times of published cases, and what is refused."""

import json

import pytest

from tests.commands import tracekit
from tracekit.errors import ConfigError
from tracekit.plan import checkpoint as plan

HOUR_S = 3600.0
PARAMS = 1.008e12
MEGATRON = plan.Layout(tp=8, pp=64, dp=6)
ARTICLE = ("plan", "checkpoint", "--params", 1e12, "--bytes-per-param", 13.8, "--tp", 8, "--pp", 64, "--dp", 6)
STORAGE = ("--write-bandwidth", 273e9, "--read-bandwidth", 1e12, "--interval", "4h", "--mtbf", "3.093h")


def test_published_case_of_a_trillion_parameters() -> None:
    done = tracekit(*ARTICLE, *STORAGE, "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["checkpoint_bytes"] == pytest.approx(13.8e12)
    assert told["writers"] == 512
    assert told["write_seconds"] == pytest.approx(50.55, abs=0.005)
    assert told["write_bytes_per_second_per_gpu"] == pytest.approx(0.533e9, rel=1e-3)
    assert told["write_bytes_per_second_per_node"] == pytest.approx(4.27e9, abs=0.005e9)
    assert told["overhead_ratio"] == pytest.approx(0.00351, abs=5e-6)
    assert told["restore_bytes_per_second"] == pytest.approx(1638e9)
    assert told["restore_seconds"] == pytest.approx(82.8)
    assert told["young_interval_seconds"] == pytest.approx(1061, abs=0.5)
    assert told["daly_interval_seconds"] == pytest.approx(1028, abs=0.5)
    assert 0 < told["goodput_ratio"] < 1


def test_zero_1_replicates_weights_only() -> None:
    assert plan.restore_amplification(plan.Layout(dp=6, zero=1)) == pytest.approx(1.71, abs=0.005)
    assert plan.restore_amplification(plan.Layout(dp=6, zero=3)) == 1
    assert plan.writers(plan.Layout(8, 64, 6, zero=1)) == 3072


def test_waste_at_the_best_interval() -> None:
    mtbf_s = 3.093 * HOUR_S
    assert plan.waste_ratio(50.55, plan.young_s(50.55, mtbf_s), mtbf_s) == pytest.approx(0.0953, abs=5e-5)


@pytest.mark.parametrize(("params", "size"), [(8.03e9, 105 * 2**30), (70e9, 912 * 2**30), (405e9, 5.29 * 2**40)])
def test_sizes_of_mlperf_storage(params: float, size: float) -> None:
    result = plan.checkpoint(params, plan.Layout(), plan.Storage(1e9), interval_s=HOUR_S)
    assert result.checkpoint_bytes == pytest.approx(size, rel=0.03)  # 405B is quoted 2.6% above 14 B a parameter


def test_a_node_limit_slows_the_write() -> None:
    free = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9), interval_s=HOUR_S)
    held = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9, None, 2e9), interval_s=HOUR_S)
    assert held.write_bytes_per_second == 64 * 2e9
    assert held.write_seconds > free.write_seconds


def test_what_was_not_given_is_null() -> None:
    result = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9), interval_s=HOUR_S, mtbf_s=HOUR_S)
    assert result.restore_seconds is None
    assert result.goodput_ratio is None
    assert result.young_interval_seconds is not None


@pytest.mark.parametrize("wrong", [("--interval", "soon"), ("--zero", 4), ("--write-bandwidth", 0), ("--tp", 0)])
def test_wrong_options_end_in_one_line(wrong: tuple[object, ...]) -> None:
    done = tracekit(*ARTICLE, *STORAGE, *wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("tracekit: ")
    assert done.stderr.count("\n") == 1


def test_infinite_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="parameters"):
        plan.checkpoint(float("inf"), MEGATRON, plan.Storage(1e9), interval_s=HOUR_S)
