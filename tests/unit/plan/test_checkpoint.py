"""Sizes and times of published cases, and invalid options."""

import json
import random

import pytest

from tests.support.cli_runner import ROOT, tracekit
from tracekit.errors import ConfigError
from tracekit.model import units
from tracekit.plan import checkpoint as plan
from tracekit.report import checkpoint_plan

HOUR_S = 3600.0
RECORDED = ROOT / "sample_traces" / "demo-fsdp2"
MOVED = ("write", "fsync")
PARAMS = 1.008e12
MEGATRON = plan.Layout(tp=8, pp=64, dp=6)
ARTICLE = ("plan", "checkpoint", "--params", 1e12, "--bytes-per-param", 13.8, "--tp", 8, "--pp", 64, "--dp", 6)
RATES = ("--write-bandwidth", 273e9, "--read-bandwidth", 1e12, "--interval", "4h")
STORAGE = (*RATES, "--mtbf", "3.093h")


def test_published_case_of_a_trillion_parameters() -> None:
    done = tracekit(*ARTICLE, *STORAGE, "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["checkpoint_bytes"] == pytest.approx(13.8e12)
    assert result["writers"] == 512
    assert result["write_seconds"] == pytest.approx(50.55, abs=0.005)
    assert result["write_bytes_per_second_per_gpu"] == pytest.approx(0.533e9, rel=1e-3)
    assert result["write_bytes_per_second_per_node"] == pytest.approx(4.27e9, abs=0.005e9)
    assert result["overhead_ratio"] == pytest.approx(0.00351, abs=5e-6)
    assert result["restore_bytes_per_second"] == pytest.approx(1638e9)
    assert result["restore_seconds"] == pytest.approx(82.8)
    assert result["young_interval_seconds"] == pytest.approx(1061, abs=0.5)
    assert result["daly_interval_seconds"] == pytest.approx(1028, abs=0.5)
    assert 0 < result["goodput_ratio"] < 1


def test_zero_1_replicates_weights_only() -> None:
    assert plan.restore_amplification(plan.Layout(dp=6, zero=1)) == pytest.approx(1.71, abs=0.005)
    assert plan.restore_amplification(plan.Layout(dp=6, zero=3)) == 1
    assert plan.writers(plan.Layout(8, 64, 6, zero=1)) == 3072


def test_under_zero_1_data_parallel_rank_0_writes_more() -> None:
    assert plan.writer_skew_ratio(plan.Layout(dp=2, zero=1)) == pytest.approx(1.333, abs=5e-4)
    assert plan.writer_skew_ratio(plan.Layout(dp=2, zero=3)) == 1
    assert plan.writer_skew_ratio(plan.Layout(dp=2)) == 1


def test_guidance_of_five_percent() -> None:
    result = plan.checkpoint(1e12, MEGATRON, plan.Storage(273e9), interval_s=4 * HOUR_S, bytes_per_param=13.8)
    assert result.guided_write_bytes_per_second == pytest.approx(19.2e9, abs=0.05e9)
    assert result.guided_interval_seconds == pytest.approx(1011, abs=0.5)


def test_a_save_blocks_only_for_the_write_to_the_burst_buffer() -> None:
    storage = plan.Storage(273e9, 1e12, burst_write_bytes_per_second=2e12)
    result = plan.checkpoint(1e12, MEGATRON, storage, interval_s=HOUR_S, mtbf_s=3 * HOUR_S, bytes_per_param=13.8)
    assert (result.blocked_seconds, result.write_seconds) == (pytest.approx(6.9), pytest.approx(50.55, abs=0.005))
    assert result.overhead_ratio == pytest.approx(6.9 / HOUR_S)
    assert result.young_interval_seconds == pytest.approx(plan.young_s(6.9, 3 * HOUR_S))
    assert result.drain_fits_interval
    frequent = plan.checkpoint(1e12, MEGATRON, storage, interval_s=55, bytes_per_param=13.8)
    assert (frequent.drain_seconds, frequent.drain_fits_interval) == (pytest.approx(50.55, abs=0.005), False)


def test_a_model_by_name_has_its_parameters() -> None:
    done = tracekit("plan", "checkpoint", "--model", "llama3-405b", "--tp", 8, *STORAGE, "--format", "json")
    result = json.loads(done.stdout)
    assert result["checkpoint_bytes"] == pytest.approx(14 * 405.8e9, rel=1e-3)
    assert "measured" not in result


def test_size_bandwidth_and_interval_can_come_from_a_recorded_run() -> None:
    done = tracekit("plan", "checkpoint", "--measured", RECORDED, "--read-bandwidth", 1e9, "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = [json.loads(line) for file in RECORDED.glob("*.checkpoint.jsonl") for line in file.open()]
    rates, sizes, starts = [], [], []
    for save in ("step-000024", "step-000048"):
        own = [row for row in rows if row["checkpoint"] == save]
        sizes.append(sum(row["bytes"] for row in own if row["stage"] == "write"))
        moving = [sum(row["dur_ns"] for row in own if row["rank"] == r and row["stage"] in MOVED) for r in (0, 1)]
        rates.append(sizes[-1] / max(moving) * 1e9)
        starts.append(min(row["start_ns"] for row in own if row["stage"] == "total"))
    measured = result["measured"]
    assert measured["checkpoint_bytes"] == pytest.approx(sum(sizes) / 2)
    assert measured["bytes_per_param"] == pytest.approx(sum(sizes) / 2 / 3_082_496)
    assert result["checkpoint_bytes"] == pytest.approx(sum(sizes) / 2)
    assert result["write_bytes_per_second"] == pytest.approx(sum(rates) / 2)
    assert measured["interval_seconds"] == pytest.approx((starts[1] - starts[0]) / 1e9)
    assert (result["writers"], measured["saves"], measured["is_durable"]) == (2, 2, True)


def test_the_error_names_the_option_that_is_missing() -> None:
    done = tracekit("plan", "checkpoint", "--params", 1e9, "--interval", "1h")
    assert (done.returncode, "--write-bandwidth is needed" in done.stderr) == (2, True)
    done = tracekit("plan", "checkpoint", "--measured", ROOT / "sample_traces" / "faults" / "healthy-ddp")
    assert (done.returncode, "no save is recorded there" in done.stderr) == (2, True)


@pytest.mark.parametrize("inputs", [
    {"blocked_s": 50.0, "interval_s": 14_400.0, "mtbf_s": 11_000.0, "restore_s": 300.0, "drain_s": 0.0},
    {"blocked_s": 5.0, "interval_s": 900.0, "mtbf_s": 10_000.0, "restore_s": 60.0, "drain_s": 120.0},
    {"blocked_s": 30.0, "interval_s": 900.0, "mtbf_s": 2_000.0, "restore_s": 300.0, "drain_s": 300.0},
])  # fmt: skip
def test_goodput_is_that_of_ten_thousand_failures(inputs: dict[str, float]) -> None:
    assert plan.goodput_ratio(**inputs) == pytest.approx(lived_goodput(random.Random(7), **inputs), abs=0.005)


def lived_goodput(
    source: random.Random, *, blocked_s: float, interval_s: float, mtbf_s: float, restore_s: float, drain_s: float
) -> float:
    """Return the share of time that trains in a job's life, event by event, until it has failed 10,000 times."""
    now_s = trained_s = durable_s = 0.0
    saves: list[tuple[float, float]] = []  # when storage has it, and the training in it
    failure_s = source.expovariate(1 / mtbf_s)
    for _ in range(10_000):
        while now_s + interval_s < failure_s:
            now_s += interval_s
            trained_s += interval_s - blocked_s
            saves.append((now_s + drain_s, trained_s))
        durable_s = max((trained for stored_s, trained in saves if stored_s <= failure_s), default=durable_s)
        now_s, trained_s, saves = failure_s, durable_s, [(0.0, durable_s)]
        while (failure_s := now_s + source.expovariate(1 / mtbf_s)) < now_s + restore_s:
            now_s = failure_s
        now_s += restore_s
    return durable_s / now_s


@pytest.mark.parametrize(("blocked_s", "mtbf_s"), [(50.55, 3.093 * HOUR_S), (600, 1000), (0.5, 86400)])
def test_the_best_interval_trains_most(blocked_s: float, mtbf_s: float) -> None:
    best_s = plan.best_interval_s(blocked_s, mtbf_s)
    best = plan.goodput_ratio(blocked_s, best_s, mtbf_s)
    assert all(plan.goodput_ratio(blocked_s, best_s * factor, mtbf_s) < best for factor in (0.8, 0.99, 1.01, 1.25))
    if blocked_s < mtbf_s / 100:  # where Daly's approximation holds
        assert best_s == pytest.approx(plan.daly_s(blocked_s, mtbf_s) + blocked_s, rel=1e-3)


def test_goodput_over_nodes_and_what_to_do() -> None:
    done = tracekit(*ARTICLE, *RATES, "--node-mtbf", f"{3.093 * 384}h", "--format", "json")
    result = json.loads(done.stdout)
    assert result["mtbf_seconds"] == pytest.approx(3.093 * HOUR_S)
    by_nodes = {row["nodes"]: row for row in result["by_nodes"]}
    assert set(by_nodes) == {192, 384, 768, 1536}  # DP 6: a quarter of it is no number of ranks
    assert by_nodes[768]["mtbf_seconds"] == pytest.approx(3.093 * HOUR_S / 2)
    goodputs = [by_nodes[nodes]["best_goodput_ratio"] for nodes in sorted(by_nodes)]
    assert goodputs == sorted(goodputs, reverse=True)
    assert by_nodes[384]["goodput_ratio"] == result["goodput_ratio"]


def test_an_interval_that_no_failure_spares_trains_nothing() -> None:
    assert plan.goodput_ratio(1, 1e9, 1000) == 0
    assert plan.goodput_ratio(10, 5, 1000) == 0


def test_the_advice_names_the_best_interval_and_failures_between_saves() -> None:
    storage = plan.Storage(273e9, 1e12)
    rare = plan.checkpoint(PARAMS, MEGATRON, storage, interval_s=4 * HOUR_S, mtbf_s=3.093 * HOUR_S)
    text = checkpoint_plan.advice(rare, 4 * HOUR_S, 3.093 * HOUR_S)
    assert units.long_duration(rare.best_interval_seconds or 0) in text
    assert "more often than it saves" in text
    near = plan.checkpoint(PARAMS, MEGATRON, storage, interval_s=1000, mtbf_s=3.093 * HOUR_S)
    assert units.long_duration(1000) in checkpoint_plan.advice(near, 1000, 3.093 * HOUR_S)
    unknown = plan.checkpoint(PARAMS, MEGATRON, storage, interval_s=100)
    assert units.long_duration(unknown.guided_interval_seconds) in checkpoint_plan.advice(unknown, 100)


@pytest.mark.parametrize(("params", "size"), [(8.03e9, 105 * 2**30), (70e9, 912 * 2**30), (405e9, 5.29 * 2**40)])
def test_sizes_of_mlperf_storage(params: float, size: float) -> None:
    result = plan.checkpoint(params, plan.Layout(), plan.Storage(1e9), interval_s=HOUR_S)
    assert result.checkpoint_bytes == pytest.approx(size, rel=0.03)  # 405B is quoted 2.6% above 14 B a parameter


def test_a_node_limit_slows_the_write() -> None:
    unlimited = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9), interval_s=HOUR_S)
    limited = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9, None, 2e9), interval_s=HOUR_S)
    assert limited.write_bytes_per_second == 64 * 2e9
    assert limited.write_seconds > unlimited.write_seconds


def test_results_without_their_input_are_none() -> None:
    result = plan.checkpoint(PARAMS, MEGATRON, plan.Storage(273e9), interval_s=HOUR_S, mtbf_s=HOUR_S)
    assert result.restore_seconds is None
    assert result.goodput_ratio is None
    assert result.young_interval_seconds is not None


@pytest.mark.parametrize("wrong", [("--interval", "soon"), ("--zero", 4), ("--write-bandwidth", 0), ("--tp", 0)])
def test_an_invalid_option_is_a_one_line_error(wrong: tuple[object, ...]) -> None:
    done = tracekit(*ARTICLE, *STORAGE, *wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("tracekit: ")
    assert done.stderr.count("\n") == 1


def test_infinite_parameters_are_an_error() -> None:
    with pytest.raises(ConfigError, match="parameters"):
        plan.checkpoint(float("inf"), MEGATRON, plan.Storage(1e9), interval_s=HOUR_S)
