"""What a settings file says to the dashboard: the devices that replace those of tracekit's table."""

import functools

from tracekit.cli import settings_file
from tracekit.conventions.devices import DeviceOverride


@functools.cache
def devices() -> tuple[DeviceOverride, ...]:
    """Return the devices of the settings file nearest to the folder in which the dashboard was started.

    Read once, since results are cached with them. Raises ConfigError where they cannot be used.
    """
    return settings_file.nearest_devices()
