"""Odd values in recordings: the rest is judged as if the events that have them were not there.

Each case changes some events of a real recording and compares its report with that of the recording without them.
"""

import functools
import gzip
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.kineto_files import slice_
from tests.support.selection import others_in_accuracy
from tracekit.errors import BadTraceError
from tracekit.ingest import loader
from tracekit.ingest.readers.kineto import reader
from tracekit.report import json as report_json
from tracekit.rules import engine
from tracekit.rules.rule import Report, Severity

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]
RECORDINGS = {
    "GPU, two ranks": "gpu/slow-rank",
    "GPU, compiled": "gpu/compiled",
    "CUDA graphs": "gpu/cuda-graphs",
    "CPU, stacks": "ci/green",
    "CPU, FSDP2": "faults/healthy-fsdp2",
}
FEW = 3
COUNTS = {"one": 1, "few": FEW, "many": 40}
YEAR_US = 365 * 86_400 * 10**6
_OF_THE_FILE = ("sha256", "size_bytes", "path", "inputs", "evidence")


def _at_zero(event: Event) -> None:
    event["ts"] = 0
    event["dur"] = 0


def _scaled(event: Event, factor: float) -> None:
    event["ts"] = float(event["ts"]) * factor


def _shifted(event: Event, by_us: float) -> None:
    event["ts"] = float(event["ts"]) + by_us


def _set(event: Event, key: str, value: object) -> None:
    event[key] = value


KERNELS, CALLS, OPS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime",), ("cpu_op",)
# What is done to an event, and which kinds of events can show it with certainty.
WRONG: dict[str, tuple[Callable[[Event], None], tuple[tuple[str, ...], ...]]] = {
    "time 0": (_at_zero, (KERNELS, CALLS, OPS)),
    "time 0, with its duration": (lambda event: _set(event, "ts", 0), (KERNELS, CALLS, OPS)),
    "a year later": (lambda event: _shifted(event, YEAR_US), (KERNELS, CALLS, OPS)),
    "a year before": (lambda event: _shifted(event, -YEAR_US), (KERNELS, OPS)),
    "in seconds": (lambda event: _scaled(event, 1e-6), (KERNELS, OPS)),
    "in milliseconds": (lambda event: _scaled(event, 1e-3), (KERNELS, OPS)),
    "in nanoseconds": (lambda event: _scaled(event, 1e3), (KERNELS, OPS)),
    "not a time": (lambda event: _set(event, "ts", "soon"), (KERNELS, CALLS, OPS)),
    "negative duration": (lambda event: _set(event, "dur", -5), (KERNELS, CALLS, OPS)),
    "duration of years": (lambda event: _set(event, "dur", 30 * YEAR_US), (KERNELS, CALLS, OPS)),
    "infinite duration": (lambda event: _set(event, "dur", 1e300), (KERNELS, CALLS, OPS)),
}


@functools.cache
def read(folder: str) -> dict[str, dict[str, Any]]:
    """Return the traces of a run by file name, which no test changes: `changed` copies what it replaces."""
    files = sorted((ROOT / "sample_traces" / folder).glob("*.json.gz"))
    return {file.name.removesuffix(".gz"): msgspec.json.decode(gzip.decompress(file.read_bytes())) for file in files}


def judge(traces: dict[str, dict[str, Any]], folder: Path) -> tuple[dict[str, Any], Report]:
    """Return what is said of traces, without data quality and what describes the files, and the whole report."""
    run_folder = folder / "run"
    run_folder.mkdir(parents=True)
    for name, trace in traces.items():
        (run_folder / name).write_bytes(msgspec.json.encode(trace))
    run = loader.load(str(run_folder), cache=False)
    report = engine.check(run)
    document = json.loads(report_json.render(report, run))
    document["findings"] = [finding for finding in document["findings"] if finding["code"] != "DATA001"]
    return _plain(document), report


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if key not in _OF_THE_FILE}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def quality(report: Report) -> dict[str | None, str]:
    """Return what is said of the data, by kind."""
    return {finding.subject: finding.message for finding in report.findings if finding.code == "DATA001"}


