import dataclasses
import json
import re
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.kineto_files import slice_
from tests.support.rule_examples import HIDDEN, data_quality_issues, ops
from tracekit.analysis.quality import trace_quality
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.rules import data_quality
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

SOURCES = Path(tracekit.__file__).parent
RAISED = re.compile(
    r'(?:QualityIssue\(|yield \(?|"kind": (?="\w+", "message")'
    r'|append\(\(|None, |(?:each|file)\.path, |\[\(|(?:row|issue) = \()\s*"([a-z]+_?[a-z_]*)",'
)
RAISED_CONSTANT = re.compile(r"(?:yield |append\(\()schema\.([A-Z_]+),")


def kinds_in_the_code():
    """Return the kinds of data-quality issues that the source code of the rooms names next to a message."""
    rooms = [file for room in ("ingest/readers", "sync", "model") for file in SOURCES.glob(f"{room}/**/*.py")]
    single = (
        "ingest/discovery", "ingest/loader", "ingest/trace_files", "analysis/quality/trace_quality",
        "analysis/quality/undecided_kernels",
        "analysis/memory/snapshot_files",
        "replay/allocator/run_snapshots", "rules/data_quality",
    )  # fmt: skip
    files = [*rooms, *(SOURCES / f"{name}.py" for name in single)]
    texts = [file.read_text() for file in files]
    constants = {getattr(schema, name) for text in texts for name in RAISED_CONSTANT.findall(text)}
    return constants | {kind for text in texts for kind in RAISED.findall(text)}


def judge(run, **thresholds):
    return {found.subject: found for found in check(run, [DoubtfulTrace(**thresholds)]).findings}


def of_trace(trace):
    return dict(trace_quality.data_quality(trace).select("kind", "affected_ratio").rows())


def test_the_rule_knows_exactly_the_kinds_that_the_code_raises():
    assert kinds_in_the_code() == set(data_quality._KINDS)


@pytest.mark.parametrize("kind", data_quality._KINDS)
def test_every_kind_of_issue_has_its_own_severity_and_fix(kind):
    found = judge(data_quality_issues((kind, 0.3)))[kind]
    assert found.severity is data_quality._KINDS[kind].severity
    assert found.fix == data_quality._KINDS[kind].fix != data_quality._OTHER.fix
    assert "Affected: 30.0%." in found.message


def test_an_unknown_kind_is_a_warning():
    assert judge(data_quality_issues(("unheard_of", 0.1)))["unheard_of"].severity is Severity.WARNING


@pytest.mark.parametrize(("ratio", "severity"), [(0.5, Severity.WARNING), (0.51, Severity.ERROR)])
def test_an_issue_that_affects_more_than_half_is_an_error(ratio, severity):
    assert judge(data_quality_issues(("truncated", ratio)))["truncated"].severity is severity


def test_a_message_with_the_affected_share_does_not_repeat_it(wording):
    run = data_quality_issues(("truncated", 0.3))
    issues = run.data_quality.with_columns(message=pl.lit("30.0% of the steps are cut off."))
    found = judge(Run(run.path, run.sources, data_quality=issues))["truncated"]
    wording(found.message)


def test_missing_ranks_are_a_warning():
    assert judge(data_quality_issues(("missing_ranks", 0.99)))["missing_ranks"].severity is Severity.WARNING


def test_issues_of_one_kind_are_one_finding_with_the_worst_first(wording):
    found = judge(data_quality_issues(("truncated", 0.1), ("truncated", 0.4), ("truncated", 0.2)))["truncated"]
    wording(found.message)
    assert found.evidence["affected_ratio"].to_list() == [0.4, 0.2, 0.1]


