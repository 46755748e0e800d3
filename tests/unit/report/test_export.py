import io
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_traces, perfetto_reader, shared_findings
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.report.export import perfetto
from tracekit.report.export.perfetto import Clock
from tracekit.rules.rule import Finding, Severity

SAMPLES = Path(__file__).parents[3] / "sample_traces"


def written(run: Run, **how) -> bytes:
    file = io.BytesIO()
    perfetto.write(run, file, **how)
    return file.getvalue()


def exported(run: Run, **how) -> perfetto_reader.File:
    return perfetto_reader.read(written(run, **how))


def ops(*rows: tuple[str, int, int]) -> pl.DataFrame:
    """Return an ops table of (name, start_ns, end_ns) on lane 9."""
    table = pl.DataFrame(rows, schema=["name", "start_ns", "end_ns"], orient="row").with_row_index("id")
    return schema.OPS.conform(
        table.with_columns(kind=pl.lit("cpu_op"), lane=pl.lit(9), dur_ns=pl.col("end_ns") - pl.col("start_ns"))
    )


# Nothing is lost -----------------------------------------------------------------------------------------------------


MOVING = {(0, 0): Clock(0), (0, 1): Clock(-123_456)}


@pytest.fixture(
    scope="module",
    params=[pytest.param("demo-fsdp2", marks=pytest.mark.accuracy), "faults/churn", "faults/small-tensors"],
)
def recorded(request: pytest.FixtureRequest) -> Run:
    return tracekit.load(SAMPLES / request.param)


@pytest.fixture(scope="module")
def recorded_findings(recorded) -> tuple[Finding, ...]:
    """Return what check finds in the short runs; the longest of them takes 5 s."""
    return () if recorded.name == "demo-fsdp2" else shared_findings.findings(Path(recorded.path))


@pytest.fixture(scope="module")
def recorded_file(recorded, recorded_findings) -> perfetto_reader.File:
    return exported(recorded, clocks_by_trace=MOVING, findings=recorded_findings)


def test_every_slice_of_a_recorded_run_comes_back_with_its_name_and_times(recorded, recorded_file):
    run, moving, found = recorded, MOVING, recorded_file
    for trace in run.traces():
        move_ns = moving[0, trace.rank].offset_ns
        rank_slices = [each for each in found.slices if found.process_of(each) == f"rank {trace.rank}"]
        for table, categories in (
            (trace.ops, {"cpu_op", "annotation", "runtime", "python", "overhead"}),
            (trace.activities, {"compute", "communication", "memcpy", "memset"}),
        ):
            there = Counter(table.select("name", pl.col("start_ns") + move_ns, "dur_ns", "kind").rows())
            back = Counter((s.name, s.start_ns, s.dur_ns, s.category) for s in rank_slices if s.category in categories)
            assert back == there
        others = Counter(s.category for s in rank_slices if s.category in ("step", "checkpoint"))
        assert others == Counter(step=trace.steps.height, checkpoint=trace.checkpoints.height)
        counted = [
            (name, [(at - move_ns, value) for at, value in values])
            for uuid, values in found.values.items()
            for name in [found.tracks[uuid].name]
            if found.processes[found.tracks[uuid].parent_uuid] == f"rank {trace.rank}"
        ]
        allocations = trace.allocations.drop_nulls("allocated_bytes").sort("at_ns", maintain_order=True)
        allocated = allocations.select("at_ns", "allocated_bytes").rows()
        assert counted == ([("allocated memory · host", allocated)] if allocated else [])


SPANS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=15)
@given(SPANS, SPANS)
def test_slices_that_overlap_in_any_way_all_come_back(host, device):
    activities = pl.DataFrame(device, schema=["name", "start_ns", "dur_ns"], orient="row").with_row_index("id")
    activities = activities.with_columns(lane=pl.lit(0), kind=pl.lit("compute"))
    slices = ops(*((name, start, start + dur) for name, start, dur in host))
    found = exported(drawn_traces.run(drawn_traces.trace("compute a", activities=activities, ops=slices)))
    back = Counter((s.name, s.start_ns, s.dur_ns) for s in found.slices if s.category == "cpu_op")
    assert back == Counter(host)
    back = Counter((s.name, s.start_ns, s.dur_ns) for s in found.slices if s.category == "compute")
    assert back == Counter(device)


def test_overlapping_slices_have_a_track_of_their_own_next_to_the_one_they_overlap():
    # time   0 1 2 3 4 5 6 7
    # outer  # # # # # . . .
    # inner  . # # . . . . .
    # late   . . . # # # # .    begins in outer and outlasts it
    slices = ops(("outer", 0, 5), ("inner", 1, 3), ("late", 3, 7))
    found = exported(drawn_traces.run(drawn_traces.trace("compute a", ops=slices)))
    host = {s.name: (found.track_of(s), s.depth) for s in found.slices if s.category == "cpu_op"}
    assert host == {"outer": ("lane 9", 0), "inner": ("lane 9", 1), "late": ("lane 9 (2)", 0)}
    places = {track.name: track.sibling_order_rank for track in found.tracks.values()}
    assert places["lane 9 (2)"] == places["lane 9"] + 1


