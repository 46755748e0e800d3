"""Inputs written from the specifications of the formats alone: nothing in here was taken from the readers.

`python -m tests.fuzz.specified --inputs 2000 --seed 1` draws them. Sources: "Trace Event Format" (Chromium), Kineto's
output, RFC 1952 (gzip), APPNOTE (zip), POSIX ustar and pax (tar), pickletools, protobuf's encoding and the messages of
Perfetto, the SQLite tables of Nsight Systems' documentation, safetensors' README, torch's checkpoint metadata.
"""

# ruff: noqa: E501  one packet, opcode or table a line

import copy
import gzip
import io
import json
import pickletools
import sqlite3
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import inputs
from tests.support import rocprofv3_files

_INTEGERS = (0, 1, -1, 2, 7, 127, 255, 2**31, -(2**31), 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30)
_FLOATS = (0.0, -0.0, 0.5, 1e-9, 5e-324, 1e15, 1e19, 1.8e308, -1e300, float("nan"), float("inf"), -float("inf"))
_TEXTS = (
    "", " ", "a", "0", "-1", "1e5", "0x10", "null", "\0", "\x1b[2J", "::error::x", "=HYPERLINK(1)", "<b>", "\u202e",
    "\ud800", "\U0001f525", "é" * 3, "a" * 300, "../../etc", "%s{0}", "ProfilerStep#3", "ProfilerStep#-1", "nccl:all_reduce",
    "ncclDevKernel_AllReduce_Sum_f32", "aten::mm", "cudaLaunchKernel", "[0, 1]", "[[1, 2], []]", "GPU 0", "stream 7",
)  # fmt: skip


def _odd(random: Random, depth: int = 0) -> Any:
    """Any JSON value."""
    draw = random.random()
    if depth < 4 and draw < 0.12:
        return [_odd(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))]
    if depth < 4 and draw < 0.22:
        return {random.choice(_TEXTS): _odd(random, depth + 1) for _ in range(random.choice((0, 1, 3)))}
    if draw < 0.24:
        return _deep(random)
    return random.choice((*_INTEGERS, *_FLOATS, *_TEXTS, None, True, False))


class _Raw(float):
    """A piece of text that JSON contains as it is."""

    text: str


def _raw(text: str) -> _Raw:
    value = _Raw(1.0)
    value.text = text
    return value


def _deep(random: Random) -> Any:
    depth = random.choice((30, 99, 101, 500, 967, 3000, 50_000))
    begin, end = random.choice((("[", "]"), ('{"a":', "}"), ('[{"args":', "}]")))
    return _raw(begin * depth + random.choice(("1", '""', "null")) + end * (depth if random.random() < 0.8 else 0))


def _json(value: Any, random: Random) -> str:
    """JSON text with the freedom of RFC 8259: white space, escapes, repeated keys, numbers in every notation."""
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, Mapping):
        items = list(value.items())
        if items and random.random() < 0.02:
            items.append((random.choice(items)[0], _odd(random)))
        pairs = (
            f"{_json(str(key), random)}{_space(random)}:{_space(random)}{_json(item, random)}" for key, item in items
        )
        return "{" + _space(random) + ",".join(pairs) + _space(random) + "}"
    if isinstance(value, list | tuple):
        return "[" + _space(random) + ("," + _space(random)).join(_json(item, random) for item in value) + "]"
    if isinstance(value, str) and random.random() < 0.05:
        return '"' + "".join(rf"\u{ord(letter):04x}" if ord(letter) < 65536 else letter for letter in value) + '"'
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.05:
        return random.choice((f"{value}.0", f"{value}e0", f"{value}E+00", f"{value}.000000000000000000001"))
    return json.dumps(value, ensure_ascii=isinstance(value, str) and "\ud800" in value)


def _space(random: Random) -> str:
    return random.choice((" ", "\n", "\r\n", "\t", " " * 40)) if random.random() < 0.03 else ""


