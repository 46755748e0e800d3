"""Kinds of inputs: what each draws, and the command that reads it."""

import copy
import functools
import gzip
import hashlib
import io
import json
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from tests.fuzz import mutations, recordings, structures
from tests.support import ascend_files, inspector_logs, kineto_files, rocprofv3_files, xplane_files
from tests.support.cli_runner import ROOT
from tests.support.sample_snapshots import MIB, Simulation, frame

FOLDER = "{folder}"
"""Stands in a command for the folder of the input's files."""
IN = "in"
QUERY = "query.sql"
"""What a command reads from stdin."""
RANK = "rank00000.pt.trace.json"

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Input:
    """Files and the command that reads them."""

    kind: str
    seed: int
    command: tuple[str, ...]
    files: Files


_DEVICE = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000, "numSms": 132}
_GROUP = {
    "Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "Group size": 2, "dtype": "Float",
    "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
    "In split size": "[]", "Out split size": "[]", "Rank": 0, "Seq": 3,
}  # fmt: skip
_SHAPES = {
    "External id": 7, "Sequence number": 3, "Fwd thread id": 0, "Input Dims": [[8, 16], [16, 4], []],
    "Input type": ["float", "float", "Scalar"], "Input Strides": [[16, 1], [4, 1], []],
    "Concrete Inputs": ["", "", "1"], "Record function id": 0,
}  # fmt: skip
# What the reader also knows: shapes, the arguments of a collective, memory, waits, Python frames, names, flows, pairs.
_EVENTS = [
    kineto_files.slice_("cpu_op", "aten::mm", 150, 20, tid=1, **_SHAPES),
    kineto_files.slice_("cuda_runtime", "cudaLaunchKernel", 155, 3, tid=1, correlation=71),
    kineto_files.slice_("kernel", "gemm_64x64", 205, 40, tid=7, device=0, stream=7, correlation=71, grid=[4, 4, 1]),
    kineto_files.slice_("cpu_op", "record_param_comms", 480, 10, tid=1, **_GROUP),
    kineto_files.slice_("kernel", "ncclDevKernel_AllReduce", 500, 100, tid=8, device=0, stream=8, **_GROUP),
    kineto_files.slice_("cuda_sync", "Event Sync", 700, 50, tid=9, stream=9, device=0, wait_on_stream=8),
    kineto_files.slice_("python_function", "train.py(12): step", 120, 500, tid=1, **{"Python id": 1}),
    kineto_files.slice_("gpu_memcpy", "Memcpy HtoD", 720, 30, tid=9, device=0, stream=9, bytes=4096),
    kineto_files.memory_event(160, address=1 << 40, delta=512, allocated=512, reserved=1 << 21),
    *(
        kineto_files.slice_("user_annotation", name, 760 + 4 * place, 3, tid=1)
        for place, name in enumerate(("PP:0F1", "PP:1SEND_F0", "PP:(0F1;1B0)OVERLAP_F_B", "Forward 3", "micro-batch 2"))
    ),
    *(
        kineto_files.slice_("kernel", name, 600 + 12 * place, 10, tid=7, device=0, stream=7, grid=[132, 2, 1])
        for place, name in enumerate(
            (
                "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align8",
                "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(float*)",
                "void CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 2, 64, 64>(float*)",
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            )
        )
    ),
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "thread 1 (python)"}},
    {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 150, "cat": "ac2g", "name": "ac2g"},
    {"ph": "B", "cat": "user_annotation", "name": "Optimizer.step#Adam.step", "pid": 1, "tid": 1, "ts": 800},
    {"ph": "E", "cat": "user_annotation", "name": "Optimizer.step#Adam.step", "pid": 1, "tid": 1, "ts": 900},
]


def drawn(kind: str, seed: int) -> Input:
    """Return the input of a kind with this seed."""
    return made(kind, seed, Random(f"{kind} {seed}"))