def changed(
    traces: dict[str, dict[str, Any]], places: Sequence[int], change: Callable[[Event], object]
) -> dict[str, dict[str, Any]]:
    """Return the traces with some events of the first one changed; `change` returns what replaces one, or None."""
    name, chosen_places = next(iter(traces)), set(places)
    events = []
    for place, event in enumerate(traces[name]["traceEvents"]):
        replaced = change({**event}) if place in chosen_places else event
        events += replaced if isinstance(replaced, list) else [replaced]
    return {**traces, name: {**traces[name], "traceEvents": events}}


def chosen(traces: dict[str, dict[str, Any]], categories: Sequence[str], count: int, seed: int = 0) -> list[int]:
    """Return the places of some events of these categories in the first trace."""
    places = places_of(traces, categories)
    return sorted(random.Random(seed).sample(places, min(count, len(places) // 20)))


@functools.cache
def said_without(recording: str, categories: tuple[str, ...], count: int) -> dict[str, Any]:
    """Return what is said of a recording without the chosen events."""
    traces = read(RECORDINGS[recording])
    with tempfile.TemporaryDirectory() as folder:
        places = chosen(traces, categories, count)
        return judge(changed(traces, places, lambda event: []), Path(folder) / "without")[0]


@functools.cache
def unchanged(recording: str) -> tuple[dict[str, Any], Report]:
    """What is said of a recording as it is, and the whole report."""
    with tempfile.TemporaryDirectory() as folder:
        return judge(read(RECORDINGS[recording]), Path(folder))


def followed(traces: dict[str, dict[str, Any]], categories: Sequence[str], count: int) -> list[int]:
    """Return the places of some events whose name recurs and that several others follow on their thread or stream."""
    events = next(iter(traces.values()))["traceEvents"]
    rows = [
        (str(event["pid"]), str(event["tid"]), float(event["ts"]), event["name"], place)
        for place, event in enumerate(events)
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    names = Counter(name for *_, name, _ in rows)
    of_lane = Counter((pid, tid) for pid, tid, *_ in rows)
    main = max(of_lane, key=lambda lane: of_lane[lane])
    ordered = sorted(row for row in rows if row[:2] == main)[:-10]
    usual = [row[-1] for row in ordered if names[row[3]] >= FEW * COUNTS["many"] // 4]
    return sorted(random.Random(0).sample(usual, min(count, len(usual) // 20)))


TWICE = {"kernels": KERNELS, "calls": CALLS, "ops": OPS, "all": None}
CASES = [(recording, wrong, count) for recording in RECORDINGS for wrong in WRONG for count in COUNTS]
# Others are off in the same direction by another factor; of text as a time, test_hostile_inputs has cases.
EVERYDAY_WRONG = ("time 0", "in nanoseconds", "infinite duration")
EVERYDAY = [("CPU, FSDP2", "time 0", "many")]


def test_events_at_times_that_are_wrong_in_several_ways_are_left_out(tmp_path):
    """One recording has each wrong time at events of its own, so that two reports judge all of them."""
    recorded = read(RECORDINGS["GPU, compiled"])
    odd, all_places = recorded, []
    for number, wrong in enumerate(EVERYDAY_WRONG):
        change, kinds = WRONG[wrong]
        for categories in kinds:
            places = chosen(recorded, categories, len(EVERYDAY_WRONG) * FEW)[number :: len(EVERYDAY_WRONG)]
            assert places
            odd = changed(odd, places, lambda event, change=change: [change(event) or event])
            all_places += places
    said, report = judge(odd, tmp_path / "odd")
    assert said == judge(changed(recorded, all_places, lambda event: []), tmp_path / "without")[0]
    assert "bad_times" in quality(report)


@pytest.mark.parametrize(("recording", "wrong", "count"), others_in_accuracy(CASES, EVERYDAY))
def test_events_at_wrong_times_are_left_out(recording, wrong, count, tmp_path):
    traces = read(RECORDINGS[recording])
    change, kinds = WRONG[wrong]
    for number, categories in enumerate(kinds):
        places = chosen(traces, categories, COUNTS[count])
        if not places:
            continue
        odd = changed(traces, places, lambda event: change(event) or [event])
        said, report = judge(odd, tmp_path / str(number))
        assert said == said_without(recording, categories, COUNTS[count]), categories
        assert {"bad_times", "bad_durations"} & quality(report).keys()


@pytest.mark.parametrize(
    ("categories", "by_us"),
    others_in_accuracy(itertools.product((KERNELS[:1], OPS), (4e6, 5e4)), [(KERNELS[:1], 4e6), (OPS, 5e4)]),
)
@pytest.mark.parametrize("count", others_in_accuracy(COUNTS, ["few"]))
@pytest.mark.parametrize("recording", others_in_accuracy([*RECORDINGS], ["GPU, compiled"]))
def test_durations_that_contain_what_follows_are_left_out(recording, count, categories, by_us, tmp_path):
    traces = read(RECORDINGS[recording])
    if recording.startswith("CPU") and categories != OPS:
        pytest.skip("no kernels")
    places = followed(traces, categories, COUNTS[count])
    assert places
    odd = changed(traces, places, lambda event: [event | {"dur": float(event["dur"]) + by_us}])
    without = changed(traces, places, lambda event: [])
    said, report = judge(odd, tmp_path / "odd")
    expected, _ = judge(without, tmp_path / "without")
    assert said == expected
    assert f"{len(places)} event" in quality(report)["bad_durations"]


def _last_place(traces: dict[str, dict[str, Any]]) -> int:
    """The place of the kernel that ends last."""
    events = next(iter(traces.values()))["traceEvents"]
    return max(
        places_of(traces, KERNELS[:1]), key=lambda place: float(events[place]["ts"]) + float(events[place]["dur"])
    )


@pytest.mark.parametrize(("place_of", "by_us"), [("last", 2e4), ("last", 4e6), ("stream of its own", 4e6)])
@pytest.mark.parametrize("recording", others_in_accuracy(["GPU, compiled", "GPU, two ranks"], ["GPU, compiled"]))
def test_work_that_lasts_on_after_a_wait_for_the_device_is_left_out(recording, by_us, place_of, tmp_path):
    """Nothing follows such a kernel on its stream, but cudaDeviceSynchronize returned before its end."""
    traces = read(RECORDINGS[recording])
    places = [_last_place(traces)] if place_of == "last" else followed(traces, KERNELS[:1], FEW)
    stream = {} if place_of == "last" else {"tid": 99}

    def lengthen(event: Event) -> list[Event]:
        args = event["args"] | ({"stream": 99} if stream else {})
        return [event | {"dur": float(event["dur"]) + by_us, "args": args} | stream]

    said, report = judge(changed(traces, places, lengthen), tmp_path / "odd")
    assert said == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert f"{len(places)} event" in quality(report)["bad_durations"]


def test_work_that_lasts_on_after_all_else_is_left_out_without_a_wait(tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    name, trace = next(iter(traces.items()))
    events = [event for event in trace["traceEvents"] if "DeviceSynchronize" not in str(event.get("name"))]
    traces = {**traces, name: {**trace, "traceEvents": events}}
    places = [_last_place(traces)]
    odd = changed(traces, places, lambda event: [event | {"dur": float(event["dur"]) + 4e6}])
    said, report = judge(odd, tmp_path / "odd")
    assert said == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert "bad_durations" in quality(report)


WRONG_MARKS: dict[str, Callable[[Event], Event]] = {
    "time 0": lambda event: event | {"ts": 0, "dur": 0},
    "no duration": lambda event: event | {"dur": 0},
    "negative duration": lambda event: event | {"dur": -9000},
    "not a time": lambda event: event | {"ts": "n/a"},
    "a year later": lambda event: event | {"ts": float(event["ts"]) + YEAR_US},
}
MARK_CASES = [(wrong, which) for wrong in WRONG_MARKS for which in range(3)]


@pytest.mark.parametrize(
    ("wrong", "which"), others_in_accuracy(MARK_CASES, [("time 0", 1), ("no duration", 0), ("not a time", 2)])
)
def test_a_step_whose_mark_has_a_wrong_time_is_the_time_between_the_others(wrong, which, tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    events = next(iter(traces.values()))["traceEvents"]
    marks = [n for n in places_of(traces, ("user_annotation",)) if str(events[n]["name"]).startswith("ProfilerStep")]
    assert len(marks) == 3
    for name, odd in (("odd", changed(traces, [marks[which]], lambda e: [WRONG_MARKS[wrong](e)])), ("right", traces)):
        judge(odd, tmp_path / name)
    odd_steps, steps = (
        loader.load(str(tmp_path / name / "run"), cache=False).trace(0).steps for name in ("odd", "right")
    )
    # The device's windows are known to the nanosecond: each is from its first work to that of the next step.
    assert odd_steps.select("step", "start_ns", "end_ns").equals(steps.select("step", "start_ns", "end_ns"))
    inner = odd_steps["host_start_ns"][1:] - steps["host_start_ns"][1:]
    assert inner.abs().max() < 50_000  # marks follow each other within 20 µs
    run = loader.load(str(tmp_path / "odd" / "run"), cache=False)
    assert "unmarked_steps" in run.trace(0).data_quality["kind"]


def test_a_step_ends_where_work_of_unmarked_steps_begins(tmp_path):
    """Of two steps in a row that lack their marks nothing says where one ends: neither belongs to the step before."""
    traces = read(RECORDINGS["CPU, stacks"])
    events = next(iter(traces.values()))["traceEvents"]
    lost = [n for n, event in enumerate(events) if event.get("name") in ("ProfilerStep#12", "ProfilerStep#13")]
    judge(changed(traces, lost, lambda event: []), tmp_path / "odd")
    judge(traces, tmp_path / "right")
    odd_steps, steps = (
        loader.load(str(tmp_path / name / "run"), cache=False).trace(0).steps for name in ("odd", "right")
    )
    assert odd_steps["step"].to_list() == [10, 11, 14, 15]
    windows = steps.filter(steps["step"].is_in([10, 11, 14, 15])).select("step", "start_ns", "end_ns")
    assert odd_steps.select("step", "start_ns", "end_ns").equals(windows)


ANNOTATIONS = ("user_annotation",)
EVERY = {
    "operators at time 0": (OPS, lambda event: _set(event, "ts", 0)),
    "operators a year later": (OPS, lambda event: _shifted(event, YEAR_US)),
    "operators in milliseconds": (OPS, lambda event: _scaled(event, 1e-3)),
    "operators 20 ms too long": (OPS, lambda event: _set(event, "dur", float(event["dur"]) + 2e4)),
    "calls 20 ms too long": (CALLS, lambda event: _set(event, "dur", float(event["dur"]) + 2e4)),
    "kernels at time 0": (KERNELS, lambda event: _set(event, "ts", 0)),
    "kernels 20 ms too long": (KERNELS[:1], lambda event: _set(event, "dur", float(event["dur"]) + 2e4)),
    "annotations 20 ms too long": (ANNOTATIONS, lambda event: _set(event, "dur", float(event["dur"]) + 2e4)),
    "annotations 4 s too long": (ANNOTATIONS, lambda event: _set(event, "dur", float(event["dur"]) + 4e6)),
    "annotations 10 s later": (ANNOTATIONS, lambda event: _shifted(event, 1e7)),
}
EVERY_CASES = [("GPU, compiled", wrong) for wrong in EVERY]
EVERY_CASES += [("CPU, FSDP2", wrong) for wrong in EVERY if wrong.startswith(("op", "ann")) and "year" not in wrong]
EVERY_EVERYDAY = [("GPU, compiled", "annotations 20 ms too long"), ("CPU, FSDP2", "operators at time 0")]


@pytest.mark.parametrize(("recording", "wrong"), others_in_accuracy(EVERY_CASES, EVERY_EVERYDAY))
def test_every_event_of_a_kind_may_be_wrong(recording, wrong, tmp_path):
    """Work at the time of its calls, and slices that nest, say which times are right."""
    traces = read(RECORDINGS[recording])
    categories, change = EVERY[wrong]
    places = places_of(traces, categories)
    said, report = judge(changed(traces, places, lambda event: change(event) or [event]), tmp_path / "odd")
    assert said == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert {"bad_times", "bad_durations"} & quality(report).keys()


UNIT_CASES = [
    (recording, categories)
    for recording in ("GPU, two ranks", "CUDA graphs", "CPU, FSDP2", "CPU, stacks")
    for categories in ((), KERNELS, (*OPS, *ANNOTATIONS, *CALLS))
    if not (recording.startswith("CPU") and categories == KERNELS)
]


@pytest.mark.parametrize(("recording", "categories"), others_in_accuracy(UNIT_CASES, [UNIT_CASES[6]]))
def test_durations_in_nanoseconds_are_converted(recording, categories, tmp_path):
    traces = read(RECORDINGS[recording])
    said, report = judge(with_durations(traces, 1e3, categories), tmp_path)
    assert said == unchanged(recording)[0]
    assert "duration_unit" in quality(report)


@pytest.mark.parametrize(("recording", "categories"), others_in_accuracy(UNIT_CASES, [UNIT_CASES[0]]))
def test_durations_in_milliseconds_are_converted(recording, categories, tmp_path):
    """They have lost the last three digits of ns, so that times are right to half a µs."""
    traces = read(RECORDINGS[recording])
    said, report = judge(with_durations(traces, 1e-3, categories), tmp_path)
    for row, expected in zip(said["summary"], unchanged(recording)[0]["summary"], strict=True):
        assert row["duration_ns"] == pytest.approx(expected["duration_ns"], rel=1e-3)
        assert row["compute_ns"] == pytest.approx(expected["compute_ns"], rel=0.05)
    assert "duration_unit" in quality(report)


@pytest.mark.parametrize("factor", others_in_accuracy([1e-3, 1e-6], [1e-3]))
def test_a_file_in_another_unit_is_an_error(factor, tmp_path):
    traces = read(RECORDINGS["CPU, FSDP2"])
    events = [
        event | {key: float(event[key]) * factor for key in ("ts", "dur") if key in event}
        for event in next(iter(traces.values()))["traceEvents"]
    ]
    name = next(iter(traces))
    _, report = judge({**traces, name: {**traces[name], "traceEvents": events}}, tmp_path)
    (finding,) = (f for f in report.findings if f.subject == "time_unit")
    assert finding.severity == Severity.ERROR


def with_durations(
    traces: dict[str, dict[str, Any]], factor: float, categories: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the traces with all durations, or those of some categories, times a factor."""

    def scaled(event: Event) -> Event:
        is_changed = "dur" in event and (not categories or event.get("cat") in categories)
        return event | {"dur": float(event["dur"]) * factor} if is_changed else event

    return {name: {**trace, "traceEvents": [*map(scaled, trace["traceEvents"])]} for name, trace in traces.items()}


@pytest.mark.parametrize("by_us", others_in_accuracy([2e4, 1e3], [2e4]))
@pytest.mark.parametrize("recording", others_in_accuracy(["GPU, compiled", "CPU, stacks"], ["GPU, compiled"]))
def test_one_operator_in_a_hundred_may_be_too_long(recording, by_us, tmp_path):
    """It crosses others, or contains operators that stand next to its other calls."""
    traces = read(RECORDINGS[recording])
    places = places_of(traces, OPS)
    places = sorted(random.Random(1).sample(places, len(places) // 100))
    odd = changed(traces, places, lambda event: [event | {"dur": float(event["dur"]) + by_us}])
    said, report = judge(odd, tmp_path / "odd")
    assert said == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert "bad_durations" in quality(report)


OUTLASTING_US = 3e7


@pytest.mark.parametrize(
    ("recording", "category"),
    others_in_accuracy(
        [(recording, category) for recording in RECORDINGS for category in ("user_annotation", "cpu_op")],
        [("GPU, compiled", "user_annotation")],
    ),
)
def test_slices_of_the_host_that_end_after_the_profiler_stopped_are_left_out(recording, category, tmp_path):
    traces = read(RECORDINGS[recording])
    events = next(iter(traces.values()))["traceEvents"]
    places = [place for place in places_of(traces, (category,)) if "ProfilerStep" not in events[place]["name"]]
    place = random.Random(2).choice(places)
    odd = changed(traces, [place], lambda event: [event | {"dur": float(event["dur"]) + OUTLASTING_US}])
    said, report = judge(odd, tmp_path / "odd")
    assert said == judge(changed(traces, [place], lambda event: []), tmp_path / "without")[0]
    assert "bad_durations" in quality(report)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("recording", others_in_accuracy(["GPU, compiled", "CPU, FSDP2"], ["GPU, compiled"]))
def test_a_mark_of_a_step_that_ends_after_the_profiler_stopped_is_no_stall(recording, which, tmp_path):
    traces = read(RECORDINGS[recording])
    events = next(iter(traces.values()))["traceEvents"]
    marks = [place for place in places_of(traces, ("user_annotation",)) if "ProfilerStep" in events[place]["name"]]
    place = sorted(marks, key=lambda mark: float(events[mark]["ts"]))[which]
    odd = changed(traces, [place], lambda event: [event | {"dur": float(event["dur"]) + OUTLASTING_US}])
    said, report = judge(odd, tmp_path)
    expected = unchanged(recording)[0]
    assert [(row["step"], row["rank"]) for row in said["summary"]] == [
        (row["step"], row["rank"]) for row in expected["summary"]
    ]
    assert {finding["code"] for finding in said["findings"]} == {finding["code"] for finding in expected["findings"]}
    assert "bad_durations" in quality(report)


def test_without_the_time_at_which_the_profiler_stopped_a_long_last_annotation_stays(tmp_path):
    """The host may have stalled while the profiler recorded."""
    events = [slice_("cpu_op", "aten::mm", 100 + 50 * number, 40, tid=1) for number in range(20)]
    events.append(slice_("user_annotation", "evaluate", 1_100, 3e6, tid=1))
    stop = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1_200, "s": "g"}
    ends_soon = [*events[:-1], events[-1] | {"dur": 900}, stop]
    for name, written in {"open": events, "stopped": [*events, stop], "ends soon": ends_soon}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": written, "baseTimeNanoseconds": 0}))
    assert "evaluate" in reader.read(str(tmp_path / "open.json"), rank=0).ops["name"]
    assert "evaluate" not in reader.read(str(tmp_path / "stopped.json"), rank=0).ops["name"]
    assert "evaluate" in reader.read(str(tmp_path / "ends soon.json"), rank=0).ops["name"]


@pytest.mark.parametrize("seed", range(3))
def test_a_collective_of_a_backends_thread_that_contains_later_ones_is_left_out(seed, tmp_path):
    """Gloo's thread runs one at a time; it may overlap the thread that computes."""
    chance, events, at_us = random.Random(seed), [], 1_000.0
    for _ in range(12):
        compute_us, transfer_us = chance.uniform(500, 900), chance.uniform(100, 300)
        events.append(slice_("cpu_op", "aten::mm", at_us, compute_us, tid=1))
        at_us += compute_us
        events.append(slice_("user_annotation", "gloo:all_reduce", at_us + 10, transfer_us, tid=2))
        at_us += transfer_us + 20
    collectives = [place for place, event in enumerate(events) if event["tid"] == 2]
    odd = chance.choice(collectives[:-4])
    kept = [event for place, event in enumerate(events) if place != odd]
    events[odd] = events[odd] | {"dur": 8_000.0}
    for name, written in {"odd": events, "without": kept}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": written, "baseTimeNanoseconds": 0}))
    traces = {name: reader.read(str(tmp_path / f"{name}.json"), rank=0) for name in ("odd", "without")}
    times = ["start_ns", "dur_ns"]
    assert traces["odd"].activities.select(times).equals(traces["without"].activities.select(times))
    assert "bad_durations" in traces["odd"].data_quality["kind"]


def test_ends_that_cross_by_rounding_are_right(tmp_path):
    """An operator that takes 25 times as long as usual, and ends 100 ns after the one around it."""
    events = []
    for number in range(40):
        start, length = 100 + 50 * number, 10.0 if number == 20 else 0.4
        events.append(slice_("cpu_op", "aten::item", start, length, tid=1))
        events.append(slice_("cpu_op", "aten::_local_scalar_dense", start + 0.1, length, tid=1))
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 0}))
    trace = reader.read(str(tmp_path / "rank0.json"), rank=0)
    assert "bad_durations" not in trace.data_quality["kind"]
    assert trace.ops.height == 80


def test_one_event_in_a_hundred_may_have_a_fractional_number(tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    places = [place for place in places_of(traces, (*OPS, *CALLS)) if place % 100 == 0]

    def with_float(event: Event) -> list[Event]:
        args = event.get("args", {})
        return [event | {"args": {key: float(value) if key == "External id" else value for key, value in args.items()}}]

    assert judge(changed(traces, places, with_float), tmp_path / "odd")[0] == unchanged("GPU, compiled")[0]


def places_of(traces: dict[str, dict[str, Any]], categories: Sequence[str]) -> list[int]:
    """Places of the slices of these categories in the first trace."""
    events = next(iter(traces.values()))["traceEvents"]
    return [place for place, event in enumerate(events) if event.get("ph") == "X" and event.get("cat") in categories]


@pytest.mark.parametrize(
    ("recording", "kinds"),
    others_in_accuracy(
        itertools.product(RECORDINGS, TWICE),
        [("GPU, compiled", "all"), ("GPU, compiled", "kernels")],
    ),
)
def test_events_that_are_written_twice_count_once(recording, kinds, tmp_path):
    traces = read(RECORDINGS[recording])
    events = next(iter(traces.values()))["traceEvents"]
    categories = TWICE[kinds] or {event.get("cat") for event in events}
    is_slice = [event.get("ph") == "X" and event.get("cat") in categories for event in events]
    places = [place for place, chosen in enumerate(is_slice) if chosen]
    if not places:
        pytest.skip("no such events")
    said, report = judge(changed(traces, places, lambda event: [event, event]), tmp_path / "twice")
    expected, once = unchanged(recording)
    assert said == expected
    assert "duplicate_events" in quality(report)
    assert "duplicate_events" not in quality(once)
    assert "dropped_events" not in quality(report).keys() - quality(once).keys()


@pytest.mark.parametrize("rounded_ratio", [0.05, 0.6, 1.0])
def test_work_without_durations_is_not_judged_as_idle_time(rounded_ratio, tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    places = places_of(traces, KERNELS)
    rounded = random.Random(1).sample(places, round(rounded_ratio * len(places)))
    _, report = judge(changed(traces, rounded, lambda event: event | {"dur": 0}), tmp_path / "instants")
    timed = {finding.code for finding in report.findings if finding.severity > Severity.INFO} - {"DATA001"}
    is_unknown = rounded_ratio >= 0.5  # fewer may be rounded to whole µs
    assert ("device_times" in quality(report)) == is_unknown
    assert bool(timed) == (not is_unknown)


def test_calls_of_one_number_under_two_names_are_one_call(tmp_path):
    """Nsight Systems exported a call and its version, cudaMemcpy and cudaMemcpy_v3020."""
    traces = read(RECORDINGS["GPU, compiled"])
    events = next(iter(traces.values()))["traceEvents"]
    is_call = [event.get("cat") in CALLS and float(event["dur"]) > 1 for event in events]
    places = [place for place, is_long in enumerate(is_call) if is_long]

    def twice(event: Event) -> list[Event]:
        alias = event | {"name": event["name"] + "_v3020", "ts": float(event["ts"]) + 0.2}
        return [event, alias | {"dur": max(float(event["dur"]) - 0.4, 0)}]

    said, report = judge(changed(traces, places, twice), tmp_path / "twice")
    assert said == unchanged("GPU, compiled")[0]
    assert f"{len(places):,} event" in quality(report)["duplicate_events"]


@pytest.mark.parametrize("recording", others_in_accuracy([*RECORDINGS], ["GPU, compiled"]))
def test_ids_may_be_text(recording, tmp_path):
    def as_text(event: Event) -> list[Event]:
        if "tid" not in event:
            return [event]
        args = event.get("args", {})
        ids = ("correlation", "External id", "device", "stream", "Sequence number", "Fwd thread id")
        texts = {key: str(value) if key in ids else value for key, value in args.items()}
        return (
            [event | {"pid": str(event["pid"]), "tid": str(event["tid"]), "args": texts}] if "tid" in event else [event]
        )

    traces = read(RECORDINGS[recording])
    name, trace = next(iter(traces.items()))
    info = trace.get("distributedInfo")
    header = (
        {"distributedInfo": {**info, "rank": str(info["rank"]), "world_size": str(info["world_size"])}} if info else {}
    )
    odd = changed({**traces, name: trace | header}, range(len(trace["traceEvents"])), as_text)
    assert judge(odd, tmp_path / "text")[0] == unchanged(recording)[0]


@pytest.mark.parametrize("recording", others_in_accuracy(["GPU, two ranks", "GPU, compiled"], ["GPU, compiled"]))
def test_copies_without_a_duration_are_left_out(recording, tmp_path):
    traces = read(RECORDINGS[recording])
    places = places_of(traces, ("gpu_memcpy", "gpu_memset"))
    odd = changed(traces, places, lambda event: [{key: value for key, value in event.items() if key != "dur"}])
    said, report = judge(odd, tmp_path / "odd")
    assert said == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert f"{len(places):,} have no usable time" in quality(report)["bad_times"]


DRIVER = ("cuda_driver",)
WITHOUT_NUMBERS = {
    "work": KERNELS,
    "calls": CALLS + DRIVER,
    "both": KERNELS + CALLS + DRIVER,
    "copies": ("gpu_memcpy", "gpu_memset"),
}


@pytest.mark.parametrize(
    ("recording", "which"),
    others_in_accuracy(
        [(recording, which) for recording in ("GPU, two ranks", "GPU, compiled") for which in WITHOUT_NUMBERS],
        [("GPU, compiled", "work"), ("GPU, compiled", "both")],
    ),
)
def test_arrows_say_which_call_launched_work_without_a_number(recording, which, tmp_path):
    traces = read(RECORDINGS[recording])
    events = next(iter(traces.values()))["traceEvents"]
    assert any(event.get("cat") == "ac2g" for event in events)
    places = places_of(
        traces, (*WITHOUT_NUMBERS[which], *(("cuda_driver",) if CALLS[0] in WITHOUT_NUMBERS[which] else ()))
    )

    def without_number(event: Event) -> list[Event]:
        return [event | {"args": {key: value for key, value in event["args"].items() if key != "correlation"}}]

    said, report = judge(changed(traces, places, without_number), tmp_path / "odd")
    assert said == unchanged(recording)[0]
    without_arrows = [place for place, event in enumerate(events) if event.get("cat") == "ac2g" or place in set(places)]
    silent = changed(traces, without_arrows, lambda event: [] if event.get("cat") == "ac2g" else without_number(event))
    _, blind = judge(silent, tmp_path / "blind")
    assert quality(blind).keys() - quality(report).keys()  # without both, something is not known


TORCHREC = ROOT.parent / "shared" / "traces" / "torchrec_v100_4ranks"


@pytest.mark.parametrize("hours", others_in_accuracy([5, -24 * 365 * 38], [-24 * 365 * 38]))
def test_the_clock_of_one_rank_changes_no_finding(hours, tmp_path):
    if not TORCHREC.is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    files = sorted(TORCHREC.glob("*.json.gz"))
    traces = {file.name.removesuffix(".gz"): msgspec.json.decode(gzip.decompress(file.read_bytes())) for file in files}
    last = [*traces][-1]
    events = [
        event | ({"ts": event["ts"] + hours * 3_600_000_000} if "ts" in event else {})
        for event in traces[last]["traceEvents"]
    ]
    as_recorded = judge(traces, tmp_path / "recorded")[0]
    shifted = judge({**traces, last: traces[last] | {"traceEvents": events}}, tmp_path / "shifted")[0]
    for recorded_part, shifted_part in zip(as_recorded["findings"], shifted["findings"], strict=True):
        assert shifted_part["id"] == recorded_part["id"]
        assert shifted_part["severity"] == recorded_part["severity"]
        assert shifted_part["cost_ns"] == pytest.approx(recorded_part["cost_ns"], rel=1e-3)


@pytest.mark.parametrize("name", ["[memory]", "Stream Wait Event"])
def test_waits_and_allocations_at_wrong_times_are_left_out(name, tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    events = next(iter(traces.values()))["traceEvents"]
    places = [place for place, event in enumerate(events) if event.get("name") == name][:FEW]
    if not places:
        pytest.skip("no such events")
    odd, report = judge(changed(traces, places, lambda event: [event | {"ts": 0}]), tmp_path / "odd")
    assert odd == judge(changed(traces, places, lambda event: []), tmp_path / "without")[0]
    assert "bad_times" in quality(report)


@pytest.mark.parametrize("document", [[{"a": 1}, {"b": 2}], {"traceEvents": [{"value": 3}]}])
def test_a_list_of_objects_that_are_no_events_is_no_trace(document, tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BadTraceError):
        loader.load(str(path), cache=False)


@pytest.mark.parametrize(
    ("stated", "rank"), [("3", 3), (" 3", 3), (3.0, 3), ("three", 0), (True, 0), (2.5, 0), ("-1", 0)]
)
def test_a_rank_as_text_is_that_rank(stated, rank, tmp_path):
    traces = read(RECORDINGS["GPU, compiled"])
    trace = next(iter(traces.values()))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": stated, "world_size": "8"}, **trace}), encoding="utf-8")
    run = loader.load(str(path), cache=False)
    assert [source.rank for source in run.sources] == [rank]