# Chrome trace ------------------------------------------------------------------------------------------------------
_PHASES = "XXXXXXBEiICbnestfPNODMMVvRca(),"
_CATEGORIES = (
    "cpu_op", "user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime",
    "cuda_driver", "ac2g", "fwdbwd", "python_function", "cpu_instant_event", "overhead", "cuda_sync", "Trace",
    "collective_comm", "async_cpu_to_gpu", "privateuse1_runtime", "xpu_runtime", "mtia_ccp_events",
)  # fmt: skip
_METADATA = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index", "num_cpus")
_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    ("External id", 3), ("correlation", 7), ("device", 0), ("stream", 7), ("context", 1), ("grid", [4, 1, 1]),
    ("block", [128, 1, 1]), ("Input Dims", [[2, 3], []]), ("Input type", ["float", ""]), ("Ev Idx", 4),
    ("Concrete Inputs", ["", "1"]), ("Sequence number", 5), ("Fwd thread id", 0), ("bytes", 4096),
    ("memory bandwidth (GB/s)", 3.5), ("Collective name", "allreduce"), ("In msg nelems", 8), ("Out msg nelems", 8),
    ("Group size", 2), ("dtype", "Float"), ("Process Group Name", "0"), ("Process Group Ranks", "[0, 1]"),
    ("Python id", 1), ("Python parent id", 0), ("Python module id", 1), ("Addr", 1 << 40), ("Bytes", 512),
    ("Total Allocated", 512), ("Total Reserved", 1 << 21), ("Device Type", 1), ("Device Id", 0), ("name", "python"),
    ("labels", "CPU"), ("sort_index", 1), ("wait_on_stream", 7), ("wait_on_cuda_event_record_corr_id", 3),
    ("est. achieved occupancy %", 50), ("shared memory", 0), ("Seq", 1), ("Rank", 0), ("cbid", 211),
    ("Module Hierarchy", "a.b"), ("Call stack", "a.py(1): f;b.py(2): g"), ("snapshot", {"a": 1}), ("value", 3),
)  # fmt: skip
_TOP: tuple[tuple[str, Any], ...] = (
    ("schemaVersion", 1), ("displayTimeUnit", "ms"), ("systemTraceEvents", "# tracer: nop"), ("otherData", {"v": "1"}),
    ("stackFrames", {"5": {"name": "main", "category": "c"}, "7": {"parent": "5", "name": "f"}}),
    ("samples", [{"cpu": 0, "tid": 1, "ts": 1000.0, "name": "cycles", "sf": 3, "weight": 1}]),
    ("deviceProperties", [{"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 85 << 30, "numSms": 132}]),
    ("distributedInfo", {"backend": "nccl", "rank": 0, "world_size": 2, "pg_count": 1,
                         "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}],
                         "nccl_version": "2.21.5"}),
    ("baseTimeNanoseconds", 1_700_000_000_000_000_000), ("trace_id", "ABC"), ("traceName", "a.json"),
    ("cuda_runtime_version", 12040), ("record_shapes", 1), ("with_stack", 1), ("profile_memory", 1),
    ("powerTraceAsString", ""), ("controllerTraceDataKey", "traceEvents"), ("host_name", "n1"),
)  # fmt: skip


def _event(random: Random, place: int) -> dict[str, Any]:
    phase = random.choice(_PHASES)
    event: dict[str, Any] = {
        "ph": phase, "cat": random.choice(_CATEGORIES), "name": random.choice(_TEXTS),
        "pid": random.choice((1, 1, 1, 0, "Spans", "1")), "tid": random.choice((1, 1, 7, "stream 7", "PyTorch Profiler")),
        "ts": 1000 + 10 * place + random.choice((0, 0, 0, 0.123, -500)),
    }  # fmt: skip
    if phase == "X":
        event["dur"] = random.choice((5, 5, 50.25, 0, 500, -3))
    if phase in "bnestfNODPSTFpv()":
        event[random.choice(("id", "id", "id2", "bind_id"))] = random.choice((7, "0x7", {"local": "0x1"}))
        event["bp"] = "e"
    if phase == "M":
        event["name"] = random.choice(_METADATA)
    if random.random() < 0.1:
        field = random.choice(("tts", "tdur", "s", "cname", "sf", "stack", "esf", "estack", "scope", "use_async_tts"))
        event[field] = random.choice((5, "g", "thread_state_runnable", ["0x1"], "7"))
    event["args"] = copy.deepcopy(dict(random.sample(_ARGUMENTS, random.choice((0, 2, 5, 12)))))
    return event


def _spoil(document: Any, random: Random, depth: int = 0) -> Any:
    """A value with odd values in several of its fields at once, or a field of every element."""
    if isinstance(document, dict) and document:
        for key in random.sample(sorted(document), min(len(document), random.choice((1, 2, 4)))):
            value = document[key]
            document[key] = (
                _spoil(value, random, depth + 1)
                if value and isinstance(value, dict | list) and depth < 4
                else _odd(random)
            )
            if random.random() < 0.1:
                del document[key]
    elif isinstance(document, list) and document:
        for _ in range(random.choice((1, 1, 3, 20))):
            place = random.randrange(len(document))
            item = document[place]
            document[place] = (
                _spoil(item, random, depth + 1)
                if item and isinstance(item, dict | list) and depth < 4
                else _odd(random)
            )
    return document


def _damage(data: bytes, random: Random) -> bytes:
    for _ in range(random.choice((0, 0, 0, 0, 0, 1, 1, 5))):
        place = random.randrange(len(data) + 1)
        piece = random.choice((b"", b"\0", b"\xff", b'"', b"\\", b"{", b"]", data[place : place + 40]))
        data = data[:place] + piece + data[place + random.choice((0, 1, 1, 30)) :]
    return data[: random.randrange(len(data) + 1)] if data and random.random() < 0.05 else data


def _trace_document(random: Random) -> Any:
    events: list[Any] = [_event(random, place) for place in range(random.choice((0, 1, 10, 60, 60, 400)))]
    draw = random.random()
    if draw < 0.5:
        events = _spoil(events, random)
    elif draw < 0.7 and events:  # one or two odd fields in every event
        for key in random.sample(("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args"), random.choice((1, 2))):
            value = _odd(random)
            for event in events:
                event[key] = value
    elif draw < 0.9 and events:  # odd arguments in every event
        changes = {key: _odd(random) for key, _ in random.sample(_ARGUMENTS, random.choice((1, 3)))}
        for event in events:
            event["args"] = {**event["args"], **changes}
    if random.random() < 0.25:
        return events
    document = copy.deepcopy(dict(random.sample(_TOP, random.choice((0, 3, len(_TOP))))))
    if random.random() < 0.4:
        document = _spoil(document, random)
    items = [*document.items(), ("traceEvents", events)]
    random.shuffle(items)
    return dict(items)


def _trace_bytes(random: Random) -> bytes:
    text = _json(_trace_document(random), random)
    if text.startswith("[") and random.random() < 0.3:  # the array form needs no end
        text = text.rstrip("]") + random.choice(("", ",", "\n"))
    text = random.choice(("", "", "", "", "\ufeff", "  \n")) + text
    encoding = random.choice(("utf-8",) * 20 + ("utf-16", "utf-32"))
    return _damage(text.encode(encoding, "surrogatepass"), random)


def _traces(random: Random) -> dict[str, bytes]:
    ranks = random.choice((1, 1, 2))
    return {f"rank{rank}.pt.trace.json": _trace_bytes(random) for rank in range(ranks)}


# Containers ----------------------------------------------------------------------------------------------------------
def _gzip_bytes(content: bytes, random: Random) -> bytes:
    """A member of gzip by RFC 1952, with optional header fields, also wrong ones."""
    flags = random.choice((0, 0, 1, 2, 4, 8, 16, 31, 0xE0))
    header = (
        b"\x1f\x8b"
        + bytes((random.choice((8, 8, 8, 7)), flags))
        + struct.pack("<IBB", random.choice((0, 2**32 - 1)), 0, 255)
    )
    if flags & 4:
        header += struct.pack("<H", 5) + b"extra"
    if flags & 8:
        header += random.choice((b"name\0", b"../../x\0", b"x" * 70_000 + b"\0", b"no end"))
    if flags & 16:
        header += b"comment\0"
    if flags & 2:
        header += struct.pack("<H", zlib.crc32(header) & 0xFFFF)
    packer = zlib.compressobj(random.choice((0, 1, 9)), zlib.DEFLATED, -15)
    body = packer.compress(content) + packer.flush()
    size = random.choice((len(content), len(content), len(content), 0, 2**32 - 1)) & 0xFFFFFFFF
    return header + body + struct.pack("<II", random.choice((zlib.crc32(content), zlib.crc32(content), 0)), size)


def _member_name(random: Random) -> str:
    return random.choice((
        "rank0.pt.trace.json", "rank0.pt.trace.json.gz", "run/rank1.pt.trace.json", "run.json", "../up.json", "/abs.json",
        "C:\\a.json", "a//b.json", "./rank2.pt.trace.json", "a/" * 300 + "x.json", "x" * 255 + ".json", "", ".", "\x1b[2J.json",
        "rank0.pt.trace.json/", "nul\0.json", "rank0.sqlite", "a.pickle", "rank00000.metrics.jsonl", "\u202e.json", "con.tar.gz",
    ))  # fmt: skip


def _tar_bytes(random: Random) -> bytes:
    file = io.BytesIO()
    form = random.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for _ in range(random.choice((0, 1, 3, 8))):
            content = _trace_bytes(random)[:20_000]
            info = tarfile.TarInfo(_member_name(random).replace("\0", "?"))
            info.type = random.choice((tarfile.REGTYPE,) * 6 + (
                tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
                tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"Z",
            ))  # fmt: skip
            info.linkname = random.choice(("", "/etc/passwd", "../..", "rank0.pt.trace.json", "."))
            info.size = len(content) if info.isreg() else 0
            info.mode, info.mtime = random.choice((0o644, 0, 0o7777)), random.choice((0, 2**33 - 1))
            if form == tarfile.PAX_FORMAT and random.random() < 0.3:
                key = random.choice(
                    ("path", "size", "linkpath", "GNU.sparse.map", "GNU.sparse.size", "mtime", "hdrcharset")
                )
                info.pax_headers = {key: random.choice(("0", "-1", "9" * 30, "x", "0,1,2", "../../x"))}
            try:
                archive.addfile(info, io.BytesIO(content))
            except (ValueError, UnicodeEncodeError):
                continue
    return file.getvalue()


def _zip_bytes(random: Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for _ in range(random.choice((0, 1, 3, 8))):
            info = zipfile.ZipInfo(_member_name(random) or "x")
            info.compress_type = random.choice((0, 8, 8, 8, 12, 14))
            info.external_attr = random.choice((0o100644, 0o120777, 0o010644, 0o060644, 0o040755, 0)) << 16
            info.create_system = random.choice((0, 3, 3))
            info.extra = random.choice((b"", b"", struct.pack("<HHQQ", 1, 16, 2**63, 2**63), b"\x01\0\xff\xff"))
            content = random.choice((_trace_bytes(random)[:20_000], b" " * random.choice((10, 3_000_000))))
            archive.writestr(info, content)
        archive.comment = random.choice((b"", b"", b"x" * 65_535, b"PK\5\6" + bytes(18)))
    data = bytearray(file.getvalue())
    for signature, offset, size in (
        (b"PK\1\2", 20, 4),
        (b"PK\1\2", 24, 4),
        (b"PK\1\2", 42, 4),
        (b"PK\1\2", 8, 2),
        (b"PK\3\4", 6, 2),
    ):
        place = data.find(signature)  # sizes, place and flags (encrypted, sizes that follow) of the first member
        if place >= 0 and random.random() < 0.12:
            value = random.choice((0, 1, 8, 0xFFFF, 2**31, 2**32 - 1)) & (2 ** (8 * size) - 1)
            data[place + offset : place + offset + size] = value.to_bytes(size, "little")
    return bytes(data)


def _containers(random: Random) -> dict[str, bytes]:
    draw = random.randrange(5)
    if draw == 0:
        pieces = [_gzip_bytes(_trace_bytes(random), random) for _ in range(random.choice((1, 1, 2, 30)))]
        name, data = "rank0.pt.trace.json.gz", b"".join(pieces)
        data += random.choice((b"", b"", b"\0" * 512, b"after", b"\x1f\x8b"))
    elif draw == 1:
        name, data = random.choice(("run.tar", "run.json")), _tar_bytes(random)
    elif draw == 2:
        name, data = random.choice(("run.tar.gz", "run.tgz")), _gzip_bytes(_tar_bytes(random), random)
    elif draw == 3:
        name, data = "run.zip", _zip_bytes(random)
    else:  # in each other
        name, data = "rank0.pt.trace.json.gz", _trace_bytes(random)
        for _ in range(random.choice((2, 3, 20))):
            data = gzip.compress(data, 1)
    return {name: _damage(data, random)}


# Pickle --------------------------------------------------------------------------------------------------------------
class _Global:
    """An object of a class that is named but need not exist, by REDUCE, NEWOBJ or BUILD."""

    def __init__(self, name: str, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.name, self.arguments, self.state = name, arguments, state


def _opcodes(value: Any, random: Random, memo: dict[int, int]) -> bytes:  # noqa: C901  one type of values after the other
    """Opcodes that build a value, in the notation of any protocol."""
    if id(value) in memo and random.random() < 0.9:
        return b"j" + struct.pack("<I", memo[id(value)])

    def build(item: Any) -> bytes:
        return _opcodes(item, random, memo)

    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if -(2**31) <= value < 2**31 and random.random() < 0.7:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return random.choice((b"I%d\n" % value, b"L%dL\n" % value, b"\x8a" + bytes((len(data),)) + data))
    if isinstance(value, float):
        return random.choice((b"G" + struct.pack(">d", value), b"F" + repr(value).encode() + b"\n"))
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(build, value)) + b"t"
    if isinstance(value, _Global):
        module, _, name = value.name.rpartition(".")
        named = random.choice((b"c%b\n%b\n" % (module.encode(), name.encode()), build(module) + build(name) + b"\x93"))
        made = named + build(value.arguments) + random.choice((b"R", b"\x81"))
        return made if value.state is None else made + build(value.state) + b"b"
    number = memo.setdefault(id(value), len(memo))
    put = b"r" + struct.pack("<I", number)
    if isinstance(value, list):
        return b"]" + put + b"(" + b"".join(map(build, value)) + b"e"
    if isinstance(value, set):
        return b"\x8f" + put + b"(" + b"".join(map(build, value)) + b"\x90"
    return b"}" + put + b"(" + b"".join(build(key) + build(item) for key, item in value.items()) + b"u"


def _pickled(value: Any, random: Random) -> bytes:
    data = b"\x80" + bytes((random.choice((0, 1, 2, 3, 4, 5, 5, 4, 2, 6, 255)),))
    data += _opcodes(value, random, {}) + b"."
    if random.random() < 0.1:
        data = data[:2] + b"\x95" + struct.pack("<Q", random.choice((len(data) - 2, 0, 2**63))) + data[2:]
    return data


def _random_opcodes(random: Random) -> bytes:
    """Opcodes in any order with arguments of their type."""
    data = bytearray(b"\x80\x04")
    for _ in range(random.choice((3, 20, 200))):
        opcode = random.choice(pickletools.opcodes)
        data += opcode.code.encode("latin1")
        argument = opcode.arg
        if argument is None:
            continue
        if argument.n >= 0:
            data += random.choice(
                (bytes(argument.n), b"\xff" * argument.n, bytes((1,)) + bytes(max(argument.n - 1, 0)))
            )[: argument.n]
        elif argument.n == pickletools.UP_TO_NEWLINE:
            data += (
                random.choice((b"1", b"os", b"'a'", b"x y", b"9" * 5000, b""))
                + b"\n"
                + (b"system\n" if opcode.name in ("GLOBAL", "INST") else b"")
            )
        else:
            width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(argument.n, 4)
            size = random.choice((0, 1, 3, 255, 2 ** (8 * width - 1) - 1)) & (2 ** (8 * width) - 1)
            data += size.to_bytes(width, "little") + b"abc"[:size]
    return bytes(data) + b"."


def _frames(random: Random) -> list[Any]:
    return [
        {"filename": random.choice(("train.py", "??", "")), "line": random.choice((0, 12)), "name": "forward"}
    ] * random.choice((0, 1, 3))


def _snapshot(random: Random) -> Any:
    base, events, segments = 1 << 40, [], []
    for place in range(random.choice((0, 1, 20, 200))):
        events.append({  # noqa: PERF401
            "action": random.choice(("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom",
                                     "snapshot", "segment_map", "segment_unmap", "workspace_snapshot", "user_defined")),
            "addr": base + 512 * random.randrange(40), "size": random.choice((512, 1024, 1 << 21)), "stream": 0,
            "time_us": 1000 + place, "frames": _frames(random), "device_free": 1 << 30, "compile_context": "0/0",
            "user_metadata": "",
        })  # fmt: skip
    for place in range(random.choice((0, 1, 3))):
        blocks = [
            {"address": base + 512 * at, "size": 512, "requested_size": 500, "state": state, "frames": _frames(random)}
            for at, state in enumerate(
                random.choices(("active_allocated", "active_awaiting_free", "inactive", "?"), k=4)
            )
        ]
        segments.append({
            "device": 0, "address": base + (place << 21), "total_size": 1 << 21, "allocated_size": 2048, "active_size": 2048,
            "requested_size": 2000, "stream": 0, "segment_type": random.choice(("large", "small")), "is_expandable": False,
            "segment_pool_id": (0, place), "blocks": blocks, "frames": _frames(random),
        })  # fmt: skip
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0}
    return {"segments": segments, "device_traces": [events], "allocator_settings": settings, "external_annotations": []}


def _odd_object(random: Random) -> Any:
    """A value that only a pickle can have: tuples, sets, bytes, shared and cyclic containers, objects."""
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    shared: Any = [1] * 10
    for _ in range(random.choice((3, 8, 30))):
        shared = [shared] * 10
    itself: dict[str, Any] = {}
    itself["segments"] = itself
    return random.choice((
        cyclic, shared, itself, (), (1, (2, ("x",))), {1, 2}, b"\xff", {(1, 2): 3, None: 4}, 2**200, -(2**2000),
        _Global("os.system", ("true",)), _Global("collections.OrderedDict", ()), _Global("torch.device", ("cuda",)),
        _Global("builtins.getattr", ("a", "b")), _Global("a.b.C", (), {"x": 1}), _Global("numpy.core.multiarray.scalar", (1,)),
    ))  # fmt: skip


def _spoil_object(document: Any, random: Random) -> Any:
    for _ in range(random.choice((0, 1, 2, 5))):
        holder: Any = document
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = random.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.85:
                holder = holder[key]
                continue
            value = _odd_object(random) if random.random() < 0.5 else _odd(random)
            holder[key] = 1.0 if isinstance(value, _Raw) else value
            break
    return document


def _snapshots(random: Random) -> dict[str, bytes]:
    if random.random() < 0.15:
        return {"a.pickle": _random_opcodes(random)}
    return {"a.pickle": _damage(_pickled(_spoil_object(_snapshot(random), random), random), random)}


# Protobuf ------------------------------------------------------------------------------------------------------------
def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes((*data, value))


def _field(number: int, value: Any, random: Random) -> bytes:
    if random.random() < 0.02:  # a value of another type under the same number
        value = random.choice((0, 2**63, -1, b"", b"\xff" * 9, "text", 0.5))
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    length = len(data) if random.random() < 0.995 else random.choice((0, len(data) + 1, 2**31, 2**63))
    return _varint(number << 3 | 2) + _varint(length) + data


def _message(fields: Mapping[int, Any] | list[tuple[int, Any]], random: Random) -> bytes:
    pairs = list(fields.items()) if isinstance(fields, Mapping) else fields
    if random.random() < 0.05:
        random.shuffle(pairs)
    return b"".join(_field(number, value, random) for number, value in pairs if random.random() < 0.97)


def _annotation(random: Random, depth: int = 0) -> bytes:
    fields: list[tuple[int, Any]] = [
        random.choice(((10, random.choice(_ARGUMENTS)[0]), (1, random.choice((1, 2, 99)))))
    ]
    draw = random.random()
    if depth < 3 and draw < 0.3:
        fields += [(random.choice((11, 12)), _annotation(random, depth + 1)) for _ in range(random.choice((0, 2)))]
    elif draw < 0.32:
        deep = b""
        for _ in range(random.choice((50, 101, 2000))):
            deep = _varint(random.choice((11, 12)) << 3 | 2) + _varint(len(deep)) + deep
        return deep
    else:
        fields.append(random.choice((
            (2, 1), (3, random.choice(_INTEGERS)), (4, random.choice(_INTEGERS)), (5, random.choice(_FLOATS)),
            (6, random.choice(_TEXTS)), (7, 2**63), (9, random.choice(("[1,", '{"a":1}', "[" * 5000))), (17, 1), (8, b""),
        )))  # fmt: skip
    return _message(fields, random)


def _track_event(random: Random) -> bytes:
    fields: list[tuple[int, Any]] = [
        (9, random.choice((1, 1, 2, 2, 3, 4, 0, 9))),
        (11, random.choice((1, 2, 3, 9, 2**64 - 1))),
    ]
    fields.append(random.choice(((23, random.choice(_TEXTS)), (10, random.choice((1, 2, 99))))))
    fields.append(random.choice(((22, random.choice(_CATEGORIES)), (3, 1))))
    fields += [(4, _annotation(random)) for _ in range(random.choice((0, 0, 1, 6)))]
    if random.random() < 0.4:
        fields.append(random.choice((
            (47, 7.0), (48, 7.0), (36, 7), (30, random.choice(_INTEGERS)), (44, random.choice(_FLOATS)), (1, 5), (16, 5),
            (6, _message({1: 1, 2: ord(random.choice(_PHASES)), 3: 5, 4: 2, 18: 1, 19: 1, 10: 7}, random)), (12, 3), (31, 4),
        )))  # fmt: skip
    return _message(fields, random)


def _packet(random: Random, place: int) -> bytes:
    kind = random.choice(
        ("event",) * 12 + ("track", "track", "clock", "interned", "defaults", "process", "gpu", "ftrace", "other")
    )
    fields: list[tuple[int, Any]] = [
        (8, 10**9 + 1000 * place + random.choice((0, 0, -(10**6)))),
        (10, random.choice((1, 1, 2))),
    ]
    if random.random() < 0.1:
        fields.append((58, random.choice((1, 3, 6, 64, 65, 128, 2**32))))
    if kind == "event":
        fields.append((11, _track_event(random)))
    elif kind == "track":
        process = _message({1: random.choice((1, 2, -5)), 6: random.choice(_TEXTS), 2: "cmd"}, random)
        thread = _message({1: 1, 2: random.choice((1, 7)), 5: random.choice(_TEXTS)}, random)
        counter = _message({1: random.choice((0, 1, 9)), 3: 2, 4: 10, 5: 1, 6: "unit"}, random)
        parts = random.sample(
            [(3, process), (4, thread), (8, counter), (5, random.choice((0, 1, 2, 3)))], random.choice((0, 1, 2))
        )
        fields.append((60, _message([(1, random.choice((1, 2, 3))), (2, random.choice(_TEXTS)), *parts], random)))
    elif kind == "clock":
        clocks = [(1, _message({1: clock, 2: random.choice(_INTEGERS), 3: random.choice((0, 1)), 4: random.choice((1, 0, 10**9))}, random))
                  for clock in random.sample((1, 3, 6, 64, 128), 3)]  # fmt: skip
        fields.append((6, _message([*clocks, (2, random.choice((1, 6, 64)))], random)))
    elif kind == "interned":
        entry = _message({1: random.choice((1, 2)), 2: random.choice(_TEXTS)}, random)
        fields += [(12, _message({random.choice((1, 2, 3, 29)): entry}, random)), (13, random.choice((1, 2, 3)))]
    elif kind == "defaults":
        fields.append((59, _message({58: random.choice((6, 64)), 11: _message({11: 1, 31: 2}, random)}, random)))
    elif kind == "process":
        fields.append(
            (
                2,
                _message(
                    {1: _message({1: 1, 2: 0, 3: "x"}, random), 2: _message({1: 1, 2: "t", 3: 1}, random)}, random
                ),
            )
        )
    elif kind == "gpu":
        fields.append((53, _message({1: 1, 2: random.choice(_INTEGERS), 3: 0, 4: 0, 5: 1, 13: 1, 14: 1}, random)))
    elif kind == "ftrace":
        fields.append(
            (1, _message({1: 0, 2: _message({1: 10**9, 2: 1, 4: _message({1: "a", 2: 1}, random)}, random)}, random))
        )
    else:
        fields.append((random.choice((33, 36, 52, 75, 89, 900)), random.choice((b"", b"\xff" * 20, 5, "x"))))
    return _message(fields, random)


def _perfetto(random: Random) -> dict[str, bytes]:
    packets = [_field(1, _packet(random, place), random) for place in range(random.choice((1, 10, 100, 600)))]
    if random.random() < 0.2:
        half = len(packets) // 2
        packed = zlib.compress(b"".join(packets[half:]))
        for _ in range(random.choice((0, 0, 2, 30))):
            packed = zlib.compress(_field(1, _field(50, packed, random), random))
        packets = [*packets[:half], _field(1, _field(50, packed, random), random)]
    data = b"".join(packets)
    name = random.choice(("run.pftrace", "run.perfetto-trace", "run.pftrace.gz"))
    return {name: _damage(gzip.compress(data, 1) if name.endswith("gz") else data, random)}


def _rocprofv3(random: Random) -> dict[str, bytes]:
    document = rocprofv3_files.training(random.choice((1, 4)))
    (tool,) = document["rocprofiler-sdk-tool"]
    for rows in tool["buffer_records"].values():
        for place in range(len(rows)):
            if random.random() < 0.2:
                rows[place] = _spoil(dict(rows[place]), random)
    for key in ("agents", "kernel_symbols", "strings", "buffer_records"):
        if random.random() < 0.1:
            tool[key] = _odd(random)
    return {"rank0_results.json": _damage(_json(document, random).encode("utf-8", "surrogatepass"), random)}


def _xplane(random: Random) -> dict[str, bytes]:
    planes = []
    for name in random.sample(("/device:TPU:0", "/device:GPU:0", "/device:GPU:1", "/host:CPU", "", "/x"), 3):
        lines = []
        for line in random.sample(("XLA Ops", "Async XLA Ops", "Steps", "Stream #7(Compute)", "python", ""), 3):
            events = []
            for place in range(random.choice((0, 1, 30))):
                stat = _message(
                    {1: random.choice((1, 2, 9)), random.choice((2, 3, 4, 5, 7)): random.choice(_INTEGERS)}, random
                )
                time = {
                    1: random.choice((1, 2, 3)),
                    2: 10**6 * place,
                    3: random.choice((10**6, 10**6, *_INTEGERS)),
                    4: stat,
                }
                events.append((4, _message(time, random)))
            lines.append(
                (3, _message([(1, 7), (2, line), (3, random.choice((10**18, 10**18, *_INTEGERS))), *events], random))
            )
        texts = [(number, _message({1: key, 2: _message({1: key, 2: text}, random)}, random))
                 for number, names in ((4, ("1", "%all-reduce.1", "MemcpyH2D")), (5, ("correlation_id", "step_num")))
                 for key, text in enumerate(names, 1)]  # fmt: skip
        planes.append(_field(1, _message([(2, name), *lines, *texts], random), random))
    return {"host.xplane.pb": _damage(b"".join(planes), random)}


# SQLite --------------------------------------------------------------------------------------------------------------
_TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, gridX INTEGER, gridY INTEGER, "
    "gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, registersPerThread INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, value INTEGER, bytes INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, "
    "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER, eventId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, color INTEGER, "
    "text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER",
    "OSRT_API": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
    "ThreadNames": "nameId INTEGER, priority INTEGER, globalTid INTEGER",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER, id INTEGER, name TEXT, busLocation TEXT, totalMemory INTEGER, smCount INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "ANALYSIS_DETAILS": "globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER",
    "ENUM_NSYS_EVENT_TYPE": "id INTEGER, name TEXT, label TEXT",
    "GPU_METRICS": "timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER",
    "TARGET_INFO_GPU_METRICS": "typeId INTEGER, sourceId INTEGER, typeName TEXT, metricId INTEGER, metricName TEXT",
}


def _cell(column: str, random: Random, place: int) -> Any:
    if random.random() < 0.02:
        value = _odd(random)
        return (
            value
            if value is None or isinstance(value, str | bytes)
            else min(float(value), 1e300)
            if isinstance(value, float)
            else "x"
        )
    if column in ("start", "timestamp", "startTime"):
        return 1000 * place
    if column in ("end", "stopTime"):
        return 1000 * place + random.choice((900, 900, 0, 5000, -10))
    if column in ("globalTid", "endGlobalTid", "globalPid", "globalVid"):
        return (1 << 24) * random.choice((1, 1, 2)) + (random.choice((0, 1, 7)) if "Tid" in column else 0)
    if column in ("text", "name", "value", "label", "devStateName"):
        return random.choice(_TEXTS)
    if column == "eventType":
        return random.choice((59, 60, 34, 70, 75, 0))
    return random.choice((0, 1, 2, 7, place))


def _nsight(random: Random) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.sqlite")
        with sqlite3.connect(path) as file:
            file.execute(f"PRAGMA page_size = {random.choice((512, 4096, 65536))}")
            file.execute(f"PRAGMA encoding = '{random.choice(('UTF-8', 'UTF-8', 'UTF-16le', 'UTF-16be'))}'")
            for table, columns in _TABLES.items():
                if random.random() < 0.07:
                    continue
                names = [part.split()[0] for part in columns.split(", ")]
                removed = random.choice(names) if random.random() < 0.1 else None
                kept = [part for part in columns.split(", ") if part.split()[0] != removed]
                if random.random() < 0.15:
                    kept = [
                        part.replace("INTEGER", random.choice(("TEXT", "REAL", "BLOB", "ANY"))).replace(
                            " PRIMARY KEY", ""
                        )
                        for part in kept
                    ]
                names = [part.split()[0] for part in kept]
                file.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
                values = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(names))})"
                for place in range(random.choice((0, 1, 3, 40))):
                    row = [place if name == "id" else _cell(name, random, place) for name in names]
                    row = [cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell for cell in row]
                    file.execute(values, row)
            _odd_schema(file, random)
        file.close()
        data = path.read_bytes()
    if random.random() < 0.2:  # the header: page size, versions, counts, encoding
        place = random.choice((16, 18, 19, 20, 28, 31, 44, 47, 52, 56, 59, 100, 103, 105))
        data = data[:place] + bytes((random.choice((0, 1, 2, 255)),)) + data[place + 1 :]
    return {"rank0.sqlite": _damage(data, random)}