def made(kind: str, seed: int, random: Random) -> Input:
    """Return the input of a kind that the numbers of `random` lead to."""
    command, make = KINDS[kind]
    if kind == RECORDED_RUN:
        command = random.choice((CHECK, CHECK, *OTHER_COMMANDS.values()))
    return Input(kind, seed, command, make(random))


def _trace(random: Random) -> dict[str, Any]:
    made = kineto_files.trace(0, steps=random.choice((1, 3)), last=random.random() < 0.5, deviceProperties=[_DEVICE])
    made["traceEvents"] = [*made["traceEvents"], *_EVENTS]
    return made


def _json_of(document: Any, random: Random) -> bytes:
    """Return a document as JSON, changed as a value, as text, or both."""
    draw = random.random()
    if draw < 0.45:
        for _ in range(random.choice((1, 1, 3, 10))):
            document = mutations.value(document, random)
        data = json.dumps(document).encode()
    elif draw < 0.75:
        data = mutations.json_text(document, random).encode()
    else:
        data = mutations.text(json.dumps(document).encode(), random)
    return data if random.random() < 0.85 else mutations.text(data, random)


def _trace_bytes(random: Random) -> bytes:
    return json.dumps(_trace(random)).encode()


def _traces(random: Random) -> Files:
    return {RANK: _json_of(_trace(random), random)}


def _merged(random: Random) -> Files:
    events = [
        {**event, "args": {**event.get("args", {}), "rank": rank}}
        for rank in (0, 1)
        for event in kineto_files.trace(rank, steps=1)["traceEvents"]
    ]
    if random.random() < 0.3:
        random.choice(events)["args"]["rank"] = random.choice((*mutations.VALUES, 1 << 40, 1 << 19))
    return {"merged.json": _json_of({"traceEvents": events}, random)}


def _packed(random: Random) -> Files:
    plain = _trace_bytes(random)
    half = random.randrange(len(plain))
    packed = random.choice(
        (
            gzip.compress(plain),
            gzip.compress(plain[:half]) + gzip.compress(plain[half:]),
            gzip.compress(b"") * 20 + gzip.compress(plain),
            gzip.compress(plain[:half]) + b"between" + gzip.compress(plain[half:]),
            pa.compress(plain, codec="zstd", asbytes=True),
        )
    )
    suffix = random.choice((".gz", ".zst", ""))
    return {RANK + suffix: mutations.text(packed, random)}


def _two_ranks(random: Random) -> dict[str, bytes]:
    return {f"rank0000{rank}.pt.trace.json": json.dumps(kineto_files.trace(rank, steps=1)).encode() for rank in (0, 1)}


def _two_runs(random: Random) -> Files:
    before, after = _two_ranks(random), _two_ranks(random)
    name = random.choice(sorted(after))
    after[name] = _json_of(_trace(random), random)
    return {
        f"{run}/{name}": data for run, files in (("before", before), ("after", after)) for name, data in files.items()
    }


_MANIFEST = {
    "schema": "tracekit.run/1", "strategy": "fsdp2", "world_size": 2, "mesh": {"dp_shard": 2}, "model": "tiny",
    "arguments": {"steps": 3, "lr": 0.1}, "versions": {"torch": "2.13.0"}, "host": "node1",
    "checkpoint": {"bytes": 100, "every_steps": 2},
}  # fmt: skip
_METRICS = [
    {"step": step, "step_time_ns": 1_000_000 + step, "tokens_per_second": 10.5, "loss": 1.5, "data_wait_ns": 5}
    for step in range(4)
]
_SAVES = [
    {"step": 1, "stage": stage, "start_ns": 1_000 * place, "dur_ns": 900, "bytes": 4096, "save": 0}
    for place, stage in enumerate(("snapshot", "serialize", "write", "fsync"))
]


def _manifests(random: Random) -> Files:
    return {**_two_ranks(random), "run.json": _json_of(_MANIFEST, random)}


def _lines(rows: list[dict[str, Any]], random: Random) -> bytes:
    lines = [json.dumps(row).encode() for row in rows]
    place = random.randrange(len(lines))
    lines[place] = _json_of(rows[place], random)
    return b"\n".join(lines) + random.choice((b"", b"\n"))


