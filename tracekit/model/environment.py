"""Software and devices that a trace's header states."""

import json
import re
from collections.abc import Mapping
from typing import Any

import polars as pl

from tracekit.model.fact import trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace

VERSION_COLUMNS = {"name": pl.String, "value": pl.String}
_RANK_COUNT = re.compile(r"[0-9]{1,7}\Z")
_VERSION = re.compile(r"(^|_)version$")
_DISTRIBUTED = ("nccl_version", "backend", "world_size")
RECORDS_ANY_PROGRAM = "tracekit.records_any_program"
"""The key of headers of profilers that record any program, with PyTorch or without (Nsight Systems, rocprofv3)."""
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


@trace_fact
def versions(trace: Trace) -> pl.DataFrame:
    """Return the versions of software and device in the trace's header: each must be the same on all ranks.

    Columns name, value; one row per fact, such as cuda_driver_version, nccl_version, device.
    """
    rows = list(environment(trace.header).items())
    return pl.DataFrame(rows, schema=VERSION_COLUMNS, orient="row")


def stated_rank_count(run: Run) -> int | None:
    """Number of ranks of a job by its manifest, else by the headers of its traces; None where neither states it."""
    if stated := Manifest.of(run.manifest).world_size:
        return stated
    sizes = run.table(versions).filter(pl.col("name") == "world_size")["value"].to_list()
    return max((int(size) for size in sizes if _RANK_COUNT.match(size)), default=None)


def device_names(header: Mapping[str, Any]) -> str | None:
    """Return the distinct names of the devices that a header lists, separated by commas; None if it lists none."""
    names = {str(device["name"]) for device in devices(header) if device.get("name")}
    return ", ".join(sorted(names)) or None


def devices(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the properties of each device that a header lists; their values may have any type."""
    listed = header.get("deviceProperties")
    return [device for device in listed if isinstance(device, Mapping)] if isinstance(listed, list) else []


def device_numbers(header: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return one property of the devices of a header, such as totalGlobalMem, by id: only positive int64 numbers."""
    by_device = {}
    for device in devices(header):
        number, value = device.get("id"), device.get(name)
        if type(number) is int and type(value) is int and 0 <= number < 1 << 31 and 0 < value < 1 << 63:
            by_device[number] = value
    return by_device
