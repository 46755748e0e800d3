"""Memory snapshots made for tests, in the form that torch gives them; simulated ones say so in their frames."""

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from tracekit.replay.allocator.blocks import Block
from tracekit.replay.allocator.model import Allocator, OutOfMemory
from tracekit.replay.allocator.settings import Settings

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "memory_snapshots"
MIB = 1 << 20
SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}


def recorded(name: str) -> Path:
    """Return a snapshot that others recorded, or skip the test where the shared traces are absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared traces")
    return path


def frame(name: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": "simulated.py", "line": line}


def event(action: str, address: int, size: int, *, stream: int = 0, at_us: int = 0, frames: Any = ()) -> dict[str, Any]:
    fields = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": at_us}
    return fields | {"compile_context": "N/A", "user_metadata": "", "frames": list(frames)}


def segment(address: int, blocks: list[tuple[int, str]], **more: Any) -> dict[str, Any]:
    """Return a segment of blocks that lie end to end, each by size and state."""
    listed, at = [], address
    for size, state in blocks:
        listed.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": []})
        at += size
    state_bytes = {
        state: sum(size for size, kind in blocks if kind == state) for state in ("active_allocated", "inactive")
    }
    fields = {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "allocated_size": state_bytes["active_allocated"],
    }
    fields |= {
        "active_size": state_bytes["active_allocated"],
        "requested_size": state_bytes["active_allocated"],
        "stream": 0,
    }
    fields |= {
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": listed,
        "frames": [],
    }
    return fields | more


def document(segments: list[Any], *traces: list[Any], settings: Any = None, annotations: Any = ()) -> dict[str, Any]:
    fields = {"segments": segments, "device_traces": list(traces), "allocator_settings": settings or SETTINGS}
    return fields | {"external_annotations": list(annotations)}


def write(path: Path, snapshot: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return path


def as_libtorch(snapshot: Any) -> bytes:
    """Return a pickle as torch's C++ writes it: protocol 2, a list in one batch, remembered after it is whole."""
    memo: dict[Any, int] = {}

    def put(key: Any) -> bytes:
        memo[key] = len(memo)
        return b"q" + bytes([memo[key]]) if memo[key] < 256 else b"r" + struct.pack("<I", memo[key])

    def dump(value: Any) -> bytes:
        key = value if isinstance(value, str) else id(value)
        if isinstance(value, str | list | dict) and key in memo:
            return b"h" + bytes([memo[key]]) if memo[key] < 256 else b"j" + struct.pack("<I", memo[key])
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            small = -(1 << 31) <= value < 1 << 31
            return b"J" + struct.pack("<i", value) if small else b"\x8a\x08" + struct.pack("<q", value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode() + put(key)
        if isinstance(value, tuple):
            return b"(" + b"".join(map(dump, value)) + b"t"
        if isinstance(value, dict):
            return b"}(" + b"".join(dump(k) + dump(v) for k, v in value.items()) + b"u" + put(key)
        return b"](" + b"".join(map(dump, value)) + b"e" + put(key)

    return b"\x80\x02" + dump(snapshot) + b"."


class Simulation:
    """A simulated program on the model of the allocator, with the history that torch would have recorded of it.

    It shows that what reads and replays histories agrees with the model, not that the model is right.
    """

    def __init__(self, settings: Settings | None = None, **options: Any) -> None:
        self.allocator = Allocator(settings, **options)
        self.events: list[dict[str, Any]] = []
        self._seen = 0

    def malloc(self, size: int, *, stream: int = 0, pool: int = 0) -> Block:
        try:
            block = self.allocator.malloc(size, stream, pool)
        except OutOfMemory:
            self._catch_up("simulated malloc")
            self._record("oom", 0, self.allocator.settings.round_up(size), stream)
            del self.events[-1]["addr"]
            self.events[-1]["device_free"] = self.allocator.capacity_bytes - self.allocator.reserved_bytes
            raise
        self._catch_up("simulated malloc")
        self._record("alloc", block.address, size, stream)
        return block

    def free(self, block: Block, *, later: bool = False) -> None:
        """Free a block; `later` leaves its end to `complete`, as another stream's use does."""
        self._record("free_requested", block.address, block.requested_bytes, block.pool.stream)
        self.allocator.request_free(block)
        if not later:
            self.complete(block)

    def complete(self, block: Block) -> None:
        self._record("free_completed", block.address, block.requested_bytes, block.pool.stream)
        self.allocator.complete_free(block)

    def empty_cache(self) -> None:
        self.allocator.release_cached()
        self._catch_up("simulated emptyCache")

    def document(self, first: int = 0) -> dict[str, Any]:
        """Return the snapshot that holds the events from number `first` on."""
        segments = []
        for source in self.allocator.segments():
            states = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
            more = {"stream": source.stream, "segment_type": "small" if source.small else "large"}
            more |= {"segment_pool_id": (0, source.pool), "is_expandable": source.expandable}
            made = segment(source.address, [(block.bytes, states[block.state]) for block in source.blocks], **more)
            for block, state in zip(made["blocks"], source.blocks, strict=True):
                block["requested_size"] = state.requested_bytes
            segments.append(made)
        conf = SETTINGS | {"expandable_segments": self.allocator.settings.expandable}
        return document(segments, self.events[first:], settings=conf)

    def _catch_up(self, why: str) -> None:
        for recorded in self.allocator.events[self._seen :]:
            self.events.append(
                event(recorded.action, recorded.address, recorded.bytes, stream=recorded.stream, frames=[frame(why)])
            )
        self._seen = len(self.allocator.events)

    def _record(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append(event(action, address, size, stream=stream))
