"""Times to the nanosecond, and values of every kind that traces hold where a number or name is expected."""

import gc
import gzip
import json
import random
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest

from tracekit.ingest.readers.kineto import reader
from tracekit.ingest.readers.normalize import event_tables, numbers

BASE_NS = 1_790_000_000_123_456_789


def event(text="", **fields):
    """Return a cpu_op as JSON text; `text` replaces values as they stand, such as 'ts: 1.50, dur: NaN'."""
    values = {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0} | fields
    written = {key: json.dumps(value) for key, value in values.items()}
    written |= {
        key.strip(): value.strip() for key, _, value in (part.partition(":") for part in text.split(",") if part)
    }
    return "{" + ", ".join(f'"{key}": {value}' for key, value in written.items()) + "}"


def read(folder, *events, **header):
    path = folder / "trace.json"
    head = json.dumps(header)[:-1] + (", " if header else "")
    path.write_text(head + '"traceEvents": [' + ",".join(events) + "]}")
    return reader.read(str(path), rank=0)


def kinds(trace):
    return set(trace.data_quality["kind"]) - {"no_steps", "clock_resolution"}


def resolution(trace):
    return trace.data_quality.filter(pl.col("kind") == "clock_resolution")["message"].to_list()


# Times ----------------------------------------------------------------------------------------------------------------

TIMES = {  # µs as written, ns
    "0": 0,
    "7": 7_000,
    "12.5": 12_500,
    "0.001": 1,
    "0.1": 100,
    "4376498697567.882": 4_376_498_697_567_882,
    "8796093022207.999": 8_796_093_022_207_999,
    "8796093022208.001": 8_796_093_022_208_001,
    "1716900000123456": 1_716_900_000_123_456_000,
    "1716900000123456.789": 1_716_900_000_123_456_789,
    "1716900000123456.250": 1_716_900_000_123_456_250,
    "1.5e3": 1_500_000,
    "1E+2": 100_000,
    "-3.25": -3_250,
    '"12.345"': 12_345,
    "2.0005": 2_000,  # halves of a ns go to the even one, whatever the parser
    "2.0015": 2_002,
    "2.00049": 2_000,
    "123.456789": 123_457,
}


@pytest.mark.parametrize("base", [0, BASE_NS], ids=["no base", "with a base"])
@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_exact_to_the_nanosecond(tmp_path, text, base):
    row = read(tmp_path, event(f"ts: {text}, dur: 0.003"), baseTimeNanoseconds=base).ops.row(0, named=True)
    assert (row["start_ns"], row["dur_ns"]) == (base + TIMES[text], 3)


@pytest.mark.parametrize(
    "whole_us", [1_000, 4_376_498_697_567, 1_716_900_000_123_456], ids=["small", "relative", "epoch"]
)
def test_many_times_at_once_are_as_exact_as_one(tmp_path, whole_us):
    random_ = random.Random(3)
    written = [f"{whole_us + i}.{random_.randrange(1000):03d}" for i in range(500)]
    long = [f"{random_.randrange(9)}.{random_.randrange(1000):03d}" for _ in written]
    trace = read(tmp_path, *(event(f"ts: {ts}, dur: {dur}") for ts, dur in zip(written, long, strict=True)))
    assert trace.ops["start_ns"].to_list() == [int(Decimal(ts) * 1000) for ts in written]
    assert trace.ops["dur_ns"].to_list() == [int(Decimal(dur) * 1000) for dur in long]
    assert resolution(trace) == []


@pytest.mark.parametrize("digits", [1, 2, 4, 6])
def test_more_or_fewer_decimals_go_to_the_nearest_nanosecond(tmp_path, digits):
    random_ = random.Random(digits)
    for whole_us in (5, 1_716_900_000_123_456):
        written = [f"{whole_us + i}.{random_.randrange(10**digits):0{digits}d}" for i in range(200)]
        found = read(tmp_path, *(event(f"ts: {ts}") for ts in written)).ops["start_ns"].to_list()
        off = [abs(Decimal(ts) * 1000 - ns) for ts, ns in zip(written, found, strict=True)]
        assert max(off) <= Decimal("0.5")