def test_a_truncated_file_has_its_size_as_a_share_of_the_whole_files_of_other_ranks(tmp_path):
    sample = Path(__file__).parents[3] / "sample_traces" / "faults" / "slow-rank"
    first, second = sorted(sample.glob("rank*.pt.trace.json.gz"))
    whole_file, first_file = second.read_bytes(), first.read_bytes()
    cut_file = first_file[: len(first_file) * 4 // 5]
    (tmp_path / first.name).write_bytes(cut_file)
    alone = judge(tracekit.load(str(tmp_path)))["truncated"]
    (tmp_path / second.name).write_bytes(whole_file)
    beside_another = judge(tracekit.load(str(tmp_path)))["truncated"]
    size_share = f"{round(100 * len(cut_file) / len(whole_file))}%"
    assert size_share in beside_another.sentence
    assert size_share not in alone.message


def test_a_sound_trace_has_no_issues():
    assert of_trace(drawn_traces.trace(HIDDEN)) == {}


def test_a_trace_without_work_is_affected_as_a_whole():
    assert of_trace(drawn_traces.trace("step 000")) == {"no_work": 1.0}


def without_launch(trace, *names):
    launch = pl.when(pl.col("name").is_in(names)).then(None).otherwise("launch_id").alias("launch_id")
    return dataclasses.replace(trace, activities=trace.activities.with_columns(launch))


def test_work_without_a_launch_counts_by_its_share_of_device_time():
    trace = drawn_traces.trace("step 0000000000\ncompute bbbbaaaaaa")
    assert of_trace(without_launch(trace, "b")) == {"unlinked": 0.4}


def test_work_without_a_launch_after_launched_work_is_lost_not_queued_before_the_recording():
    # The stream runs in order of launch: what follows launched work was launched after the recording began.
    trace = drawn_traces.trace("step 0000000000\ncompute aaaaaabbbb\ncomm xxxxx.....")
    assert of_trace(without_launch(trace, "b")) == {"lost_launches": 4 / 15}
    assert of_trace(without_launch(trace, "x")) == {"unlinked": 5 / 15}
    assert "in the first 5 ns" in trace_quality.data_quality(without_launch(trace, "x"))["message"][0]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((), "CPU activity was not recorded"),
        (("cpu_op",), "Launch calls (CUDA or HIP runtime) were not recorded"),
        (("cpu_op", "runtime"), "No launch call could be matched"),
    ],
)
def test_a_trace_without_any_launch_says_what_was_not_recorded(kinds, message):
    table = ops(*((f"op {kind}", kind, 0, 1) for kind in kinds))
    trace = without_launch(drawn_traces.trace("step 00\ncompute ab", ops=table), "a", "b")
    assert of_trace(trace) == {"no_host_activity": 1.0}
    assert trace_quality.data_quality(trace)["message"][0].startswith(message)
    found = judge(drawn_traces.run(trace))["no_host_activity"]
    assert (found.severity, "ProfilerActivity.CPU" in found.fix) == (Severity.ERROR, True)


def test_work_launched_outside_steps_differs_from_work_without_a_launch():
    trace = drawn_traces.trace("step 00000..000\ncompute aaaaabbccc")
    assert of_trace(trace) == {"outside_steps": 0.2}
    assert of_trace(without_launch(trace, "b")) == {"lost_launches": 0.2}


def test_without_marked_steps_no_work_is_outside_steps():
    assert of_trace(drawn_traces.trace("compute  aabb")) == {}


def test_slices_that_overlap_on_a_stream_are_counted():
    trace = drawn_traces.trace("step 0000000000\ncompute aaaaabbbbb\ncomm xxxxx.....")
    longer = pl.when(pl.col("name") == "a").then(7).otherwise("dur_ns").alias("dur_ns")
    trace = dataclasses.replace(trace, activities=trace.activities.with_columns(longer))
    assert of_trace(trace) == {"overlapping_slices": 2 / 17}


def test_adjacent_slices_and_slices_on_other_streams_do_not_overlap():
    assert of_trace(drawn_traces.trace("step 0000\ncompute aabb\ncomm xxyy")) == {}


def test_small_shares_are_not_reported():
    run = data_quality_issues(("overlapping_slices", 0.009), ("unlinked", 0.01), ("truncated", 0.001))
    assert set(judge(run)) == {"unlinked", "truncated"}
    assert set(judge(run, min_affected_ratio=0.0)) == {"overlapping_slices", "unlinked", "truncated"}


