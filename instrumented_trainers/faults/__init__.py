"""Troubles on demand: each is made for real, so that what finds it in a trace can be tested against the truth.

No fault touches what the training computes: losses are the same with and without it. Nothing here writes spans or
numbers into a recording; `run.json` says under ``faults`` which were asked for.
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from instrumented_trainers.faults.fault import Fault
from instrumented_trainers.faults.save import GilSave, SlowDisk, SlowFsync, SmallTensors
from instrumented_trainers.faults.step import Churn, HostSync, LateLaunch, NoPrefetch, SlowData, SlowRank

__all__ = ["FAULTS", "Fault", "parse", "truth"]

FAULTS: Mapping[str, type[Fault]] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            SlowRank,
            LateLaunch,
            NoPrefetch,
            Churn,
            SlowDisk,
            SlowFsync,
            SmallTensors,
            GilSave,
            HostSync,
            SlowData,
        )
    }
)


def parse(text: str) -> Fault:
    """Return the fault that ``NAME[=ARGS]`` asks for. Raises ValueError, naming what there is, if it makes no sense."""
    name, _, arguments = text.partition("=")
    if name not in FAULTS:
        raise ValueError(f"{name!r} is no fault; one of: {', '.join(FAULTS)}")
    try:
        return FAULTS[name].parse(arguments)
    except ValueError as error:
        raise ValueError(f"{text}: {error}; it is asked for as {FAULTS[name].usage}") from error


def truth(fault: Fault) -> dict[str, Any]:
    """Return what `run.json` says of a fault."""
    arguments = asdict(fault)  # type: ignore[call-overload]
    return {"name": fault.name, "args": arguments, "seen_by": list(fault.seen_by)}
