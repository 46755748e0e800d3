"""Changes of recorded runs, drawn from a random generator: values of a key in many events, missing events and ranks."""

import copy
import functools
import gzip
import json
import math
import pickle
from random import Random
from typing import Any, TypeAlias

from tests.fuzz import mutations
from tests.support.cli_runner import ROOT

FOLDERS = (
    "sample_traces/demo-fsdp2", "sample_traces/demo-yafsdp", "sample_traces/faults/churn",
    "sample_traces/faults/dataloader", "sample_traces/faults/gil-save", "sample_traces/faults/healthy-ddp",
    "sample_traces/faults/host-sync", "sample_traces/faults/no-prefetch", "sample_traces/faults/slow-rank",
    "sample_traces/faults/small-tensors", "sample_traces/gpu/compiled", "sample_traces/gpu/cuda-graphs",
    "sample_traces/gpu/slow-rank", "sample_traces/parallelism/cp-ring", "sample_traces/parallelism/moe-ep2",
    "sample_traces/parallelism/pipeline-1f1b", "tests/recordings/deepspeed_pipeline", "tests/recordings/dtensor_tp",
    "tests/recordings/dtensor_tp_fsdp2", "tests/recordings/foreign", "tests/recordings/megatron_interleaved",
    "tests/recordings/megatron_tp2_pp2", "tests/recordings/torchtitan_1f1b_tp2",
    "tests/recordings/torchtitan_interleaved",
)  # fmt: skip
"""Recordings of different strategies, devices and faults."""
MOST_SLICES = 2500
"""Of a trace; of larger ones the slices around the middle are taken, so that a command takes about a second."""

Event: TypeAlias = dict[str, Any]
Place: TypeAlias = tuple[Event, str]
"""An event, or its arguments, and a key in it."""
_NUMBERS = (0, 1, -1, 1 << 31, 1 << 40, 1 << 53)
_TEXTS = ("", "0", "[0, 1]", "[1]", "[3, 2, 1, 0]", "x" * 300)
_SHARES = (0.0, 0.02, 0.3, 1.0)
_FACTORS = (1000, 0.001, 2, 1e6, 1e-6, -1)
_SHIFTS_US = (1e3, 1e6, 1e9, -1e6, 1e15, 0.5)


def changed(random: Random) -> dict[str, bytes]:
    """Return the files of a recorded run, a few of which are changed, missing, or stand for another rank."""
    files = pickle.loads(_recorded(random.choice(FOLDERS)))
    traces = [name for name, content in files.items() if _is_trace(content)]
    if len(traces) > 1 and random.random() < 0.15:
        del files[traces.pop(random.randrange(len(traces)))]
    if len(traces) > 1 and random.random() < 0.1:
        first, second = random.sample(traces, 2)
        both = files[first], files[second]
        files[first], files[second] = random.choice(((both[0], copy.deepcopy(both[0])), both[::-1]))
    for name, content in files.items():
        if name in traces and random.random() < 0.6:
            files[name] = _changed_trace(content, random)
        elif not isinstance(content, bytes) and name not in traces and random.random() < 0.2:
            files[name] = mutations.value(content, random)
    return {
        name: content if isinstance(content, bytes) else json.dumps(content).encode("utf-8", "surrogatepass")
        for name, content in files.items()
    }


@functools.cache
def _recorded(folder: str) -> bytes:
    """Return, pickled, the files of a folder by name: JSON as a document, all others as bytes.

    Documents in memory would slow down the garbage collections of the commands that are measured.
    """
    files: dict[str, Any] = {}
    for path in sorted(path for path in (ROOT / folder).iterdir() if path.is_file()):
        data = path.read_bytes()
        text = gzip.decompress(data) if path.name.endswith(".json.gz") else data
        name = path.name.removesuffix(".gz") if text is not data else path.name
        files[name] = json.loads(text) if name.endswith(".json") else data
    traces = [content for content in files.values() if _is_trace(content)]
    middles = [_middle(trace["traceEvents"]) for trace in traces]
    for trace, own in zip(traces, middles, strict=True):
        begin_us, end_us = middles[0] if _overlap(own, middles[0]) else own
        trace["traceEvents"] = [event for event in trace["traceEvents"] if _is_within(event, begin_us, end_us)]
    return pickle.dumps(files)