def test_names_come_back_whatever_they_hold():
    names = ["<script>alert(1)</script>", "\x1b[31m\x00", "名前 🎉", "x" * 20_000, "", "\u202e"]
    slices = ops(*((name, i, i + 1) for i, name in enumerate(names)))
    found = exported(drawn_traces.run(drawn_traces.trace("compute a", ops=slices)))
    assert [s.name for s in found.slices if s.category == "cpu_op"] == [name or "?" for name in names]


def test_a_run_without_work_is_still_a_file():
    found = exported(drawn_traces.run(drawn_traces.trace("compute a", activities=schema.ACTIVITIES.empty())))
    assert list(found.processes.values()) == ["rank 0"]
    assert found.slices == []


# What a slice says ---------------------------------------------------------------------------------------------------


def test_a_rank_is_a_process_and_a_lane_a_track_with_its_role():
    traces = [drawn_traces.trace("step 0011\ncomm .xx.\ncompute aabb\ncopy m...", rank=rank) for rank in (0, 3)]
    found = exported(drawn_traces.run(*traces))
    assert list(found.processes.values()) == ["rank 0", "rank 3"]
    for uuid in found.processes:
        rank_slices = sorted(
            (t for t in found.tracks.values() if t.parent_uuid == uuid), key=lambda track: track.sibling_order_rank
        )
        tables = ["table · trace", *["table · run"] * (found.processes[uuid] == "rank 0")]
        tables += [f"table · {name}" for name in ("lanes", "steps")]
        lanes = ["steps", "compute · compute", "communication · comm", "copies · copy"]
        assert [t.name for t in rank_slices] == lanes + tables


def test_several_windows_are_distinguished():
    found = exported(
        drawn_traces.run(drawn_traces.trace("compute a", window=0), drawn_traces.trace("compute a", window=1))
    )
    assert list(found.processes.values()) == ["rank 0 · window 0", "rank 0 · window 1"]


def test_a_slice_says_step_unit_phase_bytes_and_group_and_nothing_that_is_not_known():
    known = {"unit": "layers.0", "phase": "backward", "bytes": 1 << 40}
    collectives = pl.DataFrame({"activity_id": [1], "op": ["all_gather"], "group": ["0"], "sent_bytes": [4096]})
    trace = drawn_traces.trace(
        "step 0000\ncompute a...\ncomm ..x.", columns={"x": known, "a": {"unit": ""}}, collectives=collectives
    )
    found = {s.name: s.arguments for s in exported(drawn_traces.run(trace)).slices}
    message = {"op": "all_gather", "group": "0", "sent_bytes": 4096}
    assert found["x"] == {"step": 0} | known | message | {"id": 1, "lane": 1, "launch_id": 1}
    assert found["a"] == {"step": 0, "unit": ""} | {"id": 0, "lane": 0, "launch_id": 0}


def test_arrows_go_from_a_launch_to_all_that_it_launched():
    slices = ops(("graphLaunch", 0, 2), ("launch", 3, 4), ("idle", 5, 6))
    launches = {"a": {"launch_id": 0}, "b": {"launch_id": 0}, "c": {"launch_id": 1}, "d": {}}
    found = exported(drawn_traces.run(drawn_traces.trace("compute ...aabbcd", columns=launches, ops=slices)))
    by_name = {s.name: s for s in found.slices}
    ends = {name: by_name[name].ending for name in "abcd"}
    assert by_name["graphLaunch"].leaving == ends["a"] + ends["b"]
    assert by_name["launch"].leaving == ends["c"]
    assert (by_name["idle"].leaving, ends["d"]) == ([], [])
    assert len({*ends["a"], *ends["b"], *ends["c"]}) == 3


def test_arrows_of_two_ranks_never_share_a_number():
    traces = [
        drawn_traces.trace("compute .a", rank=rank, columns={"a": {"launch_id": 0}}, ops=ops(("launch", 0, 1)))
        for rank in (0, 1)
    ]
    found = exported(drawn_traces.run(*traces))
    assert len({number for each in found.slices for number in each.leaving}) == 2


def test_memory_is_counted_in_bytes_per_device_even_below_zero():
    allocations = pl.DataFrame(
        {
            "at_ns": [5, 1, 3],
            "device": [0, 0, None],
            "delta_bytes": [1, 2, 3],
            "allocated_bytes": [1 << 50, 2, -7],
            "reserved_bytes": [9, None, None],
        }
    )
    found = exported(drawn_traces.run(drawn_traces.trace("compute a", allocations=allocations)))
    assert {found.tracks[uuid].name: values for uuid, values in found.values.items()} == {
        "allocated memory · device 0": [(1, 2), (5, 1 << 50)],
        "reserved memory · device 0": [(5, 9)],
        "allocated memory · host": [(3, -7)],
    }
    kinds = {found.tracks[uuid].counter.unit for uuid in found.values}
    assert kinds == {perfetto_reader.schema.CounterDescriptor.UNIT_SIZE_BYTES}


