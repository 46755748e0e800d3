# ruff: noqa: A002, F821, N803 the names are those of the package
"""The part of nvidia-ml-py that the recorder uses, over GPUs that a test describes.

Tests put this folder on sys.path, so it is what ``import pynvml`` finds. One test compares its names with the package.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC = 0


class NVMLError(Exception):
    pass


for _name in (
    "NotSupported", "NoPermission", "NotFound", "InvalidArgument", "FunctionNotFound", "DriverNotLoaded", "GpuIsLost",
):  # fmt: skip
    globals()[f"NVMLError_{_name}"] = type(f"NVMLError_{_name}", (NVMLError,), {})


@dataclass
class Gpu:
    """One GPU, or a MIG instance of `parent`."""

    uuid: str
    pci: str = "0000:00:00.0"
    parent: "Gpu | None" = None
    sm_clocks_mhz: list[int] = field(default_factory=lambda: [1755])
    """The last one stays; the others are read once each."""
    throttle_reasons: list[int] = field(default_factory=lambda: [0])
    fails: dict[str, type[NVMLError]] = field(default_factory=dict)
    """By function: what it raises; of "*", what all raise."""
    reads: int = 0


GPUS: list[Gpu] = []
INIT_FAILS: list[type[NVMLError]] = []
OPEN = [0]


def nvmlInit() -> None:
    if INIT_FAILS:
        raise INIT_FAILS[0]("stand-in")
    OPEN[0] += 1


def nvmlShutdown() -> None:
    OPEN[0] -= 1


def nvmlDeviceGetHandleByUUID(uuid: str) -> Gpu:
    return _only(lambda gpu: gpu.uuid == uuid)


def nvmlDeviceGetHandleByPciBusId(pciBusId: str) -> Gpu:
    return _only(lambda gpu: gpu.pci == pciBusId and gpu.parent is None)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice: Gpu) -> Gpu:
    if migDevice.parent is None:
        raise NVMLError_InvalidArgument("Invalid Argument")
    return migDevice.parent


def nvmlDeviceGetClockInfo(handle: Gpu, type: int) -> int:
    _check(handle, "nvmlDeviceGetClockInfo")
    return _next(handle.sm_clocks_mhz) if type == NVML_CLOCK_SM else 2619


def nvmlDeviceGetPowerUsage(handle: Gpu) -> int:
    _check(handle, "nvmlDeviceGetPowerUsage")
    return 612_345


def nvmlDeviceGetEnforcedPowerLimit(handle: Gpu) -> int:
    _check(handle, "nvmlDeviceGetEnforcedPowerLimit")
    return 700_000


def nvmlDeviceGetTemperature(handle: Gpu, sensor: int) -> int:
    _check(handle, "nvmlDeviceGetTemperature")
    return 71


def nvmlDeviceGetUtilizationRates(handle: Gpu) -> SimpleNamespace:
    _check(handle, "nvmlDeviceGetUtilizationRates")
    return SimpleNamespace(gpu=98, memory=40)


def nvmlDeviceGetCurrentClocksEventReasons(handle: Gpu) -> int:
    _check(handle, "nvmlDeviceGetCurrentClocksEventReasons")
    return _next(handle.throttle_reasons)


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Gpu) -> int:
    _check(handle, "nvmlDeviceGetCurrentClocksThrottleReasons")
    return _next(handle.throttle_reasons)


def nvmlDeviceGetTotalEccErrors(handle: Gpu, errorType: int, counterType: int) -> int:
    _check(handle, "nvmlDeviceGetTotalEccErrors")
    return 3 if errorType == NVML_MEMORY_ERROR_TYPE_CORRECTED else 0


def nvmlDeviceGetRemappedRows(device: Gpu) -> tuple[int, int, int, int]:
    _check(device, "nvmlDeviceGetRemappedRows")
    return 1, 2, 1, 0


def _only(is_wanted: Callable[[Gpu], bool]) -> Gpu:
    found = [gpu for gpu in GPUS if is_wanted(gpu)]
    if not found:
        raise NVMLError_NotFound("Not Found")
    return found[0]


def _check(handle: Gpu, function: str) -> None:
    if handle.parent is not None:
        raise NVMLError_NotSupported("Not Supported")
    error = handle.fails.get(function) or handle.fails.get("*")
    if error is not None:
        raise error("stand-in")
    handle.reads += 1


def _next(values: list[int]) -> int:
    return values.pop(0) if len(values) > 1 else values[0]