def _metrics(random: Random) -> Files:
    return {**_two_ranks(random), "rank00000.metrics.jsonl": _lines(_METRICS, random)}


def _saves(random: Random) -> Files:
    return {**_two_ranks(random), "rank00000.checkpoint.jsonl": _lines(_SAVES, random)}


def _snapshot() -> Any:
    made = Simulation()
    blocks = [made.malloc(size * MIB) for size in (1, 5, 30, 2)]
    made.events[-1]["frames"] = [frame("at::_ops::mm::call(at::Tensor)"), frame("forward", 12)]
    made.free(blocks[2])
    made.malloc(20 * MIB)
    document = made.document()
    document["device_traces"][0].append(
        {"action": "oom", "device_free": 5, "size": 1 << 30, "stream": 0, "time_us": 9, "frames": []}
    )
    return document


def _snapshots(random: Random) -> Files:
    document = _snapshot()
    for _ in range(random.choice((0, 1, 1, 3))):
        document = mutations.value(document, random)
    data = pickle.dumps(document, random.choice((2, 4, 5)))
    draw = random.random()
    if draw < 0.4:
        data = mutations.text(data, random)
    elif draw < 0.6:
        data = structures.pickled(data, random)
    return {"a.pickle": data}


def _archives(random: Random) -> Files:
    traces: dict[str, bytes] = {**_two_ranks(random), "run.json": json.dumps(_MANIFEST).encode()}
    if random.random() < 0.3:
        traces |= _traces(random)
    file = io.BytesIO()
    if random.random() < 0.5:
        with tarfile.open(fileobj=file, mode=random.choice(("w", "w:gz"))) as archive:
            for name, content in traces.items():
                member = tarfile.TarInfo(_member_name(name, random))
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in traces.items():
                archive.writestr(_member_name(name, random), content)
    data = file.getvalue()
    data = mutations.text(data, random) if random.random() < 0.6 else data
    return {random.choice(("run.tar.gz", "run.zip", "run.json")): data}


def _member_name(name: str, random: Random) -> str:
    prefixes = ("../", "/", "a/../", "a" * 300 + "/", "\n", "\u202e", "::error::", "./", "a/b/")
    return (random.choice(prefixes) if random.random() < 0.25 else "") + name


def _safetensors(random: Random) -> Files:
    header = {
        "__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]},
    }  # fmt: skip
    text = _json_of(header, random)
    size = random.choice((len(text), len(text) + 1, 1 << 40, 0)) if random.random() < 0.3 else len(text)
    return {"model.safetensors": size.to_bytes(8, "little") + text + bytes(16)}


@functools.cache
def _baseline() -> Any:
    return json.loads((ROOT / "sample_traces" / "ci" / "baseline.json").read_bytes())


def _baselines(random: Random) -> Files:
    document = copy.deepcopy(_baseline())
    if random.random() < 0.5:
        return {**_two_ranks(random), "baseline.json": _json_of(document, random)}
    # A number for a number is read and compared; most other changes are refused at once.
    for _ in range(random.choice((1, 3, 30))):
        holder, key = mutations.number_place(document, random)
        integers, others = (0, 1, -1, 2**53, 2**63 - 1, 10**9), (0.0, -0.0, 1e308, 5e-324, 0.5, -1e9)
        holder[key] = random.choice(integers if type(holder[key]) is int else others)
    return {**_two_ranks(random), "baseline.json": json.dumps(document).encode()}


def _scrubbed(random: Random) -> Files:
    files = {**_packed(random), "run.json": _json_of(_MANIFEST, random)}
    return {f"{IN}/{name}": content for name, content in files.items()}


