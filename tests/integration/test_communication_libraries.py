"""Recordings whose collectives another library runs are analyzed like NCCL's: exposed time, waits for late ranks."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.time import breakdown

ROOT = Path(__file__).parents[2]
RECORDED = ROOT.parent / "shared" / "traces" / "torchrec_v100_4ranks"
NAMES = {
    "all_gather": "multimem_all_gather_kernel<16>(char*, char*)",
    "reduce_scatter": "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int)",
    "all_reduce": "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 2>(float**)",
    "send_recv": "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*, int*)",
}


def renamed(folder, out):
    """Copy the traces of a run, with another library's kernels instead of NCCL's."""
    out.mkdir()
    for path in sorted(folder.rglob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        for event in document["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" in event["name"]:
                word = re.search(r"AllGather|ReduceScatter|AllReduce|SendRecv", event["name"])[0]
                op = re.sub(r"(?<!^)([A-Z])", r"_\1", word).lower()
                event["name"] = NAMES[op]
        (out / path.name).write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return tracekit.load(str(out), cache=False)


def test_another_library_s_kernels_in_a_recording_give_the_same_times_and_waits(tmp_path):
    if not RECORDED.is_dir():
        pytest.skip("needs the recordings of others")
    compare(RECORDED, tmp_path)


def test_another_library_s_kernels_in_a_simulated_run_give_the_same_times_and_waits(tmp_path):
    options = ["--strategy", "fsdp2", "--model", "llama2-7b", "--layers", "3", "--gpus", "16", "--seq", "2048"]
    options += ["--steps", "2", "--ranks-written", "2", "--fault", "slow-rank:1:1.4", "--out", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "tracekit", "simulate", *options], check=True, capture_output=True)
    compare(tmp_path / "run", tmp_path)


def compare(folder, tmp_path):
    before, after = tracekit.load(str(folder), cache=False), renamed(folder, tmp_path / "renamed")
    terms = ["rank", "step", *breakdown.TERMS]
    expected, times = (run.table(breakdown.by_step).select(terms) for run in (before, after))
    assert times.equals(expected)
    assert times["exposed_communication_ns"].sum() > 0
    keys = ["rank", "arrival_ns", "end_ns", "wait_ns"]
    expected, waits = (run.run_table(collective_instances.waits).select(keys).sort(keys) for run in (before, after))
    assert waits.equals(expected)
    assert waits.filter(pl.col("wait_ns") > 0).height > 10
