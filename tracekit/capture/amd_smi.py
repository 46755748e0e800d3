"""Counters of an AMD GPU by AMD SMI: the package amdsmi of ROCm."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tracekit.capture.device_identity import DeviceIdentity
from tracekit.conventions import device_metrics

_ABSENT = ("AMDSMI_STATUS_NOT_SUPPORTED", "AMDSMI_STATUS_NOT_YET_IMPLEMENTED")
_REASONS = {
    "active_ppt_pwr": device_metrics.POWER_CAP,
    "active_prochot_thrm": device_metrics.HW_THERMAL,
    "active_socket_thrm": device_metrics.HW_THERMAL,
    "active_vr_thrm": device_metrics.HW_THERMAL,
    "active_hbm_thrm": device_metrics.HW_THERMAL,
}


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
            self.counters: Mapping[str, Callable[[], float | None]] = _counters(self._smi, handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the use of AMD SMI."""
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()

    def is_absent(self, error: Exception) -> bool:
        """Return whether this GPU or driver does not have the counter."""
        return any(name in str(error) for name in _ABSENT)


def _counters(smi: Any, handle: Any) -> dict[str, Callable[[], float | None]]:
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
        for name, bit in _REASONS.items():
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