_SETTINGS = """fail_on = "error"
ignore = [{code = "MEM003", reason = "known", until = 2027-01-31}]
[rules.COMM001]
max_exposed_ratio = 0.3
[devices."NVIDIA H100 80GB HBM3"]
peak_bf16_tflops = 800.0
memory_gb_per_s = 3000
[budget]
step_time = "412ms"
exposed_communication_ratio = 0.15
peak_reserved = "70GiB"
[[budget.where]]
rank = "0-3"
peak_allocated = "60GiB"
"""
_SETTING_VALUES = (
    *mutations.NUMBERS, "[" * 3000 + "]" * 3000, "{}", '"x"', "[]", "true", "1979-05-27T07:32:00Z", "inf", "-nan",
    '"*"', '"1e400ms"', '"nanms"', '"-5%"', '"1e-9s"', '"9e300GiB"', '"never"', '"5-1"', '"0-99999999999"',
    '"\\u202e"', '"%"',
)  # fmt: skip


def _settings(random: Random) -> Files:
    text = _SETTINGS.encode()
    if random.random() < 0.8:
        value = random.choice(re.findall(r'= (".*?"|[\d.]+)', _SETTINGS))
        alike = [each for each in _SETTING_VALUES if each.startswith('"') == value.startswith('"')]
        changed = random.choice(alike if random.random() < 0.8 else _SETTING_VALUES)
        text = text.replace(f"= {value}".encode(), f"= {changed}".encode(), 1)
    else:
        text = mutations.text(text, random)
    return {**_two_ranks(random), "tracekit.toml": text}


HANGS = ROOT / "tests" / "recordings" / "hangs"
HANG_CASES = ("skipped_collective", "opposite_groups", "data_loader", "killed")


def _dumps(random: Random) -> Files:
    folder = random.choice([*(HANGS / case for case in HANG_CASES), HANGS.with_name("hangs_nccl") / "lost_message"])
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    name = random.choice(sorted(files))
    is_json = name.endswith(".json")
    changed = _json_of(json.loads(files[name]), random) if is_json else mutations.text(files[name], random)
    if is_json and random.random() < 0.3:
        document = mutations.value(json.loads(files[name]), random)
        return {**files, name: changed, "rank9.pickle": pickle.dumps(document, 4)}
    return {**files, name: changed}


RECORDINGS = ROOT / "tests" / "recordings"


def _files_of(folder: str, names: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((RECORDINGS / folder).glob(names))}


def _execution_traces(random: Random) -> Files:
    files = _files_of("execution_traces/without_shapes", "rank0*")
    name = "rank0.et.json.gz"
    text = gzip.decompress(files[name])
    if random.random() < 0.5:
        document = json.loads(text)
        nodes = document["nodes"]
        for _ in range(random.randint(1, 8)):
            at = random.randrange(len(nodes))
            nodes[at] = mutations.value(nodes[at], random)
        return {**files, name: json.dumps(document).encode("utf-8", "surrogatepass")}
    return {**files, name: mutations.text(text, random)}


def _io_logs(random: Random) -> Files:
    files = {**_files_of("dftracer", "rank00000.*"), **_files_of("dftracer", "*.pfw.gz")}
    name = random.choice([name for name in files if name.endswith(".pfw.gz")])
    recorded = gzip.decompress(files[name]).splitlines()
    lines = list(recorded)
    for _ in range(random.randint(1, 20)):
        at = random.randrange(len(lines))
        document = json.loads(recorded[at]) if recorded[at][:1] == b"{" else None
        changed = "" if document is None else mutations.json_text(mutations.value(document, random), random)
        lines[at] = changed.encode("utf-8", "surrogatepass")
    text = b"\n".join(lines)
    return {**files, name: mutations.text(text, random) if random.random() < 0.3 else text}


def _collective_logs(random: Random) -> Files:
    of_ranks = inspector_logs.job(2, random.choice((1, 8, 40)), late_rank=1)
    is_verbose = random.random() < 0.5
    files = {}
    for rank, calls in enumerate(of_ranks):
        records = [inspector_logs.record(call, rank, 2, verbose=is_verbose) for call in calls]
        for _ in range(random.choice((0, 1, 5))):
            place = random.randrange(len(records))
            records[place] = mutations.value(records[place], random)
        text = "\n".join(mutations.json_text(record, random) for record in records).encode("utf-8", "surrogatepass")
        files[f"node0-pid{rank}.log"] = mutations.text(text, random) if random.random() < 0.3 else text
    return files


