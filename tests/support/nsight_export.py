"""Writes the events of Kineto traces as `nsys export` would: into tables that Nsight Systems itself declared.

`tests/recordings/nsight/schema_*.sql` are the declarations of real exports (`--lazy=false`). The events are read by the
standard library's JSON parser, not by tracekit. What Nsight Systems records of PyTorch's operators are NVTX ranges with
names as emit_nvtx writes them.
"""

import gzip
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[1] / "recordings" / "nsight"
HOST = 1 << 56
START_NS = 1_700_000_000_000_000_000
_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
_KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2, "Unknown": 7}
_SYNCS = {"Event Sync": 1, "Stream Wait Event": 2, "Stream Sync": 3, "Context Sync": 4}
PUSH_POP = 59


@dataclass
class Export:
    """An export that is being written."""

    path: Path
    version: str
    connection: sqlite3.Connection = field(init=False)
    texts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connection = sqlite3.connect(self.path)
        self.connection.executescript((SCHEMAS / f"schema_{self.version}.sql").read_text())
        self.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=START_NS, utcTime="", localTime="")

    def close(self) -> None:
        """Write the texts, and close the file."""
        self.connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, t) for t, i in self.texts.items()])
        self.connection.commit()
        self.connection.close()

    def text(self, of: str) -> int:
        """Return the id of a text."""
        return self.texts.setdefault(of, len(self.texts) + 1)

    def insert(self, table: str, **values: Any) -> None:
        """Insert a row; columns that the version lacks are left out, others are 0 where they may not be null."""
        info = self.connection.execute(f'PRAGMA table_info("{table}")').fetchall()
        row = [values.get(name, 0 if not_null else None) for _, name, _, not_null, *_ in info]
        marks = ", ".join("?" * len(row))
        self.connection.execute(f'INSERT INTO "{table}" VALUES ({marks})', row)


def add_process(export: Export, events: list[Mapping[str, Any]], pid: int, base: Decimal) -> None:
    """Insert the events of one process; `base` is the time in µs at which the report begins."""
    streams: dict[int, list[int]] = {}
    for event in events:
        if event.get("ph") == "X":
            _add(export, event, event.get("args") or {}, HOST | pid << 24, base, streams)


def of_kineto(export: Export, path: Path, pid: int) -> list[Mapping[str, Any]]:
    """Insert the events of a trace file as those of process `pid`, and return them."""
    document = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    events = document["traceEvents"]
    add_process(export, events, pid, base_of(events))
    for device in document.get("deviceProperties", []):
        export.insert(
            "TARGET_INFO_GPU", id=device["id"], name=device["name"], totalMemory=device["totalGlobalMem"],
            smCount=device["numSms"], computeMajor=device["computeMajor"], computeMinor=device["computeMinor"],
        )  # fmt: skip
    return events


def base_of(events: list[Mapping[str, Any]]) -> Decimal:
    """Return the whole millisecond before the first slice, in µs."""
    return Decimal(int(min(event["ts"] for event in events if event.get("ph") == "X")) // 1000 * 1000)


def _add(export: Export, event: Any, args: Any, process: int, base: Decimal, streams: dict[int, list[int]]) -> None:
    start = int((Decimal(event["ts"]) - base) * 1000)
    end = start + int(Decimal(event.get("dur", 0)) * 1000)
    when = {"start": start, "end": end}
    kind, name = event.get("cat"), str(event["name"])
    on_device = when | {
        "deviceId": args.get("device"), "contextId": 1, "streamId": args.get("stream"), "globalPid": process,
        "correlationId": args.get("correlation"),
    }  # fmt: skip
    thread = process | int(event["tid"]) & (1 << 24) - 1 if str(event["tid"]).isdecimal() else process
    if kind in ("cpu_op", "user_annotation"):
        shown = _emitted(name, args) if kind == "cpu_op" else name
        export.insert("NVTX_EVENTS", **when, eventType=PUSH_POP, textId=export.text(shown), globalTid=thread)
    elif kind in ("cuda_runtime", "cuda_driver"):
        of = {"globalTid": thread, "correlationId": args["correlation"], "nameId": export.text(f"{name}_v7000")}
        export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", **when, **of)
    elif kind == "kernel":
        sizes = dict(
            zip(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), args["grid"] + args["block"], strict=True)
        )
        export.insert("CUPTI_ACTIVITY_KIND_KERNEL", **on_device, **sizes, demangledName=export.text(name))
    elif kind == "gpu_memcpy":
        way, places = name.removeprefix("Memcpy ").split(" ", 1)
        source, target = places.strip("()").split(" -> ")
        ends = {"copyKind": _COPIES[way], "srcKind": _KINDS[source], "dstKind": _KINDS[target]}
        export.insert("CUPTI_ACTIVITY_KIND_MEMCPY", **on_device, **ends, bytes=args["bytes"])
    elif kind == "gpu_memset":
        export.insert(
            "CUPTI_ACTIVITY_KIND_MEMSET", **on_device, bytes=args["bytes"], memKind=2 if "Device" in name else 7
        )
    elif kind == "cuda_sync" and name in _SYNCS:
        export.insert(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **on_device,
            syncType=_SYNCS[name],
            eventId=_event(export, args, process),
        )


def _event(export: Export, args: Any, process: int) -> int:
    """Insert the record that a wait waits for as that of an event of its own, and return the event's id."""
    record = args.get("wait_on_cuda_event_record_corr_id", -1)
    if record is None or record < 0:
        return 0
    of = {"streamId": args["wait_on_stream"], "correlationId": record, "eventId": record, "globalPid": process}
    export.insert("CUPTI_ACTIVITY_KIND_CUDA_EVENT", **of, deviceId=args.get("device"), contextId=1)
    return int(record)


def _emitted(name: str, args: Any) -> str:
    """Return the name of an operator's range, as PyTorch's emit_nvtx(record_shapes=True) writes it."""
    sequence = args.get("Sequence number")
    shown = name if sequence is None else f"{name}, seq = {sequence}"
    shown += f", op_id = {args.get('Record function id') or 1}"
    dims = args.get("Input Dims")
    return f"{shown}, sizes = {json.dumps(dims)}" if dims else shown