def _odd_schema(file: sqlite3.Connection, random: Random) -> None:
    table = random.choice(sorted(_TABLES))
    endless = f"CREATE VIEW {table} AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, id AS start, id AS end, id AS value FROM n"
    statements = {
        0: [f"DROP TABLE IF EXISTS {table}", endless],
        1: [f"DROP TABLE IF EXISTS {table}", f"CREATE VIEW {table} AS SELECT * FROM {table}"],
        2: [f"DROP TABLE IF EXISTS {table}", f"CREATE VIRTUAL TABLE {table} USING fts5(value)"],
        3: ["CREATE TABLE x (id INTEGER, value TEXT GENERATED ALWAYS AS (hex(zeroblob(100000000))))", "INSERT INTO x (id) VALUES (1)",
            "DROP TABLE IF EXISTS StringIds", "CREATE VIEW StringIds AS SELECT * FROM x"],
        4: ["PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET sql = 'CREATE TABLE {table} (' WHERE name = '{table}'"],
        5: ["PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET rootpage = {random.choice((0, 1, 2, 10**6))} WHERE name = '{table}'"],
    }  # fmt: skip
    for statement in statements.get(random.randrange(30), []):
        try:
            file.execute(statement)
        except sqlite3.Error:
            return


# Checkpoints ---------------------------------------------------------------------------------------------------------
def _safetensors(random: Random) -> dict[str, bytes]:
    types = {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F4": 1,
        "C64": 8,
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for place in range(random.choice((0, 1, 5, 60))):
        kind, shape = random.choice(sorted(types)), random.choice(([], [2], [2, 3], [0], [1] * 50, [2**40, 2**40]))
        count = min(types[kind] * (6 if shape == [2, 3] else 2), 48)
        header[random.choice(_TEXTS) + str(place)] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [offset, offset + count],
        }
        offset += count
    if random.random() < 0.7:
        header = _spoil(header, random)
    text = (_json(header, random) + " " * random.choice((0, 7))).encode("utf-8", "surrogatepass")
    size = random.choice((len(text),) * 6 + (0, 1, len(text) + 9, 10**8, 2**63, 2**64 - 1))
    files = {"model.safetensors": struct.pack("<Q", size) + _damage(text, random) + bytes(offset)}
    if random.random() < 0.3:
        index = {"metadata": {"total_size": offset}, "weight_map": dict.fromkeys(list(header)[1:], "model.safetensors")}
        files["model.safetensors.index.json"] = _damage(
            _json(_spoil(index, random), random).encode("utf-8", "surrogatepass"), random
        )
    return files