def _trainer_logs(random: Random) -> Files:
    files = {}
    for name, packed in _files_of("torchtitan_logs", "*.jsonl.gz").items():
        lines = gzip.decompress(packed).splitlines()[: random.choice((3, 40, 300))]
        for place in random.sample(range(len(lines)), random.choice((0, 1, 3))):
            changed = mutations.value(json.loads(lines[place]), random)
            lines[place] = mutations.json_text(changed, random).encode("utf-8", "surrogatepass")
        text = b"\n".join(lines)
        files[name.removesuffix(".gz")] = mutations.text(text, random) if random.random() < 0.3 else text
    return files


@functools.cache
def _perfetto_files() -> tuple[bytes, ...]:
    import tempfile
    from pathlib import Path

    import tracekit
    from tests.support import perfetto_files
    from tracekit.report.export import perfetto

    trace = kineto_files.trace(0, steps=1)
    slices = [event for event in [*trace["traceEvents"], *_EVENTS] if event["ph"] == "X"]
    others = (perfetto_files.of_kineto(slices, 10**18, interned=interned) for interned in (False, True))
    with tempfile.TemporaryDirectory() as folder:
        path = kineto_files.write(Path(folder, RANK), {**trace, "traceEvents": [*trace["traceEvents"], *_EVENTS]})
        exported = io.BytesIO()
        perfetto.write(tracekit.load(path, cache=False), exported)
    return (exported.getvalue(), *others)


def _perfetto(random: Random) -> Files:
    data = random.choice(_perfetto_files())
    change = structures.protobuf if random.random() < 0.7 else mutations.text
    for _ in range(random.choice((1, 1, 3, 20))):
        data = change(data, random)
    return {"run.pftrace": data}


def _rocprofv3(random: Random) -> Files:
    return {"rank0_results.json": _json_of(rocprofv3_files.training(random.choice((1, 5))), random)}


def _xplane(random: Random) -> Files:
    data = random.choice((xplane_files.gpu(), xplane_files.tpu()))
    change = structures.protobuf if random.random() < 0.8 else mutations.text
    for _ in range(random.choice((1, 1, 3, 20))):
        data = change(data, random)
    return {"host.xplane.pb": data}


@functools.cache
def _nsight_file() -> bytes:
    import tempfile
    from decimal import Decimal
    from pathlib import Path

    from tests.support import nsight_export

    slices = json.loads(json.dumps([*kineto_files.trace(0, steps=1)["traceEvents"], *_EVENTS]), parse_float=Decimal)
    known = [
        event
        for event in slices
        if event["ph"] == "X" and event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime")
    ]
    with tempfile.TemporaryDirectory() as folder:
        export = nsight_export.Export(Path(folder, "rank0.sqlite"), "2023.4")
        nsight_export.add_process(export, known, 1, Decimal(0))
        of = {"globalPid": nsight_export.HOST | 1 << 24, "deviceId": 0, "contextId": 1, "streamId": 7}
        for i in range(40):
            name = export.text(f"ncclDevKernel_AllReduce_{i}" if i % 3 else f"gemm_{i}")
            when = {"start": 1000 * i, "end": 1000 * i + 900, "correlationId": i}
            export.insert("CUPTI_ACTIVITY_KIND_KERNEL", **when, **of, demangledName=name)
        export.close()
        return export.path.read_bytes()


def _nsight(random: Random) -> Files:
    return {"rank0.sqlite": _changed_database(_nsight_file(), random, structure_ratio=0.7)}


def _changed_database(data: bytes, random: Random, *, structure_ratio: float) -> bytes:
    """Bytes of an SQLite file with changes: in this ratio of the cases of its rows and tables, else of any bytes."""
    change = structures.sqlite if random.random() < structure_ratio else mutations.text
    for _ in range(random.choice((1, 1, 3, 20))):
        data = change(data, random)
    return data


