"""Clocks, power, temperature, throttle reasons and memory errors of a rank's GPU, sampled by a background thread."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from tracekit.capture import notices
from tracekit.capture.management_libraries import AmdSmi, Nvml
from tracekit.capture.rank_info import DeviceIdentity, this_device
from tracekit.conventions import device_metrics

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
    """Return the counters of a GPU. Raises what the vendor's library raises where they cannot be read."""
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
        """Return the counters over the samples since the last call, under `device_metrics.NAMES`.

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
        """Return the counters now, None where one cannot be read. Raises the error of a GPU that no longer answers."""
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
        self._judge(sample, errors)
        return sample

    def _judge(self, sample: Values, errors: Mapping[str, Exception]) -> None:
        self._failed = 0 if sample else self._failed + 1
        if self._failed == _MAX_FAILED:
            raise next(iter(errors.values()), RuntimeError("this GPU has no counters"))
        if errors and self._is_first:
            self.incomplete = list(errors), next(iter(errors.values()))
        self._is_first = False


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
        """Return the values by `device_metrics.NAMES`."""
        values = dict(NOTHING)
        for name, (count, total, low, high) in self._averaged.items():
            values[name] = round(total / count, _PRECISION)
            values[device_metrics.least(name)] = low
            values[device_metrics.most(name)] = high
        values |= self._latest
        values[device_metrics.THROTTLE_REASONS] = self._reasons
        values[device_metrics.SAMPLES] = self.count
        return values