def launches(*names):
    rows = ops(*((name, "runtime", number, number + 1) for number, name in enumerate(names)))
    return rows.with_columns(id=pl.int_range(len(names), dtype=pl.Int64))


def test_launches_without_work_are_dropped_events():
    # Activity n was launched by op n; launches 2 and 3 have no activity.
    table = launches("cudaLaunchKernel", "cudaLaunchKernelExC", "hipLaunchKernel", "cudaMemcpyAsync", "cudaFree")
    assert of_trace(drawn_traces.trace("step 00\ncompute ab", ops=table)) == {"dropped_events": 0.5}


def test_a_cuda_program_without_device_activity_is_affected_as_a_whole():
    table = launches("cudaLaunchKernel", "cuLaunchKernelEx")
    trace = drawn_traces.trace("step 00\ncompute ab", on_device=False, ops=table)
    assert of_trace(trace) == {"no_device_activity": 1.0}
    assert judge(drawn_traces.run(trace))["no_device_activity"].severity is Severity.ERROR
    assert of_trace(drawn_traces.trace("step 00\ncompute ab", on_device=False)) == {}


def test_kernels_that_end_before_the_launches_are_cut_off(wording):
    table = launches("cudaLaunchKernel", "cudaLaunchKernel", *["cudaLaunchKernel"] * 8)
    trace = drawn_traces.trace("step 0000000000\ncompute ab........", ops=table)
    named = dataclasses.replace(trace, header={"deviceProperties": [{"name": "NVIDIA A100"}]})
    assert of_trace(named) == {"dropped_events": 0.8}
    message = trace_quality.data_quality(named)["message"][0]
    wording(message)


def test_launches_before_the_first_recorded_work_are_said_to_be_at_the_start():
    drawn = drawn_traces.trace("step 0000\ncompute ..ab", ops=launches(*["cudaLaunchKernel"] * 4))
    trace = dataclasses.replace(drawn, activities=drawn.activities.with_columns(pl.col("launch_id") + 2))
    kind, message, share = trace_quality.data_quality(trace).row(0)
    assert (kind, share) == ("dropped_events", 0.5)
    assert "first 2 of 4 launches" in message
    assert "2 ns after the first launch" in message


NCCL = {"distributedInfo": {"backend": "nccl", "rank": 0}}
GPUS = {"deviceProperties": [{"name": "NVIDIA A100"}]}


@pytest.mark.parametrize(
    ("header", "issues"),
    [
        ({}, {}),
        (GPUS, {"host_only": 0.0}),
        (NCCL | GPUS, {"no_device_activity": 1.0}),
        (NCCL, {"no_device_activity": 1.0}),
        ({"distributedInfo": {"backend": "gloo"}, "deviceProperties": []}, {}),
    ],
)
def test_host_activity_alone_is_a_cpu_run_unless_something_shows_a_device(header, issues):
    trace = drawn_traces.trace("step 00\ncompute ab", on_device=False)
    assert of_trace(dataclasses.replace(trace, header=header)) == issues


def test_a_run_without_device_activity_cannot_be_judged_by_rules_on_time(wording):
    trace = dataclasses.replace(drawn_traces.trace("step 00\ncompute ab", on_device=False), header=NCCL)
    report = check(drawn_traces.run(trace))
    wording(report.cannot_judge)
    assert {code[:-3] for code in report.blind_spots} >= {"COMM", "HOST", "RANK", "STREAM"}
    assert not any("on the CPU" in note for note in report.notes)
    other = check(drawn_traces.run(trace, drawn_traces.trace("step 00\ncompute ab", rank=1)))
    assert other.cannot_judge is None


def test_dropped_events_in_the_header_are_reported():
    trace = drawn_traces.trace("step 00\ncompute ab")
    warned = dataclasses.replace(
        trace, header={"WARNING": ["WARNING:2026-01-01 CuptiActivityProfiler.cpp:1] Dropped 2 activity records"]}
    )
    assert of_trace(warned) == {"dropped_events": 0.5}
    full = dataclasses.replace(
        trace, header={"WARNING": ["Exceeded max GPU buffer count (2 > 1) - terminating tracing"]}
    )
    assert "once its buffers were full" in trace_quality.data_quality(full)["message"][0]
    assert of_trace(dataclasses.replace(trace, header={"WARNING": "Dropped 2 activity records", "INFO": [1]})) == {}