# Findings ------------------------------------------------------------------------------------------------------------


def test_findings_lie_where_their_evidence_does_or_over_the_whole_rank():
    run = drawn_traces.run(*(drawn_traces.trace("compute ..aaaa", rank=rank) for rank in (0, 1)))
    evidence = pl.DataFrame({"window": [0, 0], "rank": [0, 0], "start_ns": [2, 3], "dur_ns": [2, 2], "step": [7, 7]})
    findings = (
        Finding("COMM001", Severity.ERROR, "Too much.", "Less.", ranks=(0,), evidence=evidence),
        Finding("MEM001", Severity.INFO, "Churn", "", ranks=(1,)),
        Finding("DATA001", Severity.WARNING, "Doubt.", ""),
    )
    found = exported(run, findings=findings)
    shown = [s for s in found.slices if s.category == "finding"]
    assert sorted((found.process_of(s), s.name, s.start_ns, s.dur_ns) for s in shown) == [
        ("rank 0", "COMM001 Too much", 2, 2),
        ("rank 0", "COMM001 Too much", 3, 2),
        ("rank 0", "DATA001 Doubt", 2, 4),
        ("rank 1", "DATA001 Doubt", 2, 4),
        ("rank 1", "MEM001 Churn", 2, 4),
    ]
    assert {found.track_of(s).removesuffix(" (2)").removesuffix(" (3)") for s in shown} == {"findings"}
    first = next(s for s in shown if s.start_ns == 2 and s.name.startswith("COMM001"))
    assert first.arguments == {
        "step": 7,
        "code": "COMM001",
        "severity": "error",
        "message": "Too much.",
        "fix": "Less.",
    }


def test_what_check_finds_in_a_recorded_run_is_shown(recorded_findings, recorded_file):
    shown = {s.arguments["code"] for s in recorded_file.slices if s.category == "finding"}
    assert shown == {found.id for found in recorded_findings}


# Clocks, steps, ranks ------------------------------------------------------------------------------------------------


def test_traces_are_moved_to_the_clock_of_the_run_with_offset_and_drift():
    run = drawn_traces.run(
        *(drawn_traces.trace("compute aa.b", rank=rank, scale_ns=1000, start_ns=10**6) for rank in (0, 1))
    )
    found = exported(run, clocks_by_trace={(0, 1): Clock(offset_ns=500, drift=0.01, at_ns=10**6)})
    times = {(found.process_of(s), s.name): (s.start_ns - 10**6, s.dur_ns) for s in found.slices}
    assert times == {
        ("rank 0", "a"): (0, 2000),
        ("rank 0", "b"): (3000, 1000),
        ("rank 1", "a"): (500, 2020),
        ("rank 1", "b"): (3530, 1010),
    }


def test_times_before_zero_move_all_ranks_alike():
    run = drawn_traces.run(
        drawn_traces.trace("compute aab", start_ns=-2), drawn_traces.trace("compute aab", rank=1, start_ns=5)
    )
    found = exported(run, clocks_by_trace={(0, 0): Clock(-10)})
    assert {(found.process_of(s), s.name): s.start_ns for s in found.slices} == {
        ("rank 0", "a"): 0,
        ("rank 0", "b"): 2,
        ("rank 1", "a"): 17,
        ("rank 1", "b"): 19,
    }


def test_one_step_holds_what_touches_its_time_and_what_it_launched_whole():
    # time    0123456789
    # step    ..0001111.    c belongs to step 1 by its launch though it runs after it; d spans all
    trace = drawn_traces.trace(
        "step ..0001111.\ncompute a.bbb.b..c",
        columns={"c": {"step": 1}},
        ops=ops(("d", 0, 10), ("before", 0, 5), ("inside", 6, 7), ("after", 9, 10)),
    )
    found = exported(drawn_traces.run(trace), step=1)
    assert sorted((s.name, s.start_ns, s.dur_ns) for s in found.slices) == [
        ("b", 6, 1),
        ("c", 9, 1),
        ("d", 0, 10),
        ("inside", 6, 1),
        ("step 1", 5, 4),
    ]


def test_ranks_are_chosen_and_missing_ones_are_reported(wording):
    run = drawn_traces.run(*(drawn_traces.trace("step 0\ncompute a", rank=rank) for rank in range(4)))
    assert list(exported(run, ranks=(1, 3)).processes.values()) == ["rank 1", "rank 3"]
    with wording.raises(InputError):
        written(run, ranks=(1, 7))
    with wording.raises(InputError):
        written(run, step=5)


def test_the_same_run_gives_the_same_bytes():
    first, second = (tracekit.load(SAMPLES / "faults" / "churn") for _ in range(2))
    assert written(first) == written(second)
