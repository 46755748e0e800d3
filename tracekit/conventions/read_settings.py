"""What a user states about a run that its files do not, or wrongly: devices, and which span is a step."""

from dataclasses import dataclass

from tracekit.conventions.devices import DeviceOverride


@dataclass(frozen=True)
class ReadSettings:
    """How a user wants a run to be read."""

    devices: tuple[DeviceOverride, ...] = ()
    """Peaks and bandwidths that replace those of the table of devices."""
    step_name: str | None = None
    """The name of a span, each occurrence of which is a step; None: as the profiler marks steps."""


NO_SETTINGS = ReadSettings()
