"""Files of other tools and mislabelled files: each is named in one line, and the command ends with code 2."""

import cProfile
import gzip
import io
import json
import pickle
import sqlite3
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import tracekit
from tests.support import cli_runner
from tests.support.cli_runner import ROOT
from tracekit.errors import BadTraceError

RECORDED = ROOT / "tests" / "recordings" / "foreign"
CHROME = {"name": "f", "ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 2}

RECORDED_FILES = {
    "events.out.tfevents.1": "a TensorBoard event file",
    "folded.txt": "a file of folded call stacks",
    "host.xplane.pb": "an XPlane profile",
    "jax.trace.json.gz": "the Chrome trace of an XLA program",
    "memray.bin": "a memray recording",
    "pyinstrument.json": "a pyinstrument session",
    "speedscope.json": "a speedscope profile",
    "viztracer.json": "a Chrome trace without PyTorch events",
    "work.prof": "a cProfile table",
}


def chrome(*events, **keys):
    return json.dumps({"traceEvents": events or [CHROME], **keys}).encode()


def npy():
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def parquet():
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), file)
    return file.getvalue()


def checkpoint():
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, file)
    return file.getvalue()


def database(*statements):
    connection = sqlite3.connect(":memory:")
    for statement in statements:
        connection.execute(statement)
    return connection.serialize()


def execution_trace(folder):
    observer = ExecutionTraceObserver()
    observer.register_callback(str(folder / "et.json"))
    observer.start()
    torch.ones(3) + 1
    observer.stop()
    observer.cleanup()


def averages():
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(3) + 1
    return recorded.key_averages().table().encode()


def empty_zip():
    file = io.BytesIO()
    zipfile.ZipFile(file, "w").close()
    return file.getvalue()


SAFETENSORS = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
NSYS = database(
    "CREATE TABLE StringIds (id INTEGER, value TEXT)", "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)"
)
MADE = {
    "array.npy": (npy(), "a NumPy array"),
    "table.parquet": (parquet(), "a Parquet table"),
    "model.pt": (checkpoint(), "a checkpoint of torch.save"),
    "trace.json": (checkpoint(), "a checkpoint of torch.save"),
    "model.safetensors": (len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS, "a safetensors checkpoint"),
    "run.sqlite": (NSYS, "this Nsight Systems report has no GPU work, CUDA calls or NVTX ranges"),
    "rocpd.db": (database("CREATE TABLE rocpd_kernel (start INTEGER)"), "a rocprofiler database"),
    "ascend_pytorch_profiler_0.db": (
        database("CREATE TABLE STRING_IDS (id INTEGER, value TEXT)", "CREATE TABLE TASK (startNs INTEGER)"),
        "this database has no operator and no task on an NPU",
    ),
    "dump.json": (b'{"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}', "torch's flight recorder"),
    "nccl_trace_rank_0": (
        pickle.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}),
        "a dump of torch's flight recorder",
    ),
    "other.db": (database("CREATE TABLE t (a)"), "a SQLite database"),
    "run.nsys-rep": (b"\x00\x01\x02\x03" * 20, "an Nsight Systems report"),
    "old.qdrep": (b"\x00\x01\x02\x03" * 20, "an Nsight Systems report"),
    "kernel.ncu-rep": (b"NVR\0\0\0\0\0", "an Nsight Compute report"),
    "stats.csv": (b'"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n', "a rocprof table"),
    "kernels.csv": (b'"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name"\n', "a rocprof table"),
    "perf.data": (b"PERFILE2" + bytes(100), "a Linux perf recording"),
    "nccl.log": (b"node1:12:34 [0] NCCL INFO Bootstrap : Using eth0\n", "an NCCL debug log"),
    "averages.txt": (averages(), "a table of averages"),
    "chakra.0.et": (b"\x0f\x0a\x0d0.0.4\x00\x01", "a Chakra execution trace (protobuf)"),
    "run.pftrace": (b"\x0a\x04\x08\x01\x10\x02", "a Perfetto trace"),
    "spans.json": (b'{"resourceSpans": [{"scopeSpans": []}]}', "an OpenTelemetry trace"),
    "jaeger.json": (b'{"data": [{"traceID": "a", "spans": []}]}', "a Jaeger trace"),
    "notebook.json": (b'{"cells": [], "nbformat": 4}', "a Jupyter notebook"),
    "browser.json": (chrome({**CHROME, "cat": "v8"}), "without PyTorch events (1 slices; its categories: 'v8')"),
    "compiler.json": (chrome(beginningOfTime=1), "a Chrome trace without PyTorch events (1 slices)"),
    "megascan.json": (gzip.compress(chrome({**CHROME, "name": "allreduce"})), "a Chrome trace without PyTorch events"),
    "page.json": (b"<!DOCTYPE html><html>404</html>", "a web page"),
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
    "nothing.json": (b"", "the file is empty"),
    "zeros.json.gz": (gzip.compress(b""), "the file is empty"),
    "numbers.json": (b"[1, 2, 3]", "no traceEvents array"),
    "lines.json": (b'{"loss": 1}\n{"loss": 2}\n', "no traceEvents array"),
    "config.json": (b'{"lr": 0.1}', "no traceEvents array"),
    "picture.json": (b"\x89PNG\r\n\x1a\n" + bytes(20), "an image, document or program"),
    "library.json": (b"\x7fELF" + bytes(20), "an image, document or program"),
    "packed.tar.xz": (
        b"\xfd7zXZ\0" + bytes(20),
        "an archive or compressed file of a kind that tracekit does not unpack",
    ),
    "empty.zip": (empty_zip(), "an empty zip archive"),
    "snapshot.json": (pickle.dumps({"segments": [], "device_traces": []}), "a CUDA memory snapshot"),
    "report.json": (b'{"schema": "tracekit.report/3"}', "a report that tracekit wrote"),
    "cut.json": (b'{"schemaVersion": 1, "deviceProperties": [', "the file ends before its first event"),
}


@pytest.mark.parametrize("name", RECORDED_FILES)
def test_a_file_of_another_tool_is_named(name):
    with pytest.raises(BadTraceError) as caught:
        tracekit.load(RECORDED / name)
    assert RECORDED_FILES[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MADE)
def test_a_foreign_or_mislabelled_file_is_named(tmp_path, name):
    content, meaning = MADE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadTraceError) as caught:
        tracekit.load(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert meaning in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_execution_trace_is_named(tmp_path):
    execution_trace(tmp_path)
    with pytest.raises(BadTraceError, match=r"an execution trace of PyTorch .* put the profiler's trace of the same"):
        tracekit.load(tmp_path / "et.json")


def test_statistics_of_cprofile_are_named(tmp_path):
    recorded = cProfile.Profile()
    recorded.runcall(sum, [1])
    recorded.dump_stats(tmp_path / "run.pstats")
    with pytest.raises(BadTraceError, match="a cProfile table"):
        tracekit.load(tmp_path / "run.pstats")


def test_the_command_ends_with_code_2_and_one_line(tmp_path):
    (tmp_path / "run.nsys-rep").write_bytes(bytes(range(64)))
    ended = cli_runner.tracekit("check", tmp_path / "run.nsys-rep")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "this is an Nsight Systems report" in ended.stderr


def test_a_foreign_trace_in_the_folder_of_a_run_is_left_out(tmp_path):
    run = ROOT / "sample_traces" / "demo-yafsdp"
    for file in run.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "browser.json").write_bytes(chrome({**CHROME, "cat": "v8"}))
    issues = tracekit.load(tmp_path).data_quality
    assert issues.filter(path=str(tmp_path / "browser.json"))["kind"].to_list() == ["not_a_trace"]
