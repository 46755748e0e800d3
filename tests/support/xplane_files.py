"""XPlane profiles, for tests: messages by the numbers of the published xplane.proto (openxla/xla).

Neither XProf nor TensorFlow's writer is used: both need the device whose profile they write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = int | str | bytes


@dataclass(frozen=True)
class Event:
    """An event, times in ns."""

    name: str
    start_ns: float
    dur_ns: float
    stats: dict[str, int | str] = field(default_factory=dict)


Lines: TypeAlias = dict[str, Sequence[Event]]
BASE_NS = 1_700_000_000_000_000_000


def message(*fields: tuple[int, Value]) -> bytes:
    """A message of the protobuf wire format: integers as varints, texts and messages with their length."""
    encoded = b""
    for number, value in fields:
        if isinstance(value, int):
            encoded += _varint(number << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            encoded += _varint(number << 3 | 2) + _varint(len(content)) + content
    return encoded


def plane(name: str, lines: Lines) -> bytes:
    """An XPlane; lines have the ids 1, 2, …"""
    names: dict[str, int] = {}
    stat_names: dict[str, int] = {}
    encoded_lines = []
    for number, (line_name, events) in enumerate(lines.items(), start=1):
        encoded = [(4, _event(event, names, stat_names)) for event in events]
        encoded_lines.append((3, message((1, number), (2, line_name), (3, BASE_NS), *encoded)))
    maps = [
        (number, message((1, key), (2, message((1, key), (2, text)))))
        for number, texts in ((4, names), (5, stat_names))
        for text, key in texts.items()
    ]
    return message((2, name), *encoded_lines, *maps)


def space(*planes: bytes) -> bytes:
    """An XSpace."""
    return message(*((1, content) for content in planes), (4, "host"))


def _event(event: Event, names: dict[str, int], stat_names: dict[str, int]) -> bytes:
    stats = []
    for name, value in event.stats.items():
        key = stat_names.setdefault(name, len(stat_names) + 1)
        stats.append((4, message((1, key), (5 if isinstance(value, str) else 3, value))))
    name_id = names.setdefault(event.name, len(names) + 1)
    return message((1, name_id), (2, round(event.start_ns * 1000)), (3, round(event.dur_ns * 1000)), *stats)


def _varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded, value = encoded + bytes([value & 0x7F | 0x80]), value >> 7
    return encoded + bytes([value])


def gpu(steps: int = 3) -> bytes:
    """A GPU: each step of 10 ms launches a product of 4 ms, an all-reduce of 3 ms on another stream, and a copy."""
    compute, communication, calls, marks = [], [], [], []
    for step in range(steps):
        start, correlation = step * 10_000_000, 10 * step
        marks.append(Event("train", start, 9_900_000, {"step_num": step}))
        for place in range(3):
            stats: dict[str, int | str] = {"correlation_id": correlation + place + 1}
            calls.append(Event("cuLaunchKernel", start + 100_000 * (place + 1), 5_000, stats))
        compute.append(Event("gemm_fusion_dot_3", start + 500_000, 4_000_000, {"correlation_id": correlation + 1}))
        details: dict[str, int | str] = {"correlation_id": correlation + 2, "memcpy_details": "kind_src:host size:4096"}
        compute.append(Event("MemcpyH2D", start + 4_600_000, 100_000, details))
        reduce = Event("ncclDevKernel_AllReduce_Sum", start + 4_500_000, 3_000_000, {"correlation_id": correlation + 3})
        communication.append(reduce)
    device: Lines = {
        "Stream #13(Compute,MemcpyH2D)": compute,
        "Stream #20(Compute)": communication,
        "XLA Modules": marks,
    }
    return space(
        plane("/host:CPU", {"python": [*marks, *calls]}), plane("/device:GPU:0", device), plane("#Metadata", {})
    )


def tpu(steps: int = 3, devices: int = 2) -> bytes:
    """TPUs: each step of 10 ms has two fusions of 3 ms and waits 2 ms for an all-reduce that began before them."""
    planes = []
    for device in range(devices):
        ops, beside, marks = [], [], []
        for step in range(steps):
            start = step * 10_000_000 + 1_000 * device
            marks.append(Event(str(step + 5), start, 10_000_000))
            ops.append(Event("%all-reduce-start.1", start, 10_000))
            ops += [Event(f"fusion.{n}", start + 10_000 + n * 3_000_000, 3_000_000) for n in (0, 1)]
            ops.append(Event("%all-reduce-done.1", start + 6_010_000, 2_000_000))
            beside.append(Event("copy-start.2", start + 1_000_000, 500_000))
        lines: Lines = {"Steps": marks, "XLA Modules": marks, "XLA Ops": ops, "Async XLA Ops": beside}
        planes.append(plane(f"/device:TPU:{device}", lines))
    return space(*planes, plane("/device:CUSTOM:Megascale Trace", {}))
