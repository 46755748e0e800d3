"""What a settings file says to the dashboard: devices, and which span is a step."""

import functools

from tracekit.cli import settings_file
from tracekit.conventions.read_settings import ReadSettings


@functools.cache
def read_settings() -> ReadSettings:
    """How runs are read by the settings file nearest to the folder in which the dashboard was started.

    Read once, since results are cached with them. Raises ConfigError where they cannot be used.
    """
    return settings_file.nearest_read_settings()
