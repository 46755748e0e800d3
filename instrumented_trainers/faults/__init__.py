"""Faults on demand: each is real, so that its detection in a trace can be tested against the truth.

No fault touches what the training computes: losses are the same with and without it. Nothing here writes spans or
numbers into a recording; `run.json` lists the requested ones under ``faults``.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from instrumented_trainers.faults.fault import Fault
from instrumented_trainers.faults.regressions import MoreCommunication, MoreCompute, MoreMemory
from instrumented_trainers.faults.save import GilSave, SlowDisk, SlowFsync, SmallTensors
from instrumented_trainers.faults.stage import SlowStage
from instrumented_trainers.faults.step import Churn, HostSync, LateLaunch, NoPrefetch, SlowData, SlowRank

__all__ = ["FAULTS", "OF_PIPELINES", "REGRESSIONS", "Fault", "explained", "parse", "truth"]

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

REGRESSIONS: Mapping[str, type[Fault]] = MappingProxyType(
    {fault.name: fault for fault in (MoreCompute, MoreCommunication, MoreMemory)}
)
"""Found only by comparison with an earlier recording."""

OF_PIPELINES: Mapping[str, type[Fault]] = MappingProxyType({fault.name: fault for fault in (SlowStage,)})
"""Possible only where there are stages."""

_ALL = {**FAULTS, **OF_PIPELINES, **REGRESSIONS}


def parse(text: str) -> Fault:
    """Parse ``NAME[=ARGS]``. Raises ValueError, which lists all faults, if it is invalid."""
    name, _, arguments = text.partition("=")
    if name not in _ALL:
        near = difflib.get_close_matches(name, _ALL, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{name!r} is not a fault; {guess}Known: {', '.join(_ALL)}")
    try:
        return _ALL[name].parse(arguments)
    except ValueError as error:
        raise ValueError(f"{text}: {error}; usage: {_ALL[name].usage}") from error


def overview() -> str:
    """Return a line for each fault: its usage, and what it does."""
    return "\n".join(f"{fault.usage}. {_first_sentence(fault)}" for fault in _ALL.values())


def truth(fault: Fault) -> dict[str, Any]:
    """Entry of a fault in `run.json`."""
    arguments = asdict(fault)  # type: ignore[call-overload]
    return {"name": fault.name, "args": arguments, "seen_by": list(fault.seen_by)}


def _first_sentence(fault: type[Fault]) -> str:
    assert fault.__doc__
    return " ".join(fault.__doc__.partition("\n\n")[0].split())
