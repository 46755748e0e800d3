"""Software and devices that a trace's header states."""

import json
import re
from collections.abc import Mapping
from typing import Any

_VERSION = re.compile(r"(^|_)version$")
_DISTRIBUTED = ("nccl_version", "backend", "world_size")
DEVICE = "device"
DEVICE_OVERRIDES = "tracekit.devices"
"""The key of a header with what the user states of devices: `conventions.devices.DeviceOverride` of each."""


def environment(header: Mapping[str, Any]) -> dict[str, str]:
    """Return versions of software, backend and size of the job, and the device names in a header, by name.

    >>> environment({"schemaVersion": 1, "cuda_driver_version": 12080, "deviceProperties": [{"name": "H100"}] * 8})
    {'cuda_driver_version': '12080', 'device': 'H100'}
    """
    facts = {name: value for name, value in header.items() if _VERSION.search(name)}
    info = header.get("distributedInfo")
    if isinstance(info, Mapping):
        facts |= {name: info[name] for name in _DISTRIBUTED if info.get(name)}
    if devices := device_names(header):
        facts[DEVICE] = devices
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in sorted(facts.items())}


def device_names(header: Mapping[str, Any]) -> str | None:
    """Return the distinct names of the devices that a header lists, separated by commas; None if it lists none."""
    listed = header.get("deviceProperties")
    devices = listed if isinstance(listed, list) else []
    names = {str(device["name"]) for device in devices if isinstance(device, Mapping) and device.get("name")}
    return ", ".join(sorted(names)) or None
