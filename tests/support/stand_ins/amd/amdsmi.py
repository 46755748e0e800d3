# ruff: noqa: N818 the names are those of the package
"""The part of AMD SMI's Python package that the recorder uses, over one GPU.

One test compares its names with the source of the package.
"""

from enum import IntEnum
from typing import Any


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    pass


class AmdSmiClkType(IntEnum):
    GFX = 1
    MEM = 2


class AmdSmiTemperatureType(IntEnum):
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


BDF = "0000:c1:00.0"
LACKS: set[str] = set()


def amdsmi_init() -> None:
    pass


def amdsmi_shut_down() -> None:
    pass


def amdsmi_get_processor_handle_from_bdf(bdf: str) -> str:
    if bdf != BDF:
        raise AmdSmiLibraryException("Error code:\n\t31 | AMDSMI_STATUS_NOT_FOUND - Device Not found")
    return bdf


def amdsmi_get_clock_info(processor_handle: str, clock_type: AmdSmiClkType) -> dict[str, Any]:
    return {"clk": 2100 if clock_type == AmdSmiClkType.GFX else 1300, "max_clk": 2100}


def amdsmi_get_power_info(processor_handle: str) -> dict[str, Any]:
    return {"average_socket_power": "N/A", "current_socket_power": 712}


def amdsmi_get_power_cap_info(processor_handle: str) -> dict[str, Any]:
    return {"power_cap": 750_000_000}


def amdsmi_get_temp_metric(
    processor_handle: str, sensor_type: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
) -> int:
    return 83


def amdsmi_get_gpu_activity(processor_handle: str) -> dict[str, Any]:
    return {"gfx_activity": 97, "umc_activity": "N/A", "mm_activity": 0}


def amdsmi_get_gpu_total_ecc_count(processor_handle: str) -> dict[str, Any]:
    return {"correctable_count": 4, "uncorrectable_count": 1, "deferred_count": 0}


def amdsmi_get_violation_status(processor_handle: str) -> dict[str, Any]:
    if "violations" in LACKS:
        raise AmdSmiLibraryException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
    return {"active_ppt_pwr": True, "active_hbm_thrm": False, "active_vr_thrm": "N/A", "active_socket_thrm": True}
