"""`tracekit plan train`: published trainings, terms by hand, equal throughput, and what cannot be."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli_runner import ROOT, tracekit
from tracekit.errors import ConfigError
from tracekit.plan import hardware, layouts, models, train
from tracekit.plan.layouts import Job
from tracekit.plan.train import OFFLOAD_HOST_BYTES, OFFLOAD_LINK_BYTES, Offload, Prices, Work

DAY_S = 86_400
GREEN, YAFSDP = ROOT / "sample_traces" / "demo-fsdp2", ROOT / "sample_traces" / "demo-yafsdp"


def planned(*words: object) -> dict[str, Any]:
    done = tracekit("plan", "train", *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


# Published inputs -> published MFU and days; docs/plan.md has the sources.
PUBLISHED = {
    # 140 TFLOP/s per GPU with recomputation, so 6/8 of that without; "34 days" (arXiv 2104.04473, section 5.1).
    "GPT-3 at 140 TFLOP/s": (
        "--model gpt3-175b --tokens 300e9 --gpus 1024 --batch 1536 --device a100-80 --mfu 0.3365", 0.3365, 34,
    ),
    # 30.84 million H100-hours by its model card; MFU in arXiv 2407.21783, table 4.
    "Llama 3 405B predicted by its layout": (
        "--model 405b --tokens 15.6e12 --gpus 16384 --device h100-80 --pp 16 --tp 8", 0.41, 30.84e6 / 16_384 / 24,
    ),
    # 380 tokens/s and GPU on 2,048 A100, "approximately 21 days" (arXiv 2302.13971, section 2.4).
    "LLaMA 65B": (
        "--params 65.2e9 --tokens 1.4e12 --gpus 2048 --device a100-80 --tokens-per-second 778240", None, 21,
    ),
    # 238,300 tokens/s, 45.7% without attention (arXiv 2204.02311, section 4.1); its hours include downtime.
    "PaLM 540B": (
        "--params 540.35e9 --tokens 780e9 --gpus 6144 --peak-flops 275e12 --tokens-per-second 238300", 0.457, None,
    ),
    # 692 tokens/s and chip, 65.4% (MaxText 0.2.0, reference/models/tiering); 459 TFLOP/s (Cloud TPU, TPU v5p).
    "Llama 2 70B on TPU v5p": (
        "--model llama2-70b --tokens 2e12 --gpus 512 --peak-flops 459e12 --tokens-per-second 354304", 0.654, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trainings_are_within_a_tenth(name: str) -> None:
    options, mfu, days = PUBLISHED[name]
    values = planned(*options.split())
    if mfu is not None:
        assert values["mfu_ratio"] == pytest.approx(mfu, rel=0.1)
    if days is not None:
        assert values["duration_seconds"] / DAY_S == pytest.approx(days, rel=0.1)


def test_the_mfu_of_gpt3_is_predicted_by_its_published_layout() -> None:
    options = "--model gpt3-175b --tokens 300e9 --gpus 1024 --batch 768 --device a100-80 --pp 8 --tp 8"
    assert planned(*options.split())["mfu_ratio"] == pytest.approx(0.447, rel=0.1)  # arXiv 2402.15627, table 2


def test_a_training_by_hand() -> None:
    work = Work(flops_per_token=6e9, step_tokens=1e6, gpus=10, peak_flops_per_s=1e15)
    step = train.step_at_mfu(work, 0.5, train.GIVEN)
    assert step.seconds == pytest.approx(1.2)
    plan = train.plan(work, step, 3e9, prices=Prices(2.0, 700, 1.1), goodput_ratio=0.9)
    assert plan.steps == 3000
    assert plan.duration_seconds == pytest.approx(4000)
    assert plan.gpu_hours == pytest.approx(4000 * 10 / 3600)
    assert plan.cost == pytest.approx(2 * plan.gpu_hours)
    assert plan.cost_per_month == pytest.approx(10 * 730 * 2)
    assert plan.energy_kwh == pytest.approx(plan.gpu_hours * 0.77)
    assert plan.mfu_ratio == pytest.approx(0.5)


def test_the_terms_of_a_layout_add_up_to_its_step() -> None:
    job = Job.of(models.find("405b"), hardware.find("h100-80"), gpus=16_384)
    layout = layouts.best(job, tp=8, pp=16)
    step = train.step_of_layout(job, layout)
    assert step.seconds == pytest.approx(layout.step_seconds)
    assert {term.name for term in step.terms} <= set(train.TERM_SOURCES)
    assert all(term.formula and term.source and term.seconds > 0 for term in step.terms)


def test_offload_adds_the_time_of_the_host_and_of_pcie() -> None:
    work = Work(6e9, 1e6, 8, 1e15)
    step = train.step_at_mfu(work, 0.5, train.GIVEN)
    offloaded = train.with_offload(step, Offload(1e9, 20e9, 10e9))
    extra_s = 1e9 * (OFFLOAD_HOST_BYTES / 20e9 + OFFLOAD_LINK_BYTES / 10e9)
    assert offloaded.seconds - step.seconds == pytest.approx(extra_s)
    assert train.plan(work, offloaded, 1e9).mfu_ratio < 0.5


@given(st.integers(1, 100_000), st.floats(0.1, 10), st.floats(0, 100))
def test_fewer_gpus_with_a_speedup_have_the_same_throughput(gpus: int, speedup: float, price: float) -> None:
    equal = train.equal_throughput(gpus, speedup, price)
    assert equal.gpus * speedup == pytest.approx(gpus)
    assert equal.gpus + equal.saved_gpus == pytest.approx(gpus)
    assert equal.saved_cost_per_month == pytest.approx(equal.saved_gpus * 730 * price)


def test_two_recorded_runs_state_the_speedup() -> None:
    words = ("--model", "7b", "--tokens", "1e12", "--gpus", "64", "--mfu", "0.4", "--gpu-hour-price", "2")
    values = planned(*words, "--measured", GREEN, "--against", YAFSDP)
    assert values["mfu_source"] == train.GIVEN
    equal = values["equal_throughput"]
    assert equal["gpus"] == pytest.approx(64 / equal["speedup_ratio"])
    back = planned(*words, "--measured", YAFSDP, "--against", GREEN)["equal_throughput"]
    assert back["speedup_ratio"] == pytest.approx(1 / equal["speedup_ratio"])


@pytest.mark.parametrize("device", hardware.NAMES)
def test_each_device_of_the_table_can_be_planned_for(device: str) -> None:
    values = planned("--model", "7b", "--tokens", "1e12", "--gpus", "64", "--device", device, "--mfu", "0.4")
    assert values["peak_flops_per_s"] == hardware.find(device).peak_flops_per_s
    assert values["energy_kwh"] > 0


def test_a_device_that_stands_in_the_table_twice_is_one_machine() -> None:
    assert hardware.find("h100-sxm") is hardware.find("h100-80")
    assert hardware.find("mi300x").memory_bytes == 192e9


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--model 7b --tokens 1e12", "--gpus"),
        ("--tokens 1e12 --gpus 8 --mfu 0.4", "--model"),
        ("--params 7e9 --tokens 1e12 --gpus 8", "--mfu"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 1.5", "MFU"),
        ("--model 7b --tokens 0 --gpus 8 --mfu 0.4", "tokens"),
        ("--model 7b --tokens nan --gpus 8 --mfu 0.4", "tokens"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 0.4 --goodput 0", "goodput"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 0.4 --gpu-hour-price -1", "price"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 0.4 --speedup 0", "speedup"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 0.4 --against runs/x", "--measured"),
        ("--model 405b --tokens 1e12 --gpus 8", "no layout"),
        ("--model 7b --tokens 1e12 --gpus 64 --tp 8 --zero 2", "--zero 2"),
        ("--model 7b --tokens 1e12 --gpus 8 --mfu 0.4 --device b300", "b300"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_names_it(words: str, option: str) -> None:
    done = tracekit("plan", "train", *words.split())
    assert done.returncode == 2
    assert option in done.stderr
    assert "Traceback" not in done.stderr


def test_an_mfu_above_1_is_no_plan() -> None:
    with pytest.raises(ConfigError):
        train.step_at_mfu(Work(6e9, 1e6, 8, 1e15), math.inf, train.GIVEN)
