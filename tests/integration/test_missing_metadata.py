"""Recordings without the metadata that older PyTorch versions, other backends and tools leave out."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tracekit
from tests.support.kineto_files import read_recording, write_recording
from tests.support.selection import others_in_accuracy
from tracekit.analysis.parallelism import axis_communication, group_axes, pipeline_stages
from tracekit.model.run import Run
from tracekit.rules.rule import Severity
from tracekit.sync import alignment, collective_matching

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
PARALLELISM = ROOT / "sample_traces" / "parallelism"
PUBLIC = ROOT.parent / "shared" / "traces"
Trace = dict[str, Any]
Change = Callable[[int, Trace], Trace]


def without(folder: Path, tmp_path: Path, *changes: Change, ranks: tuple[int, ...] | None = None) -> Run:
    """Return the run of a folder's traces alone, each changed, without a manifest and without some ranks."""
    for rank, path in enumerate(sorted(folder.glob("*.json.gz"))):
        trace = read_recording(path)
        for change in changes:
            trace = change(rank, trace)
        if ranks is None or rank in ranks:
            write_recording(tmp_path / f"rank{rank}.json", trace)
    return tracekit.load(tmp_path, cache=False)


def events(change: Callable[[Trace], Trace | None]) -> Change:
    return lambda _, trace: trace | {"traceEvents": [new for each in trace["traceEvents"] if (new := change(each))]}


def without_args(*names: str) -> Change:
    return events(lambda event: event | {"args": {k: v for k, v in event.get("args", {}).items() if k not in names}})


def no_distributed_info(_: int, trace: Trace) -> Trace:
    return {key: value for key, value in trace.items() if key != "distributedInfo"}


def no_shapes(rank: int, trace: Trace) -> Trace:
    return without_args("Input Dims", "Input type", "Concrete Inputs", "Input Strides")(rank, trace)


def other_clocks(rank: int, trace: Trace) -> Trace:
    """Return times of a clock that is other for each rank, without a base: as PyTorch wrote them up to 2.2."""
    ahead_us = (0, 812_345, -1_203_007, 377_001)[rank] - (int(min(e["ts"] for e in trace["traceEvents"] if "ts" in e)))
    moved = events(lambda event: event | {"ts": event["ts"] + ahead_us} if "ts" in event else event)(rank, trace)
    return {key: value for key, value in moved.items() if key != "baseTimeNanoseconds"}


def no_annotations(rank: int, trace: Trace) -> Trace:
    own = ("user_annotation", "gpu_user_annotation")
    drop = events(lambda e: None if e.get("cat") in own and not e["name"].startswith("gloo:") else e)
    return drop(rank, trace)


def no_operators(rank: int, trace: Trace) -> Trace:
    return events(lambda e: None if e.get("cat") in ("cpu_op", "fwdbwd", "python_function") else e)(rank, trace)


def together(run: Run) -> set[tuple[str, tuple[int, ...]]]:
    """Return the op and the ranks of each synchronizing collective that several ranks recorded."""
    calls = run.table(collective_matching.matched_calls).drop_nulls("instance")
    joint = calls.filter(pl.col("op").is_in(collective_matching.SYNCHRONIZING))
    found = joint.group_by("window", "instance").agg(pl.col("op").first(), pl.col("rank").unique().sort())
    return {(op, tuple(ranks)) for _, _, op, ranks in found.rows() if len(ranks) > 1}


def error_ns(run: Run) -> int:
    """Return the largest offset between clocks of one machine beyond the stated error."""
    rows = run.offsets.filter(pl.col("residual_ns").is_not_null())
    return int((rows["offset_ns"].abs() - rows["residual_ns"]).max())


PAIRS = {(0, 1), (2, 3)}


@pytest.mark.parametrize(
    "changes",
    [(), (no_distributed_info,), (no_shapes,), (no_distributed_info, other_clocks)],
    ids=["pairs known", "no groups", "no shapes", "other clocks"],
)
def test_the_stages_of_a_pipeline_are_not_taken_for_one_tensor_parallel_group(tmp_path, changes):
    run = without(RECORDINGS / "megatron_tp2_pp2", tmp_path, *changes)
    assert together(run) == {("all_reduce", pair) for pair in PAIRS}
    matched = run.table(collective_matching.matched_calls).filter(pl.col("op") == "all_reduce")
    assert matched["instance"].null_count() == 0
    assert matched["instance"].n_unique() == 32
    if other_clocks not in changes:
        assert error_ns(run) <= 0
    if changes:
        assert "2 sets of ranks share no collective" in " ".join(alignment.data_quality(run)["message"])