def test_a_clock_of_whole_microseconds_is_reported(tmp_path):
    (message,) = resolution(read(tmp_path, *(event(ts=1_716_900_000_000_000 + i, dur=2) for i in range(100))))
    assert "whole µs" in message


def test_whole_microseconds_written_with_a_decimal_are_whole(tmp_path):
    times = [
        ("68.0", 1_716_900_000_000_000),
        (2, "1716900000000002.0"),
        *((2, 1_716_900_000_000_010 + i) for i in range(98)),
    ]
    (message,) = resolution(read(tmp_path, *(event(f"ts: {ts}, dur: {dur}") for dur, ts in times)))
    assert "whole µs" in message


def test_an_epoch_clock_stored_as_a_double_is_reported(tmp_path):
    written = [1_716_900_000_123_456 + i / 4 for i in range(100)]
    trace = read(tmp_path, *(event(f"ts: {ts:.2f}, dur: 0.25") for ts in written))
    (message,) = resolution(trace)
    assert "0.25 µs" in message
    assert trace.ops["start_ns"].to_list() == [int(ts * 4) * 250 for ts in written]


def test_a_few_times_do_not_show_the_resolution_of_the_clock(tmp_path):
    assert resolution(read(tmp_path, *(event(ts=i) for i in range(20)))) == []


@pytest.mark.parametrize("base", ["1790000000123456789", 1.5e18, None, "soon", [], float("nan"), 1 << 70])
def test_a_base_time_of_any_type_is_accepted(tmp_path, base):
    start_ns = read(tmp_path, event(ts=2.0), baseTimeNanoseconds=base).ops["start_ns"].item()
    expected = {"1790000000123456789": BASE_NS, 1.5e18: 1_500_000_000_000_000_000}
    assert start_ns == 2_000 + (expected.get(base, 0) if isinstance(base, str | float) else 0)


@pytest.mark.parametrize(
    "time",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        '"NaN"',
        '"soon"',
        "null",
        "[]",
        "{}",
        "1e300",
        "1e999",
        "4e15",
        "4000000000000000",
        "-4000000000000000.5",
        "9" * 40,
        '""',
    ],
)
def test_an_event_without_a_usable_time_is_left_out_and_reported(tmp_path, time):
    for text in (f"ts: {time}", f'ts: {time}, ph: "i", name: "[memory]", args: {{"Bytes": 8}}'):
        good = [event(f"ts: {i}.5") for i in range(3)]
        trace = read(tmp_path, good[0], event(text), *good[1:])
        assert trace.ops["start_ns"].to_list() == [500, 1_500, 2_500]
        assert kinds(trace) == {"bad_times"}
        assert trace.data_quality.filter(pl.col("kind") == "bad_times")["affected_ratio"].item() == 0.25


@pytest.mark.parametrize("dur", ["NaN", "Infinity", "-1.5", '"long"', "[]", "2000000000000000"])
def test_an_event_without_a_usable_duration_is_left_out_and_reported(tmp_path, dur):
    trace = read(tmp_path, event(), event(f"dur: {dur}"))
    assert trace.ops.height == 1
    assert kinds(trace) == {"bad_times"}


def test_a_slice_without_a_duration_has_none(tmp_path):
    assert read(tmp_path, event().replace(', "dur": 1.0', "")).ops["dur_ns"].to_list() == [0]


def test_odd_times_do_not_change_their_neighbours(tmp_path):
    events = [event(f"ts: {1_716_900_000_123_456 + i}.{i:03d}") for i in range(100)]
    trace = read(tmp_path, *events[:50], event("ts: NaN"), event('ts: "1716900000123999.001"'), *events[50:])
    expected = [(1_716_900_000_123_456 + i) * 1000 + i for i in range(100)]
    assert trace.ops["start_ns"].to_list() == [*expected, 1_716_900_000_123_999_001]


