"""The reader on real runs: recorded samples and, where installed, the shared traces."""

import gzip
import json
import shutil
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest

from tests.support.cli_runner import tracekit
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.memory import steady_state
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.loader import load
from tracekit.rules.engine import check

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
NANOGPT = ROOT.parent / "shared" / "traces" / "nanogpt_h100_8ranks"
SAMPLE_NAMES = ("demo-fsdp2", "demo-yafsdp")
needs_nanogpt = pytest.mark.skipif(not NANOGPT.is_dir(), reason="the shared traces are not installed")


@pytest.fixture(scope="module", params=SAMPLE_NAMES)
def sample(request):
    return load(SAMPLES / request.param)


def raw_slices(path):
    """Plain Python: (category, name, start, end) of every slice, in exact ns on the file's own zero."""
    with gzip.open(path, "rt") as file:
        events = json.load(file, parse_float=Decimal)["traceEvents"]
    for event in events:
        if event.get("ph") == "X":
            start = int(Decimal(event["ts"]) * 1000)
            yield event.get("cat"), event["name"], start, start + int(Decimal(event["dur"]) * 1000)


def covered(spans):
    """Brute force: the length of a union, by a sweep in plain Python."""
    total, reach = 0, None
    for start, end in sorted(spans):
        if reach is None or start > reach:
            total, reach = total + end - start, end
        elif end > reach:
            total, reach = total + end - reach, end
    return total


@pytest.mark.accuracy
@needs_nanogpt
def test_breakdown_of_a_gpu_run_equals_plain_python_to_the_nanosecond():
    run = load(NANOGPT)
    assert run.ranks == tuple(range(8))
    rows = run.table(breakdown.by_rank)
    for rank in run.ranks:
        kernels = [s for s in raw_slices(NANOGPT / f"rank{rank}-chrome-trace.json.gz") if s[0] == "kernel"]
        communication_spans = [s[2:] for s in kernels if s[1].startswith("nccl")]
        compute_spans = [s[2:] for s in kernels if not s[1].startswith("nccl")]
        compute, exchanged = covered(compute_spans), covered(communication_spans)
        row = rows.filter(pl.col("rank") == rank).row(0, named=True)
        assert row["compute_ns"] == compute
        assert row["communication_ns"] == exchanged
        assert row["overlapped_ns"] == compute + exchanged - covered(compute_spans + communication_spans)
    first = rows.row(0, named=True)
    assert first["overlapped_ns"] / first["communication_ns"] == pytest.approx(0.159, abs=0.0005)


