"""Recordings without a field, category, kind of event or table, alone and in pairs: every fact and rule on each.

Nothing crashes, columns keep their types, and a report that changes says why: a finding on data quality, a note, or
what was not recorded. The parts come from the recordings themselves (`tests.support.missing_parts`).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import judged_parts, missing_parts
from tests.support.cli_runner import ROOT
from tests.support.missing_parts import Part
from tests.support.selection import others_in_accuracy

ALL = [str(folder.relative_to(ROOT.parent)) for folder in missing_parts.folders()]
MOST_SLICES = 300
"""Of a trace, so that all facts and rules take less than a second."""


def problems(folder: Path, cases: Sequence[tuple[Part, ...]], tmp_path: Path) -> dict[str, str]:
    """What is wrong with what is said of a recording without parts, by the parts; empty if nothing is."""
    files = missing_parts.read(folder, MOST_SLICES, most_ranks=2)
    intact = judged_parts.said(files, tmp_path / "intact" / "run")
    assert not intact.faults
    found = {}
    for number, case in enumerate(cases):
        without = judged_parts.said(missing_parts.changed(files, case), tmp_path / str(number) / "run")
        problem = judged_parts.problem(intact, without, needs_reason=missing_parts.needs_reason(case))
        if problem:
            found[" and ".join(map(str, case))] = problem
    return found


def alone(folder: Path) -> list[Part]:
    return missing_parts.parts(missing_parts.read(folder, MOST_SLICES, most_ranks=2))


EVERYDAY = {
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
    "tests/recordings/nsight": {"remove table StringIds of nsight", "empty column NVTX_EVENTS/text of nsight"},
}  # fmt: skip
"""What failed once, and a part of each kind of files."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_recordings_without_one_part(name, tmp_path):
    cases = [(part,) for part in alone(ROOT / name) if str(part) in EVERYDAY[name]]
    assert cases
    assert problems(ROOT / name, cases, tmp_path) == {}


def test_recordings_without_two_parts(tmp_path):
    folder = ROOT / "sample_traces" / "gpu" / "compiled"
    cases = list(itertools.islice(missing_parts.pairs(alone(folder)), 0, None, 997))
    assert problems(folder, cases, tmp_path) == {}


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("name", others_in_accuracy(ALL, ()))
def test_all_recordings_without_each_part(name, tmp_path):
    folder = ROOT.parent / name
    assert problems(folder, [(part,) for part in alone(folder)], tmp_path) == {}


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("name", others_in_accuracy(ALL, ()))
def test_all_recordings_without_each_pair_of_parts(name, tmp_path):
    folder = ROOT.parent / name
    assert problems(folder, list(missing_parts.pairs(alone(folder))), tmp_path) == {}