# Whole numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (7, 7), (-1, -1), ("7", 7), (7.0, 7), (None, None), ("seven", None), ([7], None),
        ((1 << 63) - 1, (1 << 63) - 1), (1 << 63, None), ((1 << 64) - 1, None), (1 << 200, None), (1e300, None),
    ],
)  # fmt: skip
def test_a_whole_number_that_does_not_fit_is_missing_and_harms_no_other(given, taken):
    missing = numbers.MISSING
    expected = [3, missing if taken is None else taken, 5]
    assert numbers.ints([3, given, 5]).tolist() == expected
    assert numbers.ids([3, given, 5]).tolist() == [0 if n == missing else n for n in expected]


def test_arguments_beyond_64_bits_are_missing(tmp_path):
    huge = {"External id": 1 << 64, "Sequence number": 1 << 80, "Fwd thread id": -(1 << 70)}
    memory = {"Addr": (1 << 64) - 1, "Bytes": 512, "Device Type": 1, "Device Id": 0, "Total Allocated": 1 << 65}
    trace = read(
        tmp_path,
        event(args=huge),
        event(ph="i", name="[memory]", args=memory),
        event(ph="i", name="[memory]", args={"Bytes": 1 << 64}),
    )
    assert trace.ops.height == 1
    row = trace.allocations.row(0, named=True)
    assert (row["delta_bytes"], row["address"], row["allocated_bytes"]) == (512, None, None)
    assert trace.allocations.height == 1  # an allocation of unknown size is none


# Names, threads and keys ----------------------------------------------------------------------------------------------


def test_process_and_thread_ids_may_be_text_or_missing(tmp_path):
    places = [
        (1, 1),
        ("1", "1"),
        ("Spans", "PyTorch Profiler (0)"),
        ("Traces", ""),
        ("", "stream 7"),
        (None, None),
        (1.5, True),
    ]
    trace = read(tmp_path, *(event(pid=pid, tid=tid, ts=i) for i, (pid, tid) in enumerate(places)))
    lanes = trace.ops.join(trace.lanes, on="lane", maintain_order="left").select("pid", "tid").rows()
    assert lanes[:2] == [("1", "1")] * 2  # a thread is one, whether its writer quotes it
    assert lanes[2:] == [
        ("Spans", "PyTorch Profiler (0)"),
        ("Traces", ""),
        ("", "stream 7"),
        (None, None),
        ("1.5", "True"),
    ]
    assert trace.lanes.height == 6


def test_a_lane_has_the_name_that_the_metadata_gives_its_thread(tmp_path):
    named = event(ph="M", name="thread_name", args={"name": "pt_main_thread"})
    other = event(ph="M", name="process_name", args={"name": "python"})
    for events in ((named, other, event(), event(tid="2")), (event(), event(tid="2"), other, named)):
        trace = read(tmp_path, *events)
        assert trace.lanes.select("tid", "name").rows() == [("1", "pt_main_thread"), ("2", "thread 2")]


def test_an_op_has_those_of_its_inputs_that_were_recorded(tmp_path):
    given = {"Input Dims": [[2]], "Input type": ["float"], "Concrete Inputs": ["1"], "Input Strides": [[1]]}
    recorded = [set(), {"Input Dims"}, {"Input type"}, {"Concrete Inputs", "Input Strides"}, set(given), set()]
    args = [{name: value for name, value in given.items() if name in names} for names in recorded]
    trace = read(tmp_path, *(event(ts=ts, args=of) for ts, of in enumerate(args, 1)))
    written = [[json.dumps(of[name]) if name in of else None for name in given] for of in args]
    assert trace.ops.select("shapes", "dtypes", "arguments", "strides").rows() == list(map(tuple, written))


def test_allocator_events_of_both_spellings_of_an_instant_are_in_the_order_of_the_file(tmp_path):
    events = [
        event(ph=ph, name="[memory]", args={"Bytes": size, "Device Type": 1, "Device Id": 0, "Addr": 8})
        for ph, size in (("i", 4), ("I", -4), ("I", 8), ("i", -8))
    ]
    assert read(tmp_path, event(), *events).allocations["delta_bytes"].to_list() == [4, -4, 8, -8]


