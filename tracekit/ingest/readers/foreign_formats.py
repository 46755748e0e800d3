"""Files of other tools that are often passed in place of a trace: what each is, and what to do with it.

A format is recognized by its first bytes (decompressed), else by the end of its name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tracekit.conventions import perfetto

_HEAD_BYTES = 64 << 10
_OWN_OUTPUT = re.compile(rb'"schema"\s*:\s*"tracekit\.([a-z]+)/')
_RECORD = "record with torch.profiler, or: tracekit record -- python train.py"
_NO_TRACE = "name a trace file or run"

Match = Callable[[bytes], bool]


@dataclass(frozen=True)
class ForeignFormat:
    """One format that tracekit does not read as a trace."""

    name: str
    """With its article."""
    advice: str
    matches: Match
    suffixes: tuple[str, ...] = ()
    """Ends of names, for files whose content does not show what they are."""


def _starts(*magics: bytes) -> Match:
    return lambda head: head.startswith(magics)


def _contains(*patterns: str) -> Match:
    compiled = [re.compile(pattern.encode(), re.I) for pattern in patterns]
    return lambda head: all(pattern.search(head) for pattern in compiled)


def _json(*keys: str) -> Match:
    """Return a match of JSON objects or arrays with all of these keys, or key and value, near their start."""
    has_keys = _contains(*(rf'"{key}"\s*:' if ":" not in key else key.replace(":", r"\s*:\s*") for key in keys))
    return lambda head: head.lstrip()[:1] in (b"{", b"[") and has_keys(head)


def _never(head: bytes) -> bool:  # noqa: ARG001
    return False


_SQLITE = b"SQLite format 3\0"
_EXPORT = "export a Kineto trace in its place: " + _RECORD

# The first match counts: formats of which others are a special case come later.
FORMATS = (
    ForeignFormat(
        "a Git LFS pointer, not the file it points to", "run: git lfs pull", _starts(b"version https://git-lfs")
    ),
    ForeignFormat(
        "a web page, not a trace, so the download failed",
        "download the file again",
        lambda head: head.lstrip()[:14].lower().startswith((b"<!doctype", b"<html", b"<?xml")),
    ),
    # Profilers of GPUs.
    ForeignFormat(
        "an Nsight Systems report",
        "export it, and name the exported file: nsys export --type sqlite REPORT",
        _never,
        (".nsys-rep", ".qdrep", ".qdstrm"),
    ),
    ForeignFormat(
        "a rocprofiler database (rocpd)",
        f"tracekit does not read it; {_RECORD}",
        lambda head: head.startswith(_SQLITE) and b"rocpd_" in head,
    ),
    ForeignFormat(
        "a nvprof database",
        f"tracekit does not read it; {_RECORD}",
        lambda head: head.startswith(_SQLITE) and b"CUPTI_ACTIVITY_KIND" in head,
        (".nvvp",),
    ),
    ForeignFormat("a SQLite database", _NO_TRACE, _starts(_SQLITE)),
    ForeignFormat(
        "an Nsight Compute report",
        f"it describes single kernels, not a run; {_RECORD}",
        _starts(b"NVR\0"),
        (".ncu-rep", ".ncu-repz"),
    ),
    ForeignFormat(
        "named like an XPlane profile (JAX, TensorFlow or PyTorch/XLA), but does not begin with a plane of one",
        "copy or record it again",
        _never,
        (".xplane.pb",),
    ),
    ForeignFormat(
        "a rocprof table (CSV)",
        f"it has sums, no events in time; {_RECORD}",
        lambda head: (
            bool(re.match(rb'"?(?:Index|Kind|Name|Agent_Id)"?,"?[A-Za-z_-]+"?,', head))
            and any(
                word in head for word in (b"KernelName", b"Kernel_Name", b"TotalDurationNs", b"Agent_Id", b"gpu-id")
            )
        ),
    ),
    # Profilers of CPUs and of Python.
    ForeignFormat(
        "a speedscope profile, as py-spy and others write it",
        f"it has samples, no events; {_RECORD}",
        _json(r'\$schema":"https://www\.speedscope\.app'),
    ),
    ForeignFormat(
        "a pyinstrument session", f"it has samples of one thread; {_RECORD}", _json("sample_count", "root_frame")
    ),
    ForeignFormat(
        "a scalene profile", f"it has sums, no events; {_RECORD}", _json("alloc_samples", "elapsed_time_sec")
    ),
    ForeignFormat("a memray recording", "open it with: memray flamegraph", lambda head: b"memray\0" in head[:64]),
    ForeignFormat("a Linux perf recording", "open it with: perf report", _starts(b"PERFILE2")),
    ForeignFormat(
        "a cProfile table (pstats)", f"it has sums, no events; {_RECORD}", _never, (".prof", ".pstats", ".cprof")
    ),
    ForeignFormat(
        "a file of folded call stacks, such as those of export_stacks or py-spy",
        f"they have samples, no events; {_RECORD}",
        lambda head: bool(re.match(rb"[^\n;]+;[^\n]+ \d+\r?\n", head)),
    ),
    # Other traces.
    ForeignFormat(
        "a Chakra execution trace (protobuf)",
        "tracekit reads the JSON files of ExecutionTraceObserver, together with the profiler's trace of the process",
        _never,
        (".et",),
    ),
    ForeignFormat(
        "named like a Perfetto trace, but does not begin with a packet of one",
        "copy or record it again",
        _never,
        tuple(f"{name}{packed}" for name in perfetto.SUFFIXES for packed in ("", ".gz", ".zst")),
    ),
    ForeignFormat("an OpenTelemetry trace (JSON)", _EXPORT, _json("resourceSpans")),
    ForeignFormat("a Jaeger trace (JSON)", _EXPORT, _json("data", "traceID")),
    ForeignFormat(
        "a VizTracer trace", f"it has Python calls, no PyTorch events; {_RECORD}", _json("viztracer_metadata")
    ),
    # Logs and results.
    ForeignFormat(
        "an NCCL debug log", f"tracekit does not read it; {_RECORD}", _contains(r"NCCL (?:INFO|WARN|TRACE) ")
    ),
    ForeignFormat(
        "a TensorBoard event file",
        f"it has scalars, no profiler events; {_RECORD}",
        lambda head: head[8:12] != b"" and b"brain.Event:" in head[:64],
    ),
    ForeignFormat(
        "a Weights & Biases log", f"it has scalars, no profiler events; {_RECORD}", _starts(b":W&B"), (".wandb",)
    ),
    ForeignFormat(
        "a table of averages, as key_averages().table() prints it",
        f"it has sums, no events; {_RECORD}",
        _contains(r"Self CPU %", r"# of Calls"),
    ),
    # Models and data.
    ForeignFormat(
        "a checkpoint of torch.save, not a trace", _NO_TRACE, _starts(b"PK\x03\x04"), (".pt", ".pth", ".ckpt")
    ),
    ForeignFormat("an empty zip archive", _NO_TRACE, _starts(b"PK\x05\x06")),
    ForeignFormat(
        "a safetensors checkpoint, not a trace",
        _NO_TRACE,
        lambda head: head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27 and b"data_offsets" in head,
        (".safetensors",),
    ),
    ForeignFormat("a NumPy array", _NO_TRACE, _starts(b"\x93NUMPY")),
    ForeignFormat("a Parquet table", f"tracekit reads no tables; {_NO_TRACE}", _starts(b"PAR1")),
    ForeignFormat("an Arrow table", f"tracekit reads no tables; {_NO_TRACE}", _starts(b"ARROW1")),
    ForeignFormat("an HDF5 file", _NO_TRACE, _starts(b"\x89HDF\r\n\x1a\n")),
    ForeignFormat("a Jupyter notebook", _NO_TRACE, _json("nbformat")),
    ForeignFormat(
        "an archive or compressed file of a kind that tracekit does not unpack (xz, bzip2, 7z, rar or lz4)",
        "unpack it and name the trace or its folder",
        _starts(b"\xfd7zXZ\0", b"BZh", b"7z\xbc\xaf\x27\x1c", b"Rar!", b"\x04\x22\x4d\x18"),
    ),
    ForeignFormat(
        "an image, document or program",
        _NO_TRACE,
        _starts(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"\x7fELF", b"MZ\x90", b"RIFF", b"#!"),
    ),
)


def describe(head: bytes, name: str) -> str | None:
    """A description of a file that is often passed in place of a trace, and what to do; None if it is another."""
    if not head.strip():
        return "the file is empty; record it again"
    if (match := _OWN_OUTPUT.search(head[:200])) is not None:
        return f"this is a {match[1].decode()} that tracekit wrote, not a trace; name a trace file or the run's folder"
    start = head[:_HEAD_BYTES]
    foreign = next((f for f in FORMATS if f.matches(start)), None) or _by_name(name.lower())
    if foreign is None:
        return None
    return f"this is {foreign.name}; {foreign.advice}"


def _by_name(name: str) -> ForeignFormat | None:
    return next((f for f in FORMATS if f.suffixes and name.endswith(f.suffixes)), None)