def test_tensor_parallelism_is_found_without_process_groups(tmp_path):
    run = without(RECORDINGS / "megatron_tp2_pp2", tmp_path, no_distributed_info)
    assert {row["axis"] for row in axis_communication.by_axis(run).to_dicts()} == {"tp", "pp"}
    found = {finding.code: finding for finding in tracekit.check(run).findings}
    assert found["TP002"].ranks == (0, 1, 2, 3)


def test_tensor_parallelism_with_fsdp_is_found_without_process_groups(tmp_path):
    run = without(RECORDINGS / "torchtitan_1f1b_tp2", tmp_path, no_distributed_info)
    by_op = axis_communication.calls(run).group_by("axis").agg(pl.col("op").unique())
    ops = {axis: set(of) for axis, of in by_op.rows()}
    assert {"all_gather", "reduce_scatter"} <= ops["tp"]
    assert ops["pp"] <= {"send", "recv", "send_recv"}
    assert {ranks for op, ranks in together(run) if op == "reduce_scatter"} == PAIRS


def test_no_rank_is_named_as_the_peer_of_a_send_that_it_did_not_receive(tmp_path):
    run = without(
        RECORDINGS / "megatron_tp2_pp2", tmp_path, no_distributed_info
    )  # 0 sends to 2: to place 1 of its group
    calls = run.table(collective_matching.run_calls)
    assert calls.filter(pl.col("op") == collective_matching.PAIRED).is_empty()
    assert calls.filter(pl.col("op").is_in(["send", "recv"]))["members"].null_count() == 32
    assert run.table(group_axes.group_axes)["ranks"].to_list() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("order", others_in_accuracy(["1320", "0123", "3012"], ["3012"]))
def test_groups_of_experts_are_found_whatever_numbers_their_ranks_have(tmp_path, order):
    number = dict(enumerate(map(int, order)))
    for rank in range(4):
        path = PARALLELISM / "moe-ep2" / f"rank0000{rank}.pt.trace.json.gz"
        trace = no_distributed_info(rank, read_recording(path))
        write_recording(tmp_path / f"rank{number[rank]}.json", trace)
    run = tracekit.load(tmp_path, cache=False)
    exchanged = {ranks for op, ranks in together(run) if op == "all_to_all"}
    assert exchanged == {tuple(sorted(number[rank] for rank in pair)) for pair in PAIRS}
    assert error_ns(run) <= 0


def test_a_rank_whose_peers_have_no_trace_is_not_matched_with_another_group(tmp_path):
    run = without(PARALLELISM / "moe-ep2", tmp_path, ranks=(0, 2, 3))
    assert {ranks for op, ranks in together(run) if op == "all_to_all"} == {(2, 3)}
    findings = [finding for finding in tracekit.check(run).findings if finding.code.startswith(("RANK", "EP"))]
    assert not any(1 in finding.ranks for finding in findings)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.accuracy)])
def test_a_pipeline_without_the_trace_of_an_inner_stage_is_not_judged(tmp_path, rank):
    run = without(PARALLELISM / "pipeline-1f1b", tmp_path, ranks=tuple({0, 1, 2, 3} - {rank}))
    assert not [finding for finding in tracekit.check(run).findings if finding.code.startswith("PIPE")]


HEADERS = {"header of rank 0": True, "no header": False}
MERGED = ("moe-ep2", "megatron_tp2_pp2", "pipeline-1f1b")