@pytest.mark.parametrize("value", [None, 5, True, 1.5, [], ["a"], {}, {"a": 1}, "", "\ud800", "a\x00b"])
@pytest.mark.parametrize("field", ["name", "cat", "pid", "tid", "ph", "args", "id", "bp", "dur"])
def test_a_value_of_any_type_in_any_field_loses_no_neighbour(tmp_path, field, value):
    trace = read(
        tmp_path,
        event(),
        event(**{field: value}),
        event(ts=5.0),
        event(ph="M", name="x", **({field: value} if field == "args" else {})),
    )
    assert {1_000, 5_000} <= set(trace.ops["start_ns"])
    assert sum(reader.counts(trace.path).values()) == 4
    assert trace.ops.height == 3 or kinds(trace) or field in ("ph", "cat")


def test_the_last_of_duplicate_keys_counts(tmp_path):
    twice = (
        '{"ph": "X", "cat": "kernel", "name": "a", "name": "b", "cat": "cpu_op", "ts": 1, "ts": 2.5, "dur": 1,'
        ' "args": {"External id": 4}, "args": {}}'
    )
    phases = '{"ph": "M", "cat": "cpu_op", "name": "c", "ts": 9, "dur": 1, "ph": "X"}'
    for first in ("", event(name="aten::x") + ","):
        trace = read(tmp_path, first + twice, phases)
        rows = trace.ops.filter(pl.col("name").is_in(["a", "b", "c"])).select("name", "kind", "start_ns").rows()
        assert rows == [("b", "cpu_op", 2_500), ("c", "cpu_op", 9_000)]
        assert reader.counts(trace.path)["X", "cpu_op"] == trace.ops.height


@pytest.mark.parametrize("phase", ["C", "b", "e", "n", "t", "P", "N", "D", "R", "v", "", "XX"])
def test_events_of_phases_that_no_table_needs_are_counted(tmp_path, phase):
    trace, counts = reader.read_counted(read(tmp_path, event(), event(ph=phase), event(ts=3)).path, rank=0)
    assert counts == {("X", "cpu_op"): 2, (phase, "cpu_op"): 1}
    assert trace.ops.height == 2
    assert kinds(trace) == set()


def test_slices_of_unknown_kinds_are_reported(tmp_path):
    trace = read(tmp_path, event(), event(cat="quantum_op"), event(cat="quantum_op"), event(cat="gpu_user_annotation"))
    assert trace.ops.height == 1
    assert kinds(trace) == {"unknown_kinds"}
    assert trace.data_quality.filter(pl.col("kind") == "unknown_kinds")["affected_ratio"].item() == 0.5


# Slices in two events -------------------------------------------------------------------------------------------------


def test_slices_that_begin_and_end_in_events_of_their_own(tmp_path):
    # time µs   0 1 2 3 4 5 6 7 8
    # thread 1  a a a a a a . . .      inside it b, ended without a name
    # thread 1  . . b b . . . . .
    # thread 2  . . . c c c c c .
    trace = read(
        tmp_path,
        event(ph="B", name="a", ts=0.001, args={"Input Dims": [[2, 3]]}),
        event(ph="B", name="b", ts=2.5),
        event("ts: 4.250, name: null", ph="E"),
        event(ph="B", name="c", ts=3, tid=2),
        event(ph="E", name="a", ts=6.125),
        event(ph="E", name="c", ts="8.0", tid="2"),
    )
    rows = trace.ops.sort("name").select("name", "start_ns", "dur_ns", "parent_id", "shapes").rows()
    a = trace.ops.filter(pl.col("name") == "a")["id"].item()
    assert rows == [("a", 1, 6_124, None, "[[2, 3]]"), ("b", 2_500, 1_750, a, None), ("c", 3_000, 5_000, None, None)]
    assert reader.counts(trace.path) == {("B", "cpu_op"): 3, ("E", "cpu_op"): 3}
    assert kinds(trace) == set()