def _middle(events: list[Event]) -> tuple[float, float]:
    """Return the times, in µs, between which MOST_SLICES slices around the middle of a trace begin."""
    starts = sorted(float(event["ts"]) for event in events if event.get("ph") == "X")
    if len(starts) <= MOST_SLICES:
        return -math.inf, math.inf
    first = (len(starts) - MOST_SLICES) // 2
    return starts[first], starts[first + MOST_SLICES]


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _is_within(event: Event, begin_us: float, end_us: float) -> bool:
    """Return whether an event overlaps a range of time; one without a time does."""
    start_us = float(event.get("ts", begin_us))
    return event.get("ph") == "M" or (start_us < end_us and start_us + float(event.get("dur", 0)) >= begin_us)


def _is_trace(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("traceEvents"), list)


def _changed_trace(trace: dict[str, Any], random: Random) -> dict[str, Any]:
    events: list[Event] = trace["traceEvents"]
    for _ in range(random.choice((1, 1, 2, 4))):
        if events:
            change = (
                _values if random.random() < 0.6 else random.choice((_without_a_kind, _cut, _thinned, _twice, _shifted))
            )
            events = change(events, random)
    header = {name: value for name, value in trace.items() if name != "traceEvents"}
    if header and random.random() < 0.25:
        header = mutations.value(header, random)
    return {**header, "traceEvents": events}


def _values(events: list[Event], random: Random) -> list[Event]:
    """Change the value of one key in one event or many: of all categories, or of one."""
    chosen = random.choice(events)
    keys = [(None, key) for key in chosen if key != "args"] + [("args", key) for key in chosen.get("args") or ()]
    holder, key = random.choice(keys)
    is_of_category = random.random() < 0.5
    places: list[Place] = []
    for event in events:
        holding = event if holder is None else event.get(holder)
        is_chosen = not is_of_category or event.get("cat") == chosen.get("cat")
        if is_chosen and isinstance(holding, dict) and key in holding:
            places.append((holding, key))
    if not places:  # of a category that is NaN
        return events
    share = random.choice(_SHARES)
    places = [place for place in places if random.random() < share] or [random.choice(places)]
    random.choice((_any_values, _one_value, _shuffled, _scaled, _removed, _digits))(places, random)
    return events


def _any_values(places: list[Place], random: Random) -> None:
    for holding, key in places:
        holding[key] = copy.deepcopy(random.choice(mutations.VALUES))


def _one_value(places: list[Place], random: Random) -> None:
    value = random.choice((*mutations.VALUES, *_NUMBERS, *_TEXTS))
    for holding, key in places:
        holding[key] = copy.deepcopy(value)


def _shuffled(places: list[Place], random: Random) -> None:
    values = [holding[key] for holding, key in places]
    random.shuffle(values)
    for (holding, key), value in zip(places, values, strict=True):
        holding[key] = value


def _scaled(places: list[Place], random: Random) -> None:
    factor = random.choice(_FACTORS)
    for holding, key in places:
        value = holding[key]
        holding[key] = value * factor if type(value) in (int, float) else str(value) * 2


def _removed(places: list[Place], random: Random) -> None:
    for holding, key in places:
        del holding[key]


def _digits(places: list[Place], random: Random) -> None:
    for holding, key in places:
        value = holding[key]
        if isinstance(value, str) and any(map(str.isdecimal, value)):
            holding[key] = mutations.digits(value, random)


def _without_a_kind(events: list[Event], random: Random) -> list[Event]:
    chosen, key = random.choice(events), random.choice(("cat", "name", "tid", "ph"))
    return [event for event in events if event.get(key) != chosen.get(key)]


def _cut(events: list[Event], random: Random) -> list[Event]:
    """Remove what starts before, or after, a moment."""
    times = [event["ts"] for event in events if type(event.get("ts")) in (int, float)]
    if not times:
        return events
    at_us, keeps_later = random.choice(times), random.random() < 0.5
    return [
        event
        for event in events
        if event.get("ph") == "M" or type(event.get("ts")) not in (int, float) or (event["ts"] >= at_us) is keeps_later
    ]


def _thinned(events: list[Event], random: Random) -> list[Event]:
    share = random.random() / 2
    return [event for event in events if random.random() >= share]


def _twice(events: list[Event], random: Random) -> list[Event]:
    name = random.choice(events).get("name")
    return [*events, *(copy.deepcopy(event) for event in events if event.get("name") == name)]


def _shifted(events: list[Event], random: Random) -> list[Event]:
    """Shift the clock of a rank."""
    shift_us = random.choice(_SHIFTS_US)
    for event in events:
        if event.get("ph") != "M" and type(event.get("ts")) in (int, float):
            event["ts"] += shift_us
    return events
