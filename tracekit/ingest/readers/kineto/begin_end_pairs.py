"""Slices written as two events, one where they begin and one where they end."""

from typing import Any

from tracekit.ingest.readers.kineto import events, numbers
from tracekit.ingest.readers.kineto.events import Event


def slices(found: list[Any]) -> tuple[list[Event], int]:
    """Return slices made of begin and end events, innermost first on each thread, and the number left without a mate.

    An end ends the last begun slice of its name, or of any name where it gives none.
    """
    open_slices: dict[tuple[Any, Any], list[Any]] = {}
    made: list[Event] = []
    unmatched = 0
    clock = numbers.Clock()
    for event in found:
        stack = open_slices.setdefault((str(event.pid), str(event.tid)), [])
        if type(event) in events.BEGINS:
            stack.append(event)
            continue
        at = next((i for i in reversed(range(len(stack))) if event.name in (None, stack[i].name)), None)
        if at is None:
            unmatched += 1
            continue
        unmatched += len(stack) - at - 1
        begin = stack[at]
        del stack[at:]
        start_ns, end_ns = (clock.one(e.ts) for e in (begin, event))
        dur = None if start_ns is None or end_ns is None else _us(end_ns - start_ns)
        ts = None if start_ns is None else _us(start_ns)
        made.append(events.Slice(begin.cat, begin.name, begin.pid, begin.tid, ts, dur, begin.args or event.args))
    return made, unmatched + sum(map(len, open_slices.values()))


def _us(ns: int) -> str:
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"
