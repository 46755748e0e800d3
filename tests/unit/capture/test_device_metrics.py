"""Counters of GPUs, read from a stand-in for the driver's library; its names are checked against the package."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tracekit.capture import Recorder, rank_info
from tracekit.capture.device_metrics import NOTHING, DeviceMetrics, Values
from tracekit.capture.metrics import MetricsLog
from tracekit.capture.rank_info import DeviceIdentity
from tracekit.conventions import device_metrics

STAND_IN = Path(__file__).parents[2] / "support" / "stand_ins" / "nvml"
UUID = "8e2b7b1a-0f1d-4d35-9a51-2f63a8f4c001"
DEVICE = DeviceIdentity(UUID, "0000:1b:00.0")
EVERY_S = 0.001


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    module = importlib.import_module("pynvml")
    yield module
    sys.modules.pop("pynvml", None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def first_values(metrics: DeviceMetrics) -> Values:
    """Return the first values that are not null."""
    taken: list[Values] = []
    wait_for(lambda: bool(taken.append(metrics.take()) or taken[-1] != NOTHING))
    return taken[-1]


def recorded(*, device: DeviceIdentity = DEVICE) -> Values:
    metrics = DeviceMetrics(3, device=lambda: device, every_s=10)
    values = first_values(metrics)
    metrics.close()
    return values


def test_a_step_has_each_counter(nvml: ModuleType) -> None:
    nvml.GPUS.append(nvml.Gpu(f"GPU-{UUID}", throttle_reasons=[device_metrics.POWER_CAP]))
    values = recorded()
    assert values == {
        "sm_clock_mhz": 1755.0, "min_sm_clock_mhz": 1755.0, "max_sm_clock_mhz": 1755.0,
        "memory_clock_mhz": 2619.0, "min_memory_clock_mhz": 2619.0, "max_memory_clock_mhz": 2619.0,
        "power_w": 612.345, "min_power_w": 612.345, "max_power_w": 612.345,
        "temperature_c": 71.0, "min_temperature_c": 71.0, "max_temperature_c": 71.0,
        "device_utilization_ratio": 0.98, "min_device_utilization_ratio": 0.98, "max_device_utilization_ratio": 0.98,
        "device_memory_utilization_ratio": 0.4, "min_device_memory_utilization_ratio": 0.4,
        "max_device_memory_utilization_ratio": 0.4,
        "power_limit_w": 700.0, "ecc_corrected_errors": 3, "ecc_uncorrected_errors": 0, "remapped_rows": 3,
        "pending_row_remap": 1, "throttle_reasons": device_metrics.POWER_CAP, "device_samples": 1,
    }  # fmt: skip
    assert tuple(values) == device_metrics.NAMES
    assert nvml.OPEN == [0]


def test_a_step_has_the_mean_the_extremes_and_all_throttle_reasons_of_its_samples(nvml: ModuleType) -> None:
    reasons = [device_metrics.POWER_CAP, device_metrics.HW_THERMAL, 0]
    gpu = nvml.Gpu(f"GPU-{UUID}", sm_clocks_mhz=[1500, 1200, 900], throttle_reasons=reasons)
    nvml.GPUS.append(gpu)
    metrics = DeviceMetrics(0, device=lambda: DEVICE, every_s=EVERY_S)
    assert metrics.take() == NOTHING
    wait_for(lambda: len(gpu.throttle_reasons) == 1 and gpu.reads > 3 * 12)
    values = metrics.take()
    metrics.close()
    samples = int(values["device_samples"] or 0)
    assert samples >= 3
    assert values["min_sm_clock_mhz"] == 900
    assert values["max_sm_clock_mhz"] == 1500
    assert values["sm_clock_mhz"] == pytest.approx((1500 + 1200 + 900 * (samples - 2)) / samples, abs=0.001)
    assert values["throttle_reasons"] == device_metrics.POWER_CAP | device_metrics.HW_THERMAL


def test_a_step_shorter_than_the_sampling_period_has_the_last_sample(nvml: ModuleType) -> None:
    nvml.GPUS.append(nvml.Gpu(f"GPU-{UUID}"))
    metrics = DeviceMetrics(0, device=lambda: DEVICE, every_s=10)
    first = first_values(metrics)
    assert metrics.take() == {**first, "device_samples": 0}
    metrics.close()


@pytest.mark.parametrize(
    "device",
    [
        DeviceIdentity(UUID, None),
        DeviceIdentity(None, "0000:1b:00.0"),
        DeviceIdentity("11111111-0000-0000-0000-000000000000", "0000:1b:00.0"),
        DeviceIdentity("22222222-0000-0000-0000-000000000000", None),
    ],
    ids=["by UUID", "by PCI address", "by PCI address, UUID unknown", "by the UUID of a MIG instance"],
)
def test_the_gpu_is_the_one_that_torch_uses_whatever_its_index(nvml: ModuleType, device: DeviceIdentity) -> None:
    wanted = nvml.Gpu(f"GPU-{UUID}", pci="0000:1b:00.0", sm_clocks_mhz=[1234])
    instance = nvml.Gpu("MIG-22222222-0000-0000-0000-000000000000", parent=wanted)
    nvml.GPUS.extend([nvml.Gpu("GPU-0", pci="0000:1a:00.0"), instance, wanted])
    assert recorded(device=device)["sm_clock_mhz"] == 1234


def test_the_identity_is_what_torch_states() -> None:
    full = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    assert rank_info.identity(full, is_amd=False) == DEVICE
    assert rank_info.identity(SimpleNamespace(uuid=UUID), is_amd=False) == DeviceIdentity(UUID, None)
    assert rank_info.identity(SimpleNamespace(), is_amd=True) == DeviceIdentity(None, None, is_amd=True)


def test_a_counter_that_the_gpu_lacks_is_null_without_a_word(
    nvml: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    lacks = dict.fromkeys(["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"], nvml.NVMLError_NotSupported)
    nvml.GPUS.append(nvml.Gpu(f"GPU-{UUID}", fails=lacks))
    values = recorded()
    nulls = {name for name, value in values.items() if value is None}
    assert nulls == {"ecc_corrected_errors", "ecc_uncorrected_errors", "remapped_rows", "pending_row_remap"}
    assert capfd.readouterr().err == ""


def test_an_older_driver_has_throttle_reasons_by_their_former_name(nvml: ModuleType) -> None:
    old = {"nvmlDeviceGetCurrentClocksEventReasons": nvml.NVMLError_FunctionNotFound}
    nvml.GPUS.append(nvml.Gpu(f"GPU-{UUID}", fails=old, throttle_reasons=[device_metrics.SW_THERMAL]))
    assert recorded()["throttle_reasons"] == device_metrics.SW_THERMAL


def test_a_counter_without_permission_is_null_and_stated_once(
    nvml: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = nvml.Gpu(f"GPU-{UUID}", fails={"nvmlDeviceGetPowerUsage": nvml.NVMLError_NoPermission})
    nvml.GPUS.append(gpu)
    metrics = DeviceMetrics(3, device=lambda: DEVICE, every_s=EVERY_S)
    values = first_values(metrics)
    wait_for(lambda: gpu.reads > 100)
    metrics.close()
    assert values["power_w"] is None
    assert values["sm_clock_mhz"] == 1755
    said = "tracekit: rank 3: device metrics lack power_w: NVMLError_NoPermission: stand-in; training continues\n"
    assert capfd.readouterr().err == said


def test_a_gpu_that_is_lost_ends_the_counters_with_one_line(
    nvml: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = nvml.Gpu(f"GPU-{UUID}")
    nvml.GPUS.append(gpu)
    metrics = DeviceMetrics(3, device=lambda: DEVICE, every_s=EVERY_S)
    first_values(metrics)
    gpu.fails["*"] = nvml.NVMLError_GpuIsLost
    said = []
    wait_for(lambda: bool(said.append(capfd.readouterr().err) or said[-1]))
    wait_for(lambda: metrics.take() == NOTHING)
    metrics.close()
    said.append(capfd.readouterr().err)
    assert "".join(said) == (
        "tracekit: rank 3: device metrics are no longer recorded: NVMLError_GpuIsLost: stand-in; training continues\n"
    )
    assert nvml.OPEN == [0]


@pytest.mark.parametrize("fault", ["no library", "no driver", "no such GPU", "no CUDA"])
def test_training_goes_on_without_the_counters(
    fault: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if fault == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif fault == "no driver":
        nvml = request.getfixturevalue("nvml")
        nvml.INIT_FAILS.append(nvml.NVMLError_DriverNotLoaded)
    elif fault == "no such GPU":
        request.getfixturevalue("nvml")
    metrics = DeviceMetrics(3) if fault == "no CUDA" else DeviceMetrics(3, device=lambda: DEVICE)
    taken = [metrics.take() for _ in range(3)]
    metrics.close()
    assert taken == [NOTHING] * 3
    said = capfd.readouterr().err
    assert said.startswith("tracekit: rank 3: device metrics are not recorded: ")
    assert {
        "no library": "pip install 'torch-tracekit[device-metrics]'",
        "no driver": "NVMLError_DriverNotLoaded",
        "no such GPU": "NVMLError_NotFound",
        "no CUDA": "this process uses no GPU",
    }[fault] in said
    assert said.count("\n") == 1


def test_a_recorder_writes_the_counters_of_each_step(tmp_path: Path) -> None:
    """Where there is no GPU, they are null."""
    with Recorder(tmp_path, steps=None, device="cpu", device_metrics=True) as recorder:
        for _ in range(3):
            recorder.step()
    lines = [json.loads(line) for line in (tmp_path / "rank00000.metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all({name: line[name] for name in device_metrics.NAMES} == NOTHING for line in lines)


def test_the_log_has_the_counters(nvml: ModuleType, tmp_path: Path) -> None:
    nvml.GPUS.append(nvml.Gpu(f"GPU-{UUID}"))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.add({"step": 0, **recorded()})
    log.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {name: line[name] for name in ("step", "sm_clock_mhz", "ecc_corrected_errors")} == {
        "step": 0,
        "sm_clock_mhz": 1755.0,
        "ecc_corrected_errors": 3,
    }


def test_the_stand_in_has_the_names_signatures_and_values_of_the_package(nvml: ModuleType) -> None:
    real = package("nvidia-ml-py")
    for name, value in vars(nvml).items():
        if name.startswith("nvml"):
            assert (
                inspect.signature(getattr(real, name)).parameters.keys() == inspect.signature(value).parameters.keys()
            )
        elif name.startswith("NVML_"):
            assert getattr(real, name) == value
        elif name.startswith("NVMLError_"):
            assert issubclass(getattr(real, name), real.NVMLError)


def test_throttle_reasons_are_the_bits_of_the_package() -> None:
    real = package("nvidia-ml-py")
    assert {
        "nvmlClocksEventReasonGpuIdle": device_metrics.GPU_IDLE,
        "nvmlClocksEventReasonApplicationsClocksSetting": device_metrics.CLOCK_SETTING,
        "nvmlClocksEventReasonSwPowerCap": device_metrics.POWER_CAP,
        "nvmlClocksEventReasonHwSlowdown": device_metrics.HW_SLOWDOWN,
        "nvmlClocksEventReasonSyncBoost": device_metrics.SYNC_BOOST,
        "nvmlClocksEventReasonSwThermalSlowdown": device_metrics.SW_THERMAL,
        "nvmlClocksEventReasonHwThermalSlowdown": device_metrics.HW_THERMAL,
        "nvmlClocksEventReasonHwPowerBrakeSlowdown": device_metrics.POWER_BRAKE,
        "nvmlClocksEventReasonDisplayClockSetting": device_metrics.DISPLAY_CLOCK,
    }.items() <= {name: value for name, value in vars(real).items() if isinstance(value, int)}.items()


def package(distribution: str) -> ModuleType:
    """Return the installed pynvml, whatever ``import pynvml`` finds."""
    try:
        path = importlib.metadata.distribution(distribution).locate_file("pynvml.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {distribution}")
    spec = importlib.util.spec_from_file_location("pynvml_of_the_package", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_that_computes_reports_clocks_power_and_temperature(tmp_path: Path) -> None:
    package("nvidia-ml-py")
    weight = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    with Recorder(tmp_path, steps=None, device_metrics=True) as recorder:
        for _ in range(20):
            for _ in range(50):
                (weight @ weight).mean().backward()
            torch.cuda.synchronize()
            recorder.step()
    lines = [json.loads(line) for line in (tmp_path / "rank00000.metrics.jsonl").read_text().splitlines()]
    sampled = [line for line in lines if line["device_samples"]]
    assert sampled
    for line in sampled:
        assert 100 < line["sm_clock_mhz"] < 5000
        assert 10 < line["temperature_c"] < 120
        assert 10 < line["power_w"] < 3000
        assert isinstance(line["throttle_reasons"], int)
