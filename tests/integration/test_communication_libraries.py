"""Recordings whose collectives another library runs are analyzed like NCCL's: exposed time, waits for late ranks."""

import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support.kineto_files import read_recording, write_recording
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.quality import undecided_kernels
from tracekit.analysis.time import breakdown
from tracekit.rules import engine
from tracekit.rules.data_quality import DoubtfulTrace

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
        document = read_recording(path)
        for event in document["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" in event["name"]:
                word = re.search(r"AllGather|ReduceScatter|AllReduce|SendRecv", event["name"])[0]
                op = re.sub(r"(?<!^)([A-Z])", r"_\1", word).lower()
                event["name"] = NAMES[op]
        write_recording(out / path.name, document)
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
    # A dispatch without a recorded launch is one of expert parallelism; NCCL's send and receive could be anything.
    others = pl.col("op") != "dispatch"
    expected, waits = (
        run.table(collective_instances.waits).filter(others).select(keys).sort(keys) for run in (before, after)
    )
    assert waits.equals(expected)
    assert waits.filter(pl.col("wait_ns") > 0).height > 10


def without_arguments(folder, out, rename, stream=None):
    """Copy the traces of a run with other names for the kernels of some ops, and without what describes collectives.

    The renamed kernels run on `stream`, if one is given.
    """
    out.mkdir()
    for path in sorted(folder.rglob("*.json.gz")):
        document = read_recording(path)
        events = []
        for event in document["traceEvents"]:
            name = str(event.get("name", ""))
            if re.match(r"c10d::|record_param_comms|nccl:", name):
                continue
            if event.get("cat") == "kernel" and "nccl" in name:
                word = re.search(r"AllGather|ReduceScatter|AllReduce|SendRecv", name)[0]
                kept = ("device", "stream", "correlation", "External id", "external id")
                args = {key: value for key, value in event["args"].items() if key in kept}
                moved = {"stream": stream} if stream is not None and word in rename else {}
                tid = {"tid": stream} if moved else {}
                event = event | {"name": rename.get(word, name), "args": args | moved} | tid
            events.append(event)
        write_recording(out / path.name, document | {"traceEvents": events})
    return tracekit.load(str(out), cache=False)


@pytest.mark.parametrize(
    "kernel", ["void deep_ep::internode_ll::dispatch<true, 7168>(void*)", "mscclKernel_AllToAll()"]
)
def test_waiting_inside_kernels_without_arguments_is_split_by_peers(kernel, tmp_path):
    if not RECORDED.is_dir():
        pytest.skip("needs the recordings of others")
    plain = tracekit.load(str(RECORDED))
    run = without_arguments(RECORDED, tmp_path / "run", {"SendRecv": kernel})
    expected, found = (each.table(collective_instances.waits) for each in (plain, run))
    many = expected.filter(pl.col("op") == "all_to_all")
    own = found.filter(pl.col("op").is_in(["dispatch", "all_to_all"]))
    assert own.height >= 0.9 * many.height
    assert own["wait_ns"].sum() == pytest.approx(many["wait_ns"].sum(), rel=0.1)


def test_undecided_kernels_that_end_together_are_reported(tmp_path):
    if not RECORDED.is_dir():
        pytest.skip("needs the recordings of others")
    run = without_arguments(RECORDED, tmp_path / "run", {"SendRecv": "combine_bias(float*)"}, stream=7)
    (row,) = run.table(undecided_kernels.ending_together).rows(named=True)
    assert row["ends_together"]
    assert row["start_spread_ns"] > 2 * row["end_spread_ns"]
    # On rank 2, a kernel that was moved to a stream of compute contains others there: it is left out as too long.
    assert {0, 1, 3} <= set(row["ranks"]) <= {0, 1, 2, 3}
    kinds = {found.subject: found for found in engine.check(run, [DoubtfulTrace()]).findings}
    assert "as in collectives" in kinds["undecided_ending_together"].message


def test_compute_with_a_misleading_name_does_not_end_together(tmp_path):
    if not RECORDED.is_dir():
        pytest.skip("needs the recordings of others")
    (tmp_path / "run").mkdir()
    for path in sorted(RECORDED.rglob("*.json.gz")):
        document = read_recording(path)
        for event in document["traceEvents"]:
            if event.get("cat") == "kernel" and "sgemm" in event["name"]:
                event["name"] = "combine_bias(float*)"
        write_recording(tmp_path / "run" / path.name, document)
    run = tracekit.load(str(tmp_path / "run"), cache=False)
    (row,) = run.table(undecided_kernels.ending_together).rows(named=True)
    assert not row["ends_together"]