@pytest.mark.parametrize(
    ("header", "name"),
    others_in_accuracy(
        itertools.product(HEADERS, MERGED),
        [("header of rank 0", "moe-ep2"), ("no header", "megatron_tp2_pp2")],
    ),
)
def test_a_merged_file_is_read_as_its_ranks_whatever_its_header_states(tmp_path, header, name):
    folder = next(path for path in (PARALLELISM / name, RECORDINGS / name) if path.exists())
    start: Trace = {}
    merged = []
    for rank, path in enumerate(sorted(folder.glob("*.json.gz"))):
        trace = read_recording(path)
        start = start or {key: value for key, value in trace.items() if key != "traceEvents"}
        for event in trace["traceEvents"]:
            args = {"args": event.get("args", {}) | {"rank": rank}} if event["ph"] == "X" else {}
            merged.append(event | {"pid": f"{rank}/{event.get('pid')}"} | args)
    if not HEADERS[header]:
        del start["distributedInfo"]
    write_recording(tmp_path / "merged.json", start | {"traceEvents": merged})
    run = tracekit.load(tmp_path / "merged.json", cache=False)
    assert run.ranks == (0, 1, 2, 3)
    kinds = {"moe-ep2": "all_to_all", "megatron_tp2_pp2": "all_reduce"}
    if name in kinds:
        assert {ranks for op, ranks in together(run) if op == kinds[name]} == PAIRS
    else:
        messages = run.table(collective_matching.matched_calls).filter(pl.col("op") == collective_matching.PAIRED)
        assert messages.group_by("instance").len()["len"].unique().to_list() == [2]
        assert messages["instance"].null_count() == 0


@pytest.mark.parametrize("name", ["pipeline-1f1b", pytest.param("pipeline-slow-stage", marks=pytest.mark.accuracy)])
def test_no_pipeline_is_judged_of_which_one_rank_alone_shows_its_actions(tmp_path, name):
    run = without(PARALLELISM / name, tmp_path, no_annotations)
    assert run.table(pipeline_stages.staged_actions).is_empty()
    assert not [finding for finding in tracekit.check(run).findings if finding.code.startswith("PIPE")]


def test_micro_batches_that_repeat_are_not_called_too_few_in_a_step(tmp_path):
    run = without(RECORDINGS / "megatron_tp2_pp2", tmp_path, no_annotations)
    assert "PIPE003" not in {finding.code for finding in tracekit.check(run).findings}


@pytest.mark.parametrize("name", ["cp-ring", pytest.param("pipeline-slow-stage", marks=pytest.mark.accuracy)])
def test_without_operators_nothing_is_said_of_compute(tmp_path, name):
    report = tracekit.check(without(PARALLELISM / name, tmp_path, no_operators))
    families = {finding.code.rstrip("0123456789") for finding in report.findings}
    assert families <= {"DATA", "RANK", "STEP", "CKPT"}
    assert ("no_operators", Severity.ERROR) in {(found.subject, found.severity) for found in report.findings}
    assert any("COMM001" in note and "no operator was recorded" in note for note in report.notes)


# Public traces -------------------------------------------------------------------------------------------------------


def public(name: str) -> Path:
    if not (PUBLIC / name).exists():
        pytest.skip("the public traces are not here")
    return PUBLIC / name


def renumbered_streams(rank: int, trace: Trace) -> Trace:
    """Return other numbers of streams on each rank, in another order."""

    def change(event: Trace) -> Trace:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            return event
        stream = (event["args"]["stream"] * (2 * rank + 3) + 5 * rank) % 97
        return event | {"tid": stream, "args": event["args"] | {"stream": stream}}

    return events(change)(rank, trace)


def test_costs_do_not_depend_on_the_numbers_of_streams(tmp_path):
    folder = public("torchrec_v100_4ranks")
    (tmp_path / "intact").mkdir()
    (tmp_path / "renumbered").mkdir()
    expected = tracekit.check(without(folder, tmp_path / "intact")).findings
    found = tracekit.check(without(folder, tmp_path / "renumbered", renumbered_streams)).findings
    assert [finding.code for finding in found] == [finding.code for finding in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.cost_ns == pytest.approx(other.cost_ns, rel=0.002), one.code


def test_a_sampled_trace_without_numbers_of_operators_is_still_one(tmp_path):
    report = tracekit.check(without(public("hta_pair_of_128"), tmp_path, without_args("External id")))
    assert "sampled" in {finding.subject for finding in report.findings}
    assert not [f for f in report.findings if f.code == "HOST001" and f.severity > Severity.INFO]


def test_kernels_that_may_be_all_to_alls_are_not_called_a_pipeline(tmp_path):
    of_device = ("kernel", "gpu_memcpy", "gpu_memset")
    gpu_only = events(lambda e: e if e.get("cat") in of_device or e["ph"] == "M" else None)
    run = without(public("torchrec_v100_4ranks"), tmp_path, gpu_only)
    assert "pp" not in axis_communication.calls(run)["axis"].to_list()
