"""Counters of an NVIDIA GPU by NVML: the package nvidia-ml-py, module pynvml."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tracekit.capture.device_identity import DeviceIdentity
from tracekit.conventions import device_metrics

_ABSENT = ("NVMLError_NotSupported", "NVMLError_FunctionNotFound")


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
            self.counters: Mapping[str, Callable[[], float | None]] = _counters(self._nvml, self._physical(device))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the use of NVML."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def is_absent(self, error: Exception) -> bool:
        """Return whether this GPU or driver does not have the counter."""
        return type(error).__name__ in _ABSENT

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


def _counters(nvml: Any, handle: Any) -> dict[str, Callable[[], float | None]]:
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