def _checkpoint(random: Random) -> dict[str, bytes]:
    module = "torch.distributed.checkpoint.metadata."
    tensors: dict[Any, Any] = {}
    storage: dict[Any, Any] = {}
    for place in range(random.choice((0, 1, 5, 50))):
        name = random.choice(_TEXTS) + str(place)
        size = _Global("torch.Size", ([4, 2],))
        chunk = _Global(
            module + "ChunkStorageMetadata", (), {"offsets": _Global("torch.Size", ([0, 0],)), "sizes": size}
        )
        properties = _Global(
            module + "TensorProperties",
            (),
            (_Global("builtins.getattr", ("torch", "float32")), None, False, None, False),
        )
        tensors[name] = random.choice((
            _Global(module + "TensorStorageMetadata", (), {"properties": properties, "size": size, "chunks": [chunk]}),
            _Global(module + "BytesStorageMetadata", ()),
        ))  # fmt: skip
        index = _Global(module + "MetadataIndex", (), {"fqn": name, "offset": size, "index": 0})
        path = random.choice(("__0_0.distcp", "__0_0.distcp", "../../etc/passwd", "/dev/zero", "", "\0", "a" * 5000))
        info = {
            "relative_path": path,
            "offset": random.choice((0, 32, -1, 2**63)),
            "length": random.choice((32, 0, -5, 2**70)),
        }
        storage[index] = _Global("torch.distributed.checkpoint.filesystem._StorageInfo", (), info)
    state: dict[str, Any] = {
        "state_dict_metadata": tensors,
        "planner_data": {},
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0",
    }
    for key in random.sample(sorted(state), random.choice((0, 0, 1, 3))):
        value = random.choice((_odd(random), _odd_object(random)))
        state[key] = 1.0 if isinstance(value, _Raw) else value
    data = _pickled(_Global(module + "Metadata", (), state), random)
    if random.random() < 0.1:
        data = _random_opcodes(random)
    return {".metadata": _damage(data, random), "__0_0.distcp": bytes(random.choice((0, 64, 5000)))}