@functools.cache
def _ascend_file() -> bytes:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return ascend_files.write(Path(folder, "rank0.db"), ascend_files.training(steps=3)).read_bytes()


def _ascend(random: Random) -> Files:
    return {"ascend_pytorch_profiler_0.db": _changed_database(_ascend_file(), random, structure_ratio=0.8)}


def _checkpoints(random: Random) -> Files:
    files = _files_of("distributed_checkpoint", "*")
    draw = random.random()
    if draw < 0.4:
        files[".metadata"] = structures.pickled(files[".metadata"], random)
    elif draw < 0.6:
        files["__0_0.distcp"] = mutations.text(files["__0_0.distcp"], random)
    else:
        files["seal.json"] = _seal(json.loads(files["seal.json"]), random)
    if draw < 0.3:
        del files["seal.json"]
    return files


def _seal(document: Any, random: Random) -> bytes:
    """Return a seal that is changed; mostly with the digest of its changed content, which is then read."""
    if random.random() < 0.2:
        return _json_of(document, random)
    changed = mutations.value({key: value for key, value in document.items() if key != "sha256"}, random)
    if isinstance(changed, dict):
        changed["sha256"] = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    return json.dumps(changed).encode()


@functools.cache
def _report() -> Any:
    from tests.support import cli_runner

    return json.loads(cli_runner.tracekit("check", "--sample", "--format", "json").stdout)


def _reports(random: Random) -> Files:
    return {"report.json": _json_of(_report(), random)}


@functools.cache
def _history() -> bytes:
    import tempfile
    from pathlib import Path

    from tests.support import cli_runner

    with tempfile.TemporaryDirectory() as folder:
        report, file = Path(folder, "report.json"), Path(folder, "runs.duckdb")
        report.write_text(json.dumps(_report()))
        for commit in ("a1", "b2"):
            cli_runner.tracekit("history", "add", str(report), "--db", str(file), "--commit", commit)
        return file.read_bytes()


def _histories(random: Random) -> Files:
    return {"runs.duckdb": mutations.text(_history(), random)}


_EXPRESSIONS = (
    "dur_ns", "name", "rank", "start_ns", "kind", "*", "count(*)", "sum(dur_ns)", "max(name)", "list(name)", "NULL",
    "{'a': dur_ns}", "map([name], [1])", "[1, NULL]", "DATE '9999-12-31' + INTERVAL 1 DAY", "TIMESTAMP 'infinity'",
    "DATE '-infinity'", "1e400", "'NaN'::DOUBLE", "170141183460469231731687303715884105727", "1::DECIMAL(38,37)",
    "TIME '24:00:00'", "INTERVAL '1 year -3 days'", "'\\x00'::BLOB", "chr(0)", "repeat('x', 100000000)",
    "repeat(name, 1000000)", "generate_series(1, 100000000)", "uuid()", "'a'::BIT", "(SELECT x FROM (SELECT 1) t(x))",
    "dur_ns / 0", "dur_ns % 0", "-9223372036854775808::BIGINT * -1", "hugeint_max", "regexp_matches(name, '(a+)+$')",
    "levenshtein(repeat('a', 100000), repeat('b', 100000))", "array_agg(dur_ns)[:5]", "struct_pack(a := [name])",
    "TIMESTAMPTZ '294247-01-01'", "x'ff'", "getenv('HOME')", "read_text('/etc/passwd')", "union_value(a := 1)",
)  # fmt: skip
_SOURCES = (
    "ops",
    "activities",
    "steps",
    "range(1000000000)",
    "ops a, ops b, ops c",
    "'/etc/passwd'",
    "lanes",
    "nothing",
)


def _queries(random: Random) -> Files:
    expressions = ", ".join(random.choices(_EXPRESSIONS, k=random.choice((1, 2, 5))))
    sql = f"SELECT {expressions} FROM {random.choice(_SOURCES)}"
    sql += random.choice(("", " GROUP BY ALL", " ORDER BY ALL", " LIMIT 5", " WHERE rank > 0", " UNION ALL SELECT 1"))
    if random.random() < 0.1:
        sql = random.choice(
            ("(" * 5000 + sql, sql + ";" + sql, "WITH RECURSIVE t AS (SELECT 1 UNION ALL SELECT * FROM t) " + sql)
        )
    data = sql.encode()
    return {**_two_ranks(random), QUERY: mutations.text(data, random) if random.random() < 0.3 else data}