def test_parts_of_every_recorded_step_sum_to_its_duration(sample):
    rows = sample.table(breakdown.by_step)
    parts = pl.sum_horizontal("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert rows.height == 14
    assert rows.select((parts == pl.col("duration_ns")).all()).item()


def test_gloo_time_of_a_sample_equals_plain_python():
    sample = load(SAMPLES / "demo-fsdp2")
    rows = sample.table(breakdown.by_rank)
    for source in sample.sources:
        spans = [s[2:] for s in raw_slices(source.path) if s[1].startswith("gloo:")]
        row = rows.filter(pl.col("rank") == source.rank).row(0, named=True)
        assert row["communication_ns"] == covered(spans)


def test_fsdp2_hides_nothing_on_gloo_and_yafsdp_does():
    hidden = {}
    for name in SAMPLE_NAMES:
        rows = load(SAMPLES / name).table(breakdown.by_rank)
        hidden[name] = rows["overlapped_ns"].sum() / rows["communication_ns"].sum()
    assert hidden["demo-fsdp2"] < 0.01
    assert hidden["demo-yafsdp"] > 0.3


def test_collectives_of_a_sample_have_op_unit_and_size(sample):
    trace = sample.trace(0)
    both = trace.collectives.join(trace.activities, left_on="activity_id", right_on="id")
    reduced = both.filter(pl.col("op") == "reduce_scatter")
    assert reduced["name"].unique().to_list() == ["gloo:all_reduce"]
    assert (reduced["sent_bytes"] == 2 * reduced["received_bytes"]).all()
    assert {"layers.0", "layers.3"} <= set(reduced["unit"])
    assert set(reduced["phase"]) == {"backward"}


def test_only_the_dynamic_strategy_allocates_unit_buffers():
    calls = {name: load(SAMPLES / name).table(steady_state.unit_buffers).height for name in SAMPLE_NAMES}
    assert calls["demo-fsdp2"] > 0
    assert calls["demo-yafsdp"] == 0


def test_exposed_time_of_each_collective_equals_plain_python_and_saves_are_left_out(sample):
    trace = sample.trace(0)
    compute = trace.activities.filter(pl.col("kind") == "compute").select("start_ns", "dur_ns").rows()
    sent = trace.activities.filter(pl.col("kind") == "communication")
    own = exposed_communication.exposed_calls(trace)
    assert sent.height - own.height == sent.filter(pl.col("phase") == "checkpoint").height > 0
    for start, dur, exposed in own.select("start_ns", "dur_ns", "exposed_ns").rows():
        end = start + dur
        hidden = [(max(a, start), min(a + ns, end)) for a, ns in compute if a < end and a + ns > start]
        assert exposed == dur - covered(hidden)


def test_rules_judge_the_checkpoint_inside_a_sample(sample):
    codes = {finding.code: finding for finding in check(sample).findings}
    total = sample.trace(0).checkpoints.filter(pl.col("stage") == "total")["dur_ns"]
    assert codes["CKPT001"].evidence.filter(pl.col("stage") == "total", pl.col("rank") == 0)[
        "dur_ns"
    ].sort().to_list() == (total.sort().to_list())


def cut(path):
    data = (SAMPLES / "demo-fsdp2" / "rank00000.pt.trace.json.gz").read_bytes()
    path.write_bytes(data[:100])


BAD = {
    "missing": lambda path: None,
    "empty_folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "cut.json.gz": cut,
    "no_trace.json": lambda path: path.write_text('{"a": 1}'),
    "cut.json": lambda path: path.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2, "pid": 1'),
    "no_json.json": lambda path: path.write_text('{"traceEvents": [nonsense]}'),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_input_is_one_clear_line_and_exit_2(name, tmp_path):
    path = tmp_path / name
    BAD[name](path)
    with pytest.raises((InputError, BadTraceError)):
        load(path)
    done = tracekit("check", path, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(path) in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_one_bad_rank_among_good_ones_is_a_finding(tmp_path):
    run_folder = tmp_path / "run"
    shutil.copytree(SAMPLES / "demo-fsdp2", run_folder)
    second = run_folder / "rank00001.pt.trace.json.gz"
    second.write_bytes(second.read_bytes()[:100])
    run = load(run_folder)
    found = [f for f in check(run).findings if f.code == "DATA001"]
    assert run.ranks == (0,)
    assert {f.subject for f in found} == {"unreadable"}
    assert "rank00001" in found[0].message
    second.unlink()
    assert {f.subject for f in check(load(run_folder)).findings if f.code == "DATA001"} == {"missing_ranks"}


def test_a_trace_without_steps_is_one_window(tmp_path):
    path = tmp_path / "bare.json"
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 2.5}]
    path.write_text(json.dumps(events))
    run = load(path)
    assert run.table(breakdown.by_step).select("step", "compute_ns").rows() == [(None, 2500)]
    assert "no_steps" in run.table(trace_quality.data_quality)["kind"].to_list()


@pytest.mark.accuracy
@needs_nanogpt
def test_overlap_agrees_with_hta_over_the_kernels_that_hta_keeps(tmp_path):
    hta = pytest.importorskip("hta.trace_analysis", reason="needs the extra [hta]")
    shutil.copytree(NANOGPT, tmp_path / "traces")
    analysis = hta.TraceAnalysis(trace_dir=str(tmp_path / "traces"))
    theirs = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    for rank in range(8):
        hta_slices = analysis.t.get_trace(rank)
        hta_slices = hta_slices[hta_slices["stream"] >= 0]
        names = hta_slices["name"].map(dict(enumerate(analysis.t.symbol_table.get_sym_table())))
        spans = list(zip(hta_slices["ts"], hta_slices["ts"] + hta_slices["dur"], names, strict=True))
        collective = [s[:2] for s in spans if s[2].startswith("nccl")]
        compute = [s[:2] for s in spans if not s[2].startswith(("nccl", "Mem"))]
        overlap = covered(collective) + covered(compute) - covered(collective + compute)
        assert 100 * overlap / covered(collective) == pytest.approx(theirs[rank], abs=0.1)