# Logs ----------------------------------------------------------------------------------------------------------------
_LOGS: dict[str, dict[str, Any]] = {
    "rank00000.metrics.jsonl": {"step": 1, "step_time_ns": 10**6, "loss": 1.5, "tokens_per_second": 10.0, "start_ns": 5,
                                "allocated_bytes": 5, "reserved_bytes": 9, "alloc_retries": 0, "data_wait_ns": 4},
    "rank00000.checkpoint.jsonl": {"step": 1, "stage": "write", "start_ns": 9, "dur_ns": 5, "bytes": 7, "checkpoint": 0,
                                   "operation": "save", "blocking": True},
    "run.json": {"schema": "tracekit.run/1", "world_size": 2, "strategy": "fsdp2", "mesh": {"dp_shard": 2}, "host": "n"},
    "node-pid7.log": {"header": {"id": "0x1", "rank": 0, "n_ranks": 2, "nnodes": 1},
                      "metadata": {"inspector_output_format_version": "v5.1", "dump_timestamp_us": 10**6, "pid": 7},
                      "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 8, "coll_exec_time_us": 5,
                                    "event_trace_ts": {"kernel_events": [{"kernel_start_ts": 5, "kernel_stop_ts": 9}]}}},
    "training.global_rank_0.a.jsonl": {"rank": 0, "pid": 7, "tid": 7, "step": 1, "time_us": 10**6, "log_type": "event",
                                       "log_type_name": "step_start", "logger_name": "torchtitan.structured_logger",
                                       "event_name": "global_valid_tokens", "value": 5.0},
    "a.pfw": {"id": 1, "name": "read", "cat": "POSIX", "pid": 1, "tid": 1, "ts": 5, "dur": 4, "ph": "X", "args": {"ret": 5}},
}  # fmt: skip