@pytest.mark.parametrize(
    ("lengths", "issues"),
    [
        ((8, 4, 4, 4), {}), ((9, 4, 4, 4), {"warm_up_inside": 9 / 21}), ((4, 4, 4, 4), {}),
        ((9, 4, 4), {}), ((12, 6, 4), {"warm_up_inside": 12 / 22}),  # two comparisons, and a trend
        ((9, 4, 9, 4), {}), ((9, 2, 9, 2, 9), {}), ((9, 2, 2, 6, 2, 2), {}), ((9, 3, 3, 9, 3, 3), {}),  # it recurs
    ],
    ids=str,
)  # fmt: skip
def test_a_first_step_looks_like_warm_up_if_many_others_are_half_as_long_or_if_steps_become_shorter(lengths, issues):
    steps = "".join(str(step) * length for step, length in enumerate(lengths))
    letters = {48 + step: 97 + step for step in range(len(lengths))}
    assert of_trace(drawn_traces.trace(f"step {steps}\ncompute {steps.translate(letters)}")) == issues


def test_a_long_first_step_that_saves_or_has_few_successors_is_not_warm_up():
    slow = "step 000000000000011112222\ncompute aaaaaaaaaaaaabbbbcccc"
    assert of_trace(drawn_traces.trace(slow, ops=ops(("dcp.save", "annotation", 4, 9)))) == {}
    assert of_trace(drawn_traces.trace("step 0000000000000111\ncompute aaaaaaaaaaaaabbb")) == {}


def with_header(rank, **header):
    return dataclasses.replace(drawn_traces.trace(HIDDEN, rank=rank), header=header)


def test_versions_and_devices_that_differ_are_reported_with_their_ranks():
    run = drawn_traces.run(
        with_header(0, cuda_driver_version=12080, deviceProperties=[{"name": "H100"}], traceName="a"),
        with_header(1, cuda_driver_version=12080, deviceProperties=[{"name": "H200"}], traceName="b"),
        with_header(2, cuda_driver_version=12040, deviceProperties=[{"name": "H100"}], traceName="c"),
    )
    found = judge(run)["mixed_versions"]
    messages = found.evidence["message"].to_list()
    assert "Ranks differ in cuda_driver_version: 12080 on ranks 0–1, 12040 on rank 2." in messages
    assert "Ranks differ in device: H100 on ranks 0, 2, H200 on rank 1." in messages
    assert found.evidence["affected_ratio"].to_list() == pytest.approx([1 / 3, 1 / 3])


def test_equal_or_missing_versions_are_no_issue():
    header = {
        "nccl_version": "2.28",
        "distributedInfo": {"rank": 0, "nccl_version": "2.28.9"},
        "deviceProperties": [5, {}],
    }
    assert judge(drawn_traces.run(with_header(0, **header), with_header(1, **header), with_header(2))) == {}


def test_issues_found_while_reading_are_passed_on():
    issues = pl.DataFrame(
        [("bad_times", "3 events have no usable time.", 0.25)], schema=schema.DATA_QUALITY.schema, orient="row"
    )
    assert of_trace(drawn_traces.trace(HIDDEN, data_quality=issues)) == {"bad_times": 0.25}


@pytest.mark.parametrize(("passes", "differs"), [((4, 4), False), ((4, 5), True)])
def test_ranks_with_unequal_numbers_of_found_iterations_are_reported(tmp_path, passes, differs):
    for rank, count in enumerate(passes):
        names = [*("embedding", "linear", "relu", "linear", "softmax", "sort", "index")] * count
        events = [slice_("cpu_op", f"aten::{name}", 10.0 * at, 8, tid=1) for at, name in enumerate(names)]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    found = judge(tracekit.load(str(tmp_path), cache=False))
    assert "steps_from_repetition" in found
    assert ("iterations_differ" in found) == differs
