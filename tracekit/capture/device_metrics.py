"""Clocks, power, temperature, throttle reasons and memory errors of a rank's GPU, sampled by a background thread."""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from tracekit.capture import notices
from tracekit.capture.rank_info import DeviceIdentity, this_device
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
        """Handle of a GPU; of a MIG instance that of the GPU it is a part of.

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
    """Number; None for AMD SMI's "N/A"."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _watts(value: object) -> float | None:
    """Limit in watts, which versions of AMD SMI give in watts or microwatts."""
    number = _number(value)
    return number if number is None or number < 1e5 else number / 1e6


SAMPLE_EVERY_S = 1.0  # throttling lasts for seconds; each sample takes the interpreter lock some times
_MAX_CPU_RATIO = 0.01  # of one core: where reads take long, they are made less often
_MAX_AGE = 3  # sampling periods for which a sample is valid
_MAX_FAILED = 3  # samples in a row without any value
_JOIN_S = 1.0  # a read that hangs must not delay the end of the training
_PRECISION = 3

Values: TypeAlias = Mapping[str, float | None]
NOTHING: Values = dict.fromkeys(device_metrics.NAMES)


class Counters(Protocol):
    """The counters of one GPU, by its vendor's library."""

    counters: Mapping[str, Callable[[], float | None]]

    def is_absent(self, error: Exception) -> bool:
        """Return whether a counter that raised this error does not exist on this GPU."""

    def close(self) -> None:
        """End the use of the library."""


def open_counters(device: DeviceIdentity) -> Counters:
    """Counters of a GPU. Raises what the vendor's library raises where they cannot be read."""
    return AmdSmi(device) if device.is_amd else Nvml(device)


class DeviceMetrics:
    """Samples the counters of the GPU on which this process trains, from the first `take` to `close`.

    A thread reads them every `every_s`, less often where that takes much CPU time. Nothing here raises: without a
    library, a driver or a permission, or once the GPU is lost, a line on stderr states it, and the values are None.
    """

    def __init__(
        self, rank: int, *, device: Callable[[], DeviceIdentity] = this_device, every_s: float = SAMPLE_EVERY_S
    ) -> None:
        self._rank = rank
        self._device = device
        self._every_s = every_s
        self._has_begun = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._samples = _Samples()
        self._latest: Values = NOTHING
        self._latest_s = 0.0

    def take(self) -> Values:
        """Counters over the samples since the last call, under `NAMES`.

        The first call begins to sample, and returns None values. Without a sample since the last call they are those of
        the latest one, if that is recent, else None.
        """
        if not self._has_begun:
            self._begin()
            return NOTHING
        with self._lock:
            samples = self._samples
            if samples.count:
                self._samples = _Samples()
        if samples.count:
            return samples.values()
        is_recent = time.monotonic() - self._latest_s <= _MAX_AGE * self._every_s
        return self._latest if is_recent else NOTHING

    def close(self) -> None:
        """End the sampling."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _begin(self) -> None:
        self._has_begun = True
        try:
            device = self._device()  # here: each thread has a current device of its own
            self._thread = threading.Thread(
                target=self._run, args=(device,), name="tracekit-device-metrics", daemon=True
            )
            self._thread.start()
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            self._report("device metrics are not recorded", error)

    def _run(self, device: DeviceIdentity) -> None:
        try:
            opened = open_counters(device)
        except Exception as error:  # noqa: BLE001
            self._report("device metrics are not recorded", error)
            return
        try:
            self._sample_until_ended(opened)
        except Exception as error:  # noqa: BLE001
            self._report("device metrics are no longer recorded", error)
        finally:
            opened.close()

    def _sample_until_ended(self, opened: Counters) -> None:
        reader = _Reader(opened)
        cpu_s = time.thread_time()
        while True:
            sample = reader.sample()
            if reader.incomplete is not None:
                names, error = reader.incomplete
                self._report(f"device metrics lack {', '.join(names)}", error)
                reader.incomplete = None
            self._add(sample)
            before_s, cpu_s = cpu_s, time.thread_time()
            if self._ended.wait(max(self._every_s, (cpu_s - before_s) / _MAX_CPU_RATIO)):
                return

    def _add(self, sample: Values) -> None:
        latest = _Samples()
        latest.add(sample)
        values = {**latest.values(), device_metrics.SAMPLES: 0}
        with self._lock:
            self._samples.add(sample)
            self._latest, self._latest_s = values, time.monotonic()

    def _report(self, consequence: str, error: Exception) -> None:
        notices.report_failure(f"rank {self._rank}: {consequence}", error)


class _Reader:
    """Reads the counters that a GPU has. `incomplete`: those that the first sample lacks, and why."""

    def __init__(self, opened: Counters) -> None:
        self._opened = opened
        self._counters = dict(opened.counters)
        self._failed = 0
        self._is_first = True
        self.incomplete: tuple[list[str], Exception] | None = None

    def sample(self) -> Values:
        """Counters now, None where one cannot be read. Raises the error of a GPU that no longer answers."""
        sample: dict[str, float | None] = {}
        errors: dict[str, Exception] = {}
        for name, counter in list(self._counters.items()):
            try:
                sample[name] = counter()
            except Exception as error:  # noqa: BLE001 the libraries have errors of their own
                if self._opened.is_absent(error):
                    del self._counters[name]
                else:
                    errors[name] = error
        self._failed = 0 if sample else self._failed + 1
        if self._failed == _MAX_FAILED:
            raise next(iter(errors.values()), RuntimeError("this GPU has no counters"))
        if errors and self._is_first:
            self.incomplete = list(errors), next(iter(errors.values()))
        self._is_first = False
        return sample


class _Samples:
    """The samples of a step, as much of them as its line of metrics has."""

    def __init__(self) -> None:
        self.count = 0
        self._averaged: dict[str, list[float]] = {}  # count, sum, smallest, largest
        self._latest: dict[str, float | None] = {}
        self._reasons: int | None = None

    def add(self, sample: Values) -> None:
        """Add a sample."""
        self.count += 1
        for name in device_metrics.AVERAGED:
            value = sample.get(name)
            if value is not None:
                count, total, low, high = self._averaged.get(name, (0, 0.0, value, value))
                self._averaged[name] = [count + 1, total + value, min(low, value), max(high, value)]
        self._latest |= {name: sample.get(name) for name in device_metrics.LATEST}
        reasons = sample.get(device_metrics.THROTTLE_REASONS)
        if reasons is not None:
            self._reasons = (self._reasons or 0) | int(reasons)

    def values(self) -> dict[str, float | None]:
        """Values by `NAMES`."""
        values = dict(NOTHING)
        for name, (count, total, low, high) in self._averaged.items():
            values[name] = round(total / count, _PRECISION)
            values[device_metrics.least(name)] = low
            values[device_metrics.most(name)] = high
        values |= self._latest
        values[device_metrics.THROTTLE_REASONS] = self._reasons
        values[device_metrics.SAMPLES] = self.count
        return values