CHECK = ("check", FOLDER, "--format", "json", "--no-cache")
_JSON = ("--format", "json", "--no-cache")
OTHER_COMMANDS: dict[str, tuple[str, ...]] = {
    "what if": ("whatif", FOLDER, *_JSON),
    "tune": ("tune", FOLDER, *_JSON),
    "critical path": ("whatif", "--critical-path", FOLDER, *_JSON),
    "kernels": ("kernels", FOLDER, "--by", "name,op,shapes,module,unit,phase", *_JSON),
    "operators": ("kernels", FOLDER, "--of", "host", "--by", "name,shapes,module,unit,phase,span", *_JSON),
    "steps": ("summary", FOLDER, "--by", "step", *_JSON),
    "flame graph": ("kernels", "--by", "stack", FOLDER, "-o", f"{FOLDER}/out.speedscope.json", "--no-cache"),
    "Perfetto export": ("export", FOLDER, "-o", f"{FOLDER}/out.pftrace", "--no-cache"),
    "page": ("export", FOLDER, "--format", "html", "-o", f"{FOLDER}/out.html", "--no-cache"),
    "memory": ("memory", FOLDER, *_JSON),
}
"""Commands that read the same traces as `check`, by the kind of their inputs."""
RECORDED_RUN = "recorded run"
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Random], Files]]] = {
    "trace": (CHECK, _traces),
    "merged trace": (CHECK, _merged),
    RECORDED_RUN: (CHECK, recordings.changed),
    "packed trace": (CHECK, _packed),
    "archive": (CHECK, _archives),
    "Perfetto trace": (CHECK, _perfetto),
    "XPlane profile": (CHECK, _xplane),
    "rocprofv3 results": (CHECK, _rocprofv3),
    "Nsight Systems export": (CHECK, _nsight),
    "Ascend database": (CHECK, _ascend),
    "manifest": (CHECK, _manifests),
    "metrics log": (CHECK, _metrics),
    "checkpoint log": (CHECK, _saves),
    "baseline": ((*CHECK, "--baseline", f"{FOLDER}/baseline.json"), _baselines),
    "settings": ((*CHECK, "--config", f"{FOLDER}/tracekit.toml"), _settings),
    "summary": (("summary", FOLDER, "--format", "json", "--no-cache"), _traces),
    **{name: (command, _traces) for name, command in OTHER_COMMANDS.items()},
    "comparison": (("compare", f"{FOLDER}/before", f"{FOLDER}/after", *_JSON), _two_runs),
    "scrub": (("scrub", f"{FOLDER}/{IN}", f"{FOLDER}/scrubbed"), _scrubbed),
    "execution trace": (CHECK, _execution_traces),
    "I/O log": (CHECK, _io_logs),
    "log of collectives": (CHECK, _collective_logs),
    "log of a trainer": (CHECK, _trainer_logs),
    "hang dump": (("hang", FOLDER, "--format", "json"), _dumps),
    "memory snapshot": (("memory", f"{FOLDER}/a.pickle", "--format", "json"), _snapshots),
    "safetensors": (("checkpoint", "verify", FOLDER), _safetensors),
    "distributed checkpoint": (("checkpoint", "verify", FOLDER), _checkpoints),
    "saved report": (("history", "add", f"{FOLDER}/report.json", "--db", f"{FOLDER}/runs.duckdb"), _reports),
    "history": (("history", "show", "--db", f"{FOLDER}/runs.duckdb", "--format", "json"), _histories),
    "SQL query": (
        ("query", FOLDER, "-", "--format", "json", "--no-cache", "--timeout", "2", "--memory", "0.02"),
        _queries,
    ),
}
