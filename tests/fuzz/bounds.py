"""Inputs that are hostile in one dimension, each read by a command: exit code, CPU time and peak memory in a table."""

import argparse
import bz2
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import structures
from tests.support import kineto_files
from tests.support.cli_runner import ROOT

MIB = 1 << 20
LIMIT_S = 60


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    cpu_s: float
    peak_mib: int
    last_line: str


def main() -> int:
    """Print the table; return 1 if a command ended with exit code 3, by a signal or after LIMIT_S."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.bounds", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    only = parser.parse_args().only
    is_wrong = False
    print("| input | bytes | exit code | CPU s | peak MiB | says |\n|---|---|---|---|---|---|")
    for name, (command, make) in ROWS.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="tracekit-bounds-") as folder:
            size = _write_in_fork(Path(folder), make)
            outcome = run([part.replace("{folder}", folder) for part in command])
        is_wrong |= outcome.code not in (0, 1, 2, 4)
        said = outcome.last_line.replace(folder, "DIR").replace("|", "/")[:140]
        print(f"| {name} | {size:,} | {outcome.code} | {outcome.cpu_s:.1f} | {outcome.peak_mib} | {said} |", flush=True)
    return is_wrong


def run(command: list[str]) -> Outcome:
    """Run a command of tracekit in a process of its own, for LIMIT_S at most."""
    environment = {**os.environ, "TRACEKIT_CRASH_REPORT": "0", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["timeout", str(LIMIT_S), sys.executable, "-P", "-m", "tracekit", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"XDG_CACHE_HOME": str(Path(tempfile.gettempdir(), f"tracekit-bounds-{os.getpid()}"))},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    cpu_s = used.ru_utime + used.ru_stime
    return Outcome(process.returncode, cpu_s, used.ru_maxrss // 1024, lines[-1] if process.returncode else lines[0])


def _write_in_fork(folder: Path, make: "Make") -> int:
    """Write the files of a row, and return their size. The peak of this process would count as that of the command."""
    pid = os.fork()
    if not pid:
        for name, content in make(folder).items():
            (folder / name).write_bytes(content)
        os._exit(0)
    os.waitpid(pid, 0)
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


Make = Callable[[Path], Mapping[str, bytes]]
_EVENT = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":1,"dur":2,"pid":1,"tid":1}'
_OPEN = b'{"traceEvents":['


def _file(name: str, content: Callable[[], bytes]) -> Make:
    return lambda _: {name: content()}


def _with_trace(name: str, content: Callable[[], bytes]) -> Make:
    return lambda _: {"rank00000.pt.trace.json": _trace(), name: content()}


def _trace() -> bytes:
    return json.dumps(kineto_files.trace(0, steps=3)).encode()


def _events(count: int, event: Callable[[int], str]) -> bytes:
    return _OPEN + ",".join(map(event, range(count))).encode() + b"]}"


def _begin(number: int) -> str:
    return f'{{"ph":"B","cat":"cpu_op","name":"f{number}","ts":{number},"pid":1,"tid":1}}'


def packed_packets(count: int) -> bytes:
    """A Perfetto packet that holds so many empty packets, compressed."""
    packed = structures.encoded((50, structures.LENGTH, zlib.compress(b"\x0a\x00" * count)))
    return structures.encoded((1, structures.LENGTH, packed))


def _bzip2_member() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rank0.json", bz2.compress(b" " * (8 * MIB)) * 300)
    data = bytearray(file.getvalue())
    for header, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(header) + place] = zipfile.ZIP_BZIP2
    return bytes(data)


def shared_snapshot(levels: int, width: int, key: str) -> bytes:
    """A memory snapshot with a value of `width ** levels` texts in a field of its segments."""
    block = {"size": 1, "requested_size": 1, "state": "inactive", "address": 0, "frames": []}
    segment = {
        "device": 0, "address": 0, "total_size": 512, "stream": 0, "segment_type": "small", "allocated_size": 0,
        "active_size": 0, "blocks": [block], "frames": [], "segment_pool_id": (0, 0),
    }  # fmt: skip
    segment[key] = _shared(levels, width)
    return pickle.dumps({"segments": [segment] * 100, "device_traces": [[]]})


def _metadata(fqn: Callable[[], Any], count: int) -> bytes:
    import torch.distributed.checkpoint.filesystem as filesystem
    import torch.distributed.checkpoint.metadata as metadata

    name = fqn()
    index = {metadata.MetadataIndex(fqn="w", index=number): None for number in range(count)}
    for key in index:
        object.__setattr__(key, "fqn", name)
    places = dict.fromkeys(index, filesystem._StorageInfo("__0_0.distcp", 0, 10))
    return pickle.dumps(metadata.Metadata({}, None, places))


def _objects(count: int) -> bytes:
    """A list of so many objects, in which each value takes the most memory for its bytes."""
    return b"[" + b'{"":0},' * count + b"{}]"


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def shared_metadata() -> bytes:
    """Metadata of a checkpoint whose names are one list with 10 million values."""
    return _metadata(lambda: _shared(7, 10), 100)


def _shared(levels: int, width: int) -> Any:
    shared: Any = ["x"]
    for _ in range(levels):
        shared = [shared] * width
    return shared


def _pipe(name: str, whole: Mapping[str, bytes]) -> Make:
    def make(folder: Path) -> Mapping[str, bytes]:
        os.mkfifo(folder / name)
        return whole

    return make


def _link(name: str, whole: Mapping[str, bytes], target: str = "/dev/zero") -> Make:
    def make(folder: Path) -> Mapping[str, bytes]:
        (folder / name).symlink_to(target)
        return whole

    return make


def _nested() -> bytes:
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("rank1.json", _trace())
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("more.zip", inner.getvalue())
        archive.writestr("rank0.json", _trace())
    return outer.getvalue()


def _tar(names: list[str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            content = _trace()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _seal(files: Any) -> bytes:
    return json.dumps({"schema": "x", "files": files, "sha256": "0"}).encode()


_CHECK = ("check", "{folder}", "--no-cache")
_HANG = ("hang", "{folder}")
_CHECKPOINT = ("checkpoint", "verify", "{folder}")
_MEMORY = ("memory", "{folder}/a.pickle")
_SCRUB = ("scrub", "{folder}", "{folder}-out")
ROWS: Mapping[str, tuple[tuple[str, ...], Make]] = {
    "an ordinary trace, to compare": (_CHECK, _file("rank0.json", _trace)),
    "50 million empty packets by gzip": (
        _CHECK, _file("rank0.pftrace.gz", lambda: gzip.compress(b"\x0a\x00" * 50_000_000))
    ),
    "50 million empty packets in a packet": (_CHECK, _file("rank0.pftrace", lambda: packed_packets(50_000_000))),
    "zip with 2.4 GB in a bzip2 member": (_CHECK, _file("run.zip", _bzip2_member)),
    "64 MB of spaces by gzip": (_CHECK, _file("rank0.json.gz", lambda: gzip.compress(b" " * 64_000_000))),
    "48 MB of spaces before a trace": (_CHECK, _file("rank0.json", lambda: b" " * 48_000_000 + _trace())),
    "lines before a trace": (_CHECK, _file("rank0.json", lambda: b"\n\t " * 4_000_000 + _trace())),
    "ph of 967 levels": (
        _CHECK, _file("rank0.json", lambda: _OPEN + _EVENT + b',{"ph":' + b"[" * 967 + b"]" * 967 + b"}]}")
    ),
    "ph of 967 levels, open": (_CHECK, _file("rank0.json", lambda: _OPEN + _EVENT + b',{"ph":' + b"[" * 967)),
    "every field of 967 levels": (
        _CHECK,
        _file(
            "rank0.json",
            lambda: _OPEN + b",".join(
                _EVENT[:-1] + b',"' + key + b'":' + b"[" * 967 + b"]" * 967 + b"}"
                for key in (b"name", b"cat", b"ts", b"dur", b"pid", b"tid", b"args", b"id", b"s")
            ) + b"]}",
        ),
    ),
    "7,000 begin events that never end (512 kB)": (_CHECK, _file("rank0.json", lambda: _events(7_000, _begin))),
    "70,000 begin events that never end": (_CHECK, _file("rank0.json", lambda: _events(70_000, _begin))),
    '2 million repeated {"ph":[': (
        _CHECK, _file("rank0.json", lambda: _OPEN + b'{"ph":[' * 2_000_000)
    ),
    '100,000 {"ph":[ in lines': (_CHECK, _file("rank0.json", lambda: _OPEN + b'{"ph":[\n' * 100_000)),
    "an invalid byte in a key": (
        _CHECK, _file("rank0.json", lambda: _trace().replace(b'"dur"', b'"d\xffur"', 1))
    ),
    "snapshot with a shared pool id": (_MEMORY, _file("a.pickle", lambda: shared_snapshot(6, 12, "segment_pool_id"))),
    "snapshot with shared blocks": (_MEMORY, _file("a.pickle", lambda: shared_snapshot(7, 10, "blocks"))),
    "snapshot with a shared odd key": (_MEMORY, _file("a.pickle", lambda: shared_snapshot(9, 10, "more"))),
    "metadata with shared names": (_CHECKPOINT, _file(".metadata", shared_metadata)),
    "metadata with a long shared name": (_CHECKPOINT, _file(".metadata", lambda: _metadata(lambda: "w" * MIB, 3000))),
    "metadata that builds 40 million lists": (
        _CHECKPOINT, _file(".metadata", lambda: pickle.PROTO + b"\x04](" + b"]" * 40_000_000 + b"e.")
    ),
    "snapshot with 20 million segments": (
        _MEMORY, _file("a.pickle", lambda: pickle.PROTO + b"\x04](" + b"}" * 20_000_000 + b"e.")
    ),
    "snapshot of 19 kB that unpacks to 20 million segments": (
        _MEMORY,
        _file("a.pickle", lambda: gzip.compress(pickle.PROTO + b"\x04](" + b"}" * 20_000_000 + b"e.")),
    ),
    "hang dump (pickle) with 20 million entries": (
        _HANG, _file("nccl_trace_rank_0", lambda: pickle.PROTO + b"\x04](" + b"}" * 20_000_000 + b"e.")
    ),
    "hang dump (JSON) with 20 million entries": (
        _HANG,
        _file("rank_0.json", lambda: b'{"version":"2.5","entries":' + _objects(20_000_000) + b"}"),
    ),
    "hang dump (JSON) of 200 levels": (
        _HANG, _file("rank_0.json", lambda: b'{"version":"2.5","entries":' + b"[" * 200 + b"]" * 200 + b"}")
    ),
    "seal with 20 million files": (
        _CHECKPOINT, _file("seal.json", lambda: b'{"sha256":"0","files":' + _objects(20_000_000) + b"}")
    ),
    "index with 20 million places": (
        _CHECKPOINT,
        _file("model.safetensors.index.json", lambda: b'{"weight_map":' + _objects(20_000_000) + b"}"),
    ),
    "safetensors header with 12 million values": (
        _CHECKPOINT, _file("a.safetensors", lambda: _safetensors(b'{"a":' + _objects(12_000_000) + b"}"))
    ),
    "metrics log with 20 million empty lines": (
        _CHECK, _with_trace("rank00000.metrics.jsonl", lambda: b"{}\n" * 20_000_000)
    ),
    "metrics log with a line of 10 million values": (
        _CHECK, _with_trace("rank00000.metrics.jsonl", lambda: b'{"step":1,"a":' + _objects(10_000_000) + b"}\n")
    ),
    "metrics log with 200,000 steps of 4 values": (
        _CHECK,
        _with_trace(
            "rank00000.metrics.jsonl",
            lambda: b"".join(b'{"step":%d,"a":1,"b":2,"c":3,"d":4}\n' % step for step in range(200_000)),
        ),
    ),
    "saved report with 20 million values": (
        ("compare", "{folder}/a.json", "{folder}/a.json"),
        _file("a.json", lambda: b'{"schema":"tracekit.report/1","findings":' + _objects(20_000_000) + b"}"),
    ),
    "checkpoint whose seal is a pipe": (_CHECKPOINT, _pipe("seal.json", {"a.pt": b"x"})),
    "checkpoint whose metadata is a link to /dev/zero": (_CHECKPOINT, _link(".metadata", {"__0_0.distcp": b"x"})),
    "checkpoint whose index is a pipe": (_CHECKPOINT, _pipe("model.safetensors.index.json", {"a.pt": b"x"})),
    "checkpoint with a link to /dev/zero": (_CHECKPOINT, _link("b.pt", {"a.pt": b"x"})),
    "checkpoint that is a pipe": (("checkpoint", "verify", "{folder}/a.pt"), _pipe("a.pt", {})),
    "sealed file is a pipe": (
        _CHECKPOINT, _pipe("w.pt", {"seal.json": _seal({"w.pt": {"bytes": 0, "sha256": "0"}})})
    ),
    "run whose trace is a pipe": (_CHECK, _pipe("rank1.json", {"rank0.json": _trace()})),
    "run whose trace is /dev/zero": (_CHECK, _link("rank1.json", {"rank0.json": _trace()})),
    "run whose manifest is a pipe": (_CHECK, _pipe("run.json", {"rank0.json": _trace()})),
    "run whose metrics log is a pipe": (_CHECK, _pipe("rank00000.metrics.jsonl", {"rank0.json": _trace()})),
    "run whose log is /dev/zero": (_CHECK, _link("rank00000.checkpoint.jsonl", {"rank0.json": _trace()})),
    "run whose snapshot is a pipe": (_CHECK, _pipe("rank00000.memory.pickle", {"rank0.json": _trace()})),
    "snapshot that is a pipe": (_MEMORY, _pipe("a.pickle", {})),
    "snapshot that is /dev/zero": (_MEMORY, _link("a.pickle", {})),
    "Nsight database that is a pipe": (_CHECK, _pipe("rank0.sqlite", {})),
    "archive that is a pipe": (("check", "{folder}/run.zip"), _pipe("run.zip", {})),
    "hang dump that is a pipe": (("hang", "{folder}"), _pipe("nccl_trace_rank_0", {})),
    "baseline that is a pipe": (
        ("check", "{folder}/rank0.json", "--baseline", "{folder}/b.json"), _pipe("b.json", {"rank0.json": _trace()})
    ),
    "settings that are /dev/zero": (
        ("check", "{folder}/rank0.json", "--config", "{folder}/s.toml"), _link("s.toml", {"rank0.json": _trace()})
    ),
    "history that is a pipe": (("history", "show", "--db", "{folder}/h.jsonl"), _pipe("h.jsonl", {})),
    "scrub of a run with a pipe": (_SCRUB, _pipe("rank1.json", {"rank0.json": _trace()})),
    "seal with a NUL in a name": (
        _CHECKPOINT, _file("seal.json", lambda: _seal({"a\0b": {"bytes": 1, "sha256": "0"}}))
    ),
    "seal with 1e400 bytes": (
        _CHECKPOINT, _file("seal.json", lambda: b'{"files":{"a":{"bytes":1e400,"sha256":"0"}},"sha256":"0"}')
    ),
    "seal with a size of 5,000 digits": (
        _CHECKPOINT,
        _file("seal.json", lambda: b'{"files":{"a":{"bytes":' + b"9" * 5000 + b',"sha256":"0"}},"sha256":"0"}'),
    ),
    "seal with a name of 100,000 folders": (
        _CHECKPOINT, _file("seal.json", lambda: _seal({"a/" * 100_000: {"bytes": 1, "sha256": "0"}}))
    ),
    "index with NUL and long names": (
        _CHECKPOINT,
        _file(
            "model.safetensors.index.json",
            lambda: json.dumps({"weight_map": {"a": "b\0c", "b": "x" * 10_000, "c": "../../x"}}).encode(),
        ),
    ),
    "metadata with NUL in a file's name": (
        _CHECKPOINT,
        _file(".metadata", lambda: _metadata(lambda: "w", 1).replace(b"__0_0.distcp", b"__0\x000.distcp")),
    ),
    "archive with a member name of 300 bytes": (
        ("check", "{folder}/run.tar.gz"), _file("run.tar.gz", lambda: _tar(["rank0.json", "a" * 300 + ".json"]))
    ),
    "archive in an archive": (("check", "{folder}/run.zip"), _file("run.zip", _nested)),
    "bzip2 of 2 GB": (_CHECK, _file("rank0.json.bz2", lambda: bz2.compress(b" " * MIB) * 2048)),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