def test_a_slice_without_a_begin_or_an_end_is_left_out_and_reported(tmp_path):
    events = [event(ph="B", name="a", ts=0), event(ph="B", name="b", ts=1), event(ph="E", name="a", ts=3)]
    trace = read(tmp_path, *events, event(ph="E", name="z", ts=4), event(ph="B", name="c", ts=5))
    assert trace.ops["name"].to_list() == ["a"]
    assert kinds(trace) == {"unmatched_pairs"}
    assert trace.data_quality.filter(pl.col("kind") == "unmatched_pairs")["affected_ratio"].item() == 3 / 5


def test_begin_and_end_on_an_epoch_clock_are_exact(tmp_path):
    pair = [event(f"ts: 1716900000123456.{ns}", ph=ph) for ph, ns in (("B", "101"), ("E", "999"))]
    assert read(tmp_path, *pair).ops.select("start_ns", "dur_ns").rows() == [(1_716_900_000_123_456_101, 898)]


@pytest.mark.parametrize(
    ("around", "is_wrong"), [("aten::whole", True), ("_compile.compile_inner (dynamo_timed)", False)]
)
def test_calls_within_a_compiler_may_take_any_time_and_cross_its_spans(tmp_path, around, is_wrong):
    """torch.compile closes aot_collect_metadata_data after the dispatch mode in which it began, in PyTorch 2.13."""
    short = [event(name="PythonDispatchMode", ts=100.0 * number, dur=10.0) for number in range(20)]
    long = event(name="PythonDispatchMode", ts=5_000.0, dur=4_000.0)
    crossing = event(cat="user_annotation", name="aot_collect_metadata_data", ts=8_900.0, dur=300.0)
    trace = read(tmp_path, event(name=around, ts=0.0, dur=10_000.0), *short, long, crossing)
    assert ("bad_durations" in kinds(trace)) == is_wrong
    assert trace.ops["dur_ns"].to_list().count(4_000_000) == (not is_wrong)


def test_times_far_apart_do_not_overflow(tmp_path):
    far = [event(ts=ts, dur=dur) for ts, dur in ((-3e15, 1e15), (3e15, 1e15), (0, 1))]
    trace = read(tmp_path, *far, baseTimeNanoseconds=3 * 10**18)
    assert trace.ops.select("start_ns", "dur_ns").rows() == [(0, 10**18), (3 * 10**18, 1000), (6 * 10**18, 10**18)]
    assert trace.ops["parent_id"].null_count() == 3


def test_a_trace_releases_the_events_that_it_was_built_from(tmp_path):
    before = _events_in_memory()
    trace = read(tmp_path, event())
    assert _events_in_memory() == before
    assert trace.syncs.is_empty()


def _events_in_memory():
    gc.collect()
    return sum(type(each) is event_tables.Events for each in gc.get_objects())


@pytest.mark.parametrize(
    ("category", "is_left_out"), [("user_annotation", True), ("cpu_op", True), ("cuda_runtime", False)]
)
def test_a_kind_on_another_clock_is_left_out_and_reported(tmp_path, category, is_left_out):
    sample = Path(__file__).parents[3] / "sample_traces/gpu/cuda-graphs/rank00000.pt.trace.json.gz"
    document = json.loads(gzip.decompress(sample.read_bytes()))
    for slice_ in document["traceEvents"]:
        if slice_.get("cat") == category:
            slice_["ts"] += 1_000_000.0  # a second, fifty times the recording
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))
    shifted, whole = (reader.read(str(file), rank=0) for file in (path, sample))
    assert ("bad_times" in kinds(shifted)) == is_left_out
    assert "bad_times" not in kinds(whole)
    assert shifted.activities["start_ns"].equals(whole.activities["start_ns"])
    assert (shifted.ops.height < whole.ops.height) == is_left_out