def _logs(random: Random) -> dict[str, bytes]:
    files = {
        "rank0.pt.trace.json": json.dumps({"traceEvents": [_event(Random(5), place) for place in range(30)]}).encode(
            "utf-8", "surrogatepass"
        )
    }
    for name, row in random.sample(sorted(_LOGS.items()), random.choice((1, 2))):
        rows = [{**row, **({"step": place} if "step" in row else {})} for place in range(random.choice((1, 1, 5, 60)))]
        if random.random() < 0.4:
            changes = {key: _odd(random) for key in random.sample(sorted(row), random.choice((1, 2)))}
            rows = [{**row, **changes} for row in rows]
        else:
            rows = [_spoil(dict(row), random) if random.random() < 0.2 else row for row in rows]
        ends = random.choice(("\n", "\n", "\r\n", "\n\n", "\x1e", "\u2028", ""))
        text = ends.join(_json(row, random) for row in (rows[:1] if name == "run.json" else rows))
        files[name] = _damage(
            (random.choice(("", "", "\ufeff", "[\n")) + text + ends).encode("utf-8", "surrogatepass"), random
        )
    return files


_QUIET = ("--format", "json", "--no-cache")
_READ = (
    inputs.CHECK, inputs.CHECK, inputs.CHECK, ("summary", inputs.FOLDER, *_QUIET),
    ("summary", inputs.FOLDER, "--by", "step", *_QUIET), ("memory", inputs.FOLDER, *_QUIET),
    ("whatif", inputs.FOLDER, *_QUIET), ("whatif", "--critical-path", inputs.FOLDER, *_QUIET),
    ("kernels", inputs.FOLDER, "--by", "name,op,shapes,module,unit,phase", *_QUIET),
    ("kernels", "--by", "stack", inputs.FOLDER, "-o", f"{inputs.FOLDER}/out.speedscope.json", "--no-cache"),
    ("compare", inputs.FOLDER, inputs.FOLDER, *_QUIET),
    ("export", inputs.FOLDER, "-o", f"{inputs.FOLDER}/out.pftrace", "--no-cache"),
    ("export", inputs.FOLDER, "--format", "html", "-o", f"{inputs.FOLDER}/out.html", "--no-cache"),
    ("scrub", inputs.FOLDER, f"{inputs.FOLDER}-scrubbed"),
)  # fmt: skip
_VERIFY = (("checkpoint", "verify", inputs.FOLDER),)
_SNAPSHOT = (("memory", f"{inputs.FOLDER}/a.pickle", "--format", "json"), ("hang", inputs.FOLDER, "--format", "json"))
KINDS: dict[str, tuple[tuple[tuple[str, ...], ...], Callable[[Random], dict[str, bytes]]]] = {
    "specified trace": (_READ, _traces),
    "specified container": (_READ, _containers),
    "specified snapshot": (_SNAPSHOT, _snapshots),
    "specified packets": (_READ, _perfetto),
    "specified planes": (_READ, _xplane),
    "specified results": (_READ, _rocprofv3),
    "specified database": (_READ, _nsight),
    "specified safetensors": (_VERIFY, _safetensors),
    "specified checkpoint": (_VERIFY, _checkpoint),
    "specified logs": (_READ, _logs),
}


def drawn(kind: str, seed: int) -> inputs.Input:
    """The input of a kind with this seed."""
    random = Random(f"{kind} {seed}")
    commands, make = KINDS[kind]
    return inputs.Input(kind, seed, random.choice(commands), make(random))


if __name__ == "__main__":
    from tests.fuzz.__main__ import main

    sys.exit(main(KINDS))
