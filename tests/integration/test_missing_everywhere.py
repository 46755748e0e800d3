"""Recordings without a field, category, kind of event or table, alone and in pairs: every fact and rule on each.

Nothing crashes, columns keep their types, and a report that changes says why: a finding on data quality, a note, or
what was not recorded. `python -m tests.fuzz.missing` tries all parts that the recordings have; these are of every day.
"""

import pytest

from tests.fuzz import missing
from tests.support import judged_parts
from tests.support.cli_runner import ROOT
from tests.support.selection import others_in_accuracy

FAILED_ONCE = {
    "sample_traces/gpu/compiled": {
        "remove argument Device Id of trace", "empty argument Total Allocated of trace",
        "rename category kernel of trace", "remove category cuda_runtime of trace", "rename field cat of trace",
    },
    "sample_traces/faults/healthy-background-save": {
        "remove key []/checkpoint of checkpoint log", "empty key []/start_ns of checkpoint log",
        "rename key []/step of checkpoint log", "remove key []/step_time_ns of metrics log",
        "empty key []/step of metrics log",
    },
    "tests/recordings/deepspeed_pipeline": {
        "remove field dur of trace", "remove name gloo:recv of trace", "rename category cpu_op of trace",
    },
    "tests/recordings/allocator_h100": {
        "remove key segments/[]/blocks of snapshot", "empty key device_traces of snapshot",
    },
    "tests/recordings/hangs/killed": {"remove key entries/[]/frames of hang dump", "empty key pg_config of hang dump"},
    "tests/recordings/torchtitan_1f1b_tp2": {"empty argument External id of trace"},
    "tests/recordings/nsight": {"remove table StringIds of nsight", "empty column NVTX_EVENTS/text of nsight"},
}  # fmt: skip
"""What failed once, and a part of each kind of files."""

EVERYDAY = [
    ("sample_traces/gpu/compiled", "remove argument Device Id of trace"),
    ("sample_traces/faults/healthy-background-save", "empty key []/start_ns of checkpoint log"),
    ("sample_traces/faults/healthy-background-save", "remove key []/step_time_ns of metrics log"),
    *(
        (name, part)
        for name in ("tests/recordings/allocator_h100", "tests/recordings/hangs/killed", "tests/recordings/nsight")
        for part in sorted(FAILED_ONCE[name])
    ),
]


PAIRS = [
    ("rename category kernel of trace", "remove argument External id of trace"),
    ("empty argument correlation of trace", "remove argument stream of trace"),
    ("remove field dur of trace", "empty argument device of trace"),
    ("remove category cuda_runtime of trace", "rename key deviceProperties of trace"),
]


def problems(name: str, cases: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """What is wrong with what is said of a recording without parts, by the parts; empty if nothing is."""
    parts = {str(part): part for part in missing.parts_of(ROOT / name)}
    judged = {case: missing.judge((ROOT / name, tuple(parts[part] for part in case)))[0] for case in cases}
    return {case: problem for case, problem in judged.items() if problem}


@pytest.mark.parametrize(
    ("name", "part"),
    others_in_accuracy([(name, part) for name in FAILED_ONCE for part in sorted(FAILED_ONCE[name])], EVERYDAY),
)
def test_recordings_without_one_part(name, part):
    assert problems(name, [(part,)]) == {}


@pytest.mark.parametrize("pair", others_in_accuracy([(pair,) for pair in PAIRS], [(PAIRS[2],)]), ids=" and ".join)
def test_recordings_without_two_parts(pair):
    assert problems("sample_traces/gpu/compiled", [pair]) == {}


@pytest.mark.parametrize(
    ("message", "is_impossible"),
    [("10.6 s of 7.95 s", True), ("7.95 s of 10.6 s", False), ("900 µs of 1.2 ms", False), ("1,200 ms of 1.1 s", True)],
)
def test_a_part_is_not_more_than_its_whole(message, is_impossible):
    finding = {"id": "HOST001", "sentence": "", "message": message, "impact": 0.5, "confidence": 0.9}
    assert bool(list(judged_parts.impossible({"findings": [finding], "summary": []}))) == is_impossible
