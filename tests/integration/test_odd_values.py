"""Odd values in recordings: the rest is judged as if the events that have them were not there.

Each case changes some events of a real recording and compares its report with that of the recording without them.
"""

import functools
import gzip
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.selection import others_in_accuracy
from tracekit.ingest import loader
from tracekit.report import json as report_json
from tracekit.rules import engine
from tracekit.rules.rule import Report

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


def read(folder: str) -> dict[str, dict[str, Any]]:
    """Return the traces of a run by file name."""
    files = sorted((ROOT / "sample_traces" / folder).glob("*.json.gz"))
    return {file.name.removesuffix(".gz"): json.loads(gzip.decompress(file.read_bytes())) for file in files}


def judge(traces: dict[str, dict[str, Any]], folder: Path) -> tuple[dict[str, Any], Report]:
    """Return what is said of traces, without data quality and what describes the files, and the whole report."""
    run_folder = folder / "run"
    run_folder.mkdir(parents=True)
    for name, trace in traces.items():
        (run_folder / name).write_text(json.dumps(trace), encoding="utf-8")
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
    name = next(iter(traces))
    events = []
    for place, event in enumerate(traces[name]["traceEvents"]):
        replaced = change(json.loads(json.dumps(event))) if place in set(places) else event
        events += replaced if isinstance(replaced, list) else [replaced]
    return {**traces, name: {**traces[name], "traceEvents": events}}


def chosen(traces: dict[str, dict[str, Any]], categories: Sequence[str], count: int, seed: int = 0) -> list[int]:
    """Return the places of some events of these categories in the first trace."""
    events = next(iter(traces.values()))["traceEvents"]
    places = [place for place, event in enumerate(events) if event.get("ph") == "X" and event.get("cat") in categories]
    return sorted(random.Random(seed).sample(places, min(count, len(places) // 20)))


@functools.cache
def said_without(recording: str, categories: tuple[str, ...], count: int) -> dict[str, Any]:
    """Return what is said of a recording without the chosen events."""
    traces = read(RECORDINGS[recording])
    with tempfile.TemporaryDirectory() as folder:
        places = chosen(traces, categories, count)
        return judge(changed(traces, places, lambda event: []), Path(folder) / "without")[0]


@pytest.mark.parametrize("recording", others_in_accuracy([*RECORDINGS], ["GPU, two ranks", "CPU, FSDP2"]))
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("wrong", WRONG)
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
