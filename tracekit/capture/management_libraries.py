"""Counters of a GPU by its driver's library: NVML (package nvidia-ml-py) or AMD SMI (amdsmi of ROCm)."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tracekit.capture.rank_info import DeviceIdentity
from tracekit.conventions import device_metrics

_NVML_ABSENT = ("NVMLError_NotSupported", "NVMLError_FunctionNotFound")
_AMD_ABSENT = ("AMDSMI_STATUS_NOT_SUPPORTED", "AMDSMI_STATUS_NOT_YET_IMPLEMENTED")
_AMD_REASONS = {
    "active_ppt_pwr": device_metrics.POWER_CAP,
    "active_prochot_thrm": device_metrics.HW_THERMAL,
    "active_socket_thrm": device_metrics.HW_THERMAL,
    "active_vr_thrm": device_metrics.HW_THERMAL,
    "active_hbm_thrm": device_metrics.HW_THERMAL,
}


class Nvml:
    """The counters of one GPU. Reads of `counters` raise errors of NVML.

    Raises ImportError or an error of NVML where there is no library, no driver, or no such GPU.
    """

    def __init__(self, device: DeviceIdentity) -> None:
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise ImportError("pynvml is not installed: pip install 'torch-tracekit[device-metrics]'") from error
        self._nvml.nvmlInit()
        try:
            self.counters: Mapping[str, Callable[[], float | None]] = _nvml_counters(self._nvml, self._physical(device))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the use of NVML."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def is_absent(self, error: Exception) -> bool:
        """Return whether this GPU or driver does not have the counter."""
        return type(error).__name__ in _NVML_ABSENT

    def _physical(self, device: DeviceIdentity) -> Any:
        """Return the handle of a GPU; of a MIG instance that of the GPU it is a part of.

        A MIG instance has its own UUID in CUDA, and clocks, power and temperature only as part of its GPU.
        """
        nvml = self._nvml
        ways: list[Callable[[], Any]] = []
        if device.uuid:
            mig = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
            ways.append(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}"))
            ways.append(lambda: mig(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{device.uuid}")))
        if device.pci:
            ways.append(lambda: nvml.nvmlDeviceGetHandleByPciBusId(device.pci))
        for way in ways[:-1]:
            with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                return way()
        if not ways:
            raise LookupError("torch states neither the UUID nor the PCI address of the GPU")
        return ways[-1]()


class AmdSmi:
    """The counters of one GPU. Reads of `counters` raise errors of AMD SMI.

    Raises ImportError, LookupError or an error of AMD SMI where there is no library, no driver, or no such GPU.
    """

    def __init__(self, device: DeviceIdentity) -> None:
        try:
            self._smi = importlib.import_module("amdsmi")
        except (ImportError, KeyError, OSError) as error:  # it raises KeyError where its shared library is missing
            raise ImportError("amdsmi is not installed: it is part of ROCm (amd-smi-lib)") from error
        if not device.pci:
            raise LookupError("torch does not state the PCI address of the GPU")
        self._smi.amdsmi_init()
        try:
            handle = self._smi.amdsmi_get_processor_handle_from_bdf(device.pci)
            self.counters: Mapping[str, Callable[[], float | None]] = _amd_counters(self._smi, handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the use of AMD SMI."""
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()

    def is_absent(self, error: Exception) -> bool:
        """Return whether this GPU or driver does not have the counter."""
        return any(name in str(error) for name in _AMD_ABSENT)


def _nvml_counters(nvml: Any, handle: Any) -> dict[str, Callable[[], float | None]]:
    volatile = nvml.NVML_VOLATILE_ECC
    return {
        device_metrics.SM_CLOCK: lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        device_metrics.MEMORY_CLOCK: lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        device_metrics.POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        device_metrics.TEMPERATURE: lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        device_metrics.UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        device_metrics.MEMORY_UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100,
        device_metrics.POWER_LIMIT: lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        device_metrics.THROTTLE_REASONS: lambda: _throttle_reasons(nvml, handle),
        device_metrics.ECC_CORRECTED: lambda: int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile)
        ),
        device_metrics.ECC_UNCORRECTED: lambda: int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile)
        ),
        device_metrics.REMAPPED_ROWS: lambda: int(sum(nvml.nvmlDeviceGetRemappedRows(handle)[:2])),
        device_metrics.PENDING_ROW_REMAP: lambda: int(nvml.nvmlDeviceGetRemappedRows(handle)[2]),
    }


def _throttle_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # an older package, or an older driver
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _amd_counters(smi: Any, handle: Any) -> dict[str, Callable[[], float | None]]:
    def clock(kind: Any) -> float | None:
        values = smi.amdsmi_get_clock_info(handle, kind)
        return _number(values.get("clk", values.get("cur_clk")))

    def power() -> float | None:
        values = smi.amdsmi_get_power_info(handle)
        average = _number(values.get("average_socket_power"))
        return average if average is not None else _number(values.get("current_socket_power"))

    def activity(engine: str) -> float | None:
        percent = _number(smi.amdsmi_get_gpu_activity(handle).get(engine))
        return None if percent is None else percent / 100

    def temperature() -> float | None:
        sensor, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return _number(smi.amdsmi_get_temp_metric(handle, sensor, now))

    def reasons() -> float:
        status = smi.amdsmi_get_violation_status(handle)
        bits = 0
        for name, bit in _AMD_REASONS.items():
            bits |= bit if status.get(name) is True else 0
        return bits

    return {
        device_metrics.SM_CLOCK: lambda: clock(smi.AmdSmiClkType.GFX),
        device_metrics.MEMORY_CLOCK: lambda: clock(smi.AmdSmiClkType.MEM),
        device_metrics.POWER: power,
        device_metrics.TEMPERATURE: temperature,
        device_metrics.UTILIZATION: lambda: activity("gfx_activity"),
        device_metrics.MEMORY_UTILIZATION: lambda: activity("umc_activity"),
        device_metrics.POWER_LIMIT: lambda: _watts(smi.amdsmi_get_power_cap_info(handle).get("power_cap")),
        device_metrics.THROTTLE_REASONS: reasons,
        device_metrics.ECC_CORRECTED: lambda: _number(
            smi.amdsmi_get_gpu_total_ecc_count(handle).get("correctable_count")
        ),
        device_metrics.ECC_UNCORRECTED: lambda: _number(
            smi.amdsmi_get_gpu_total_ecc_count(handle).get("uncorrectable_count")
        ),
    }


def _number(value: object) -> float | None:
    """Return a number; None for AMD SMI's "N/A"."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _watts(value: object) -> float | None:
    """Return a limit in watts, which versions of AMD SMI give in watts or microwatts."""
    number = _number(value)
    return number if number is None or number < 1e5 else number / 1e6
