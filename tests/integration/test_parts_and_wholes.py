"""No part is larger than its whole: in what findings say, in their evidence, and in the tables of a run."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import shared_findings
from tests.support.selection import others_in_accuracy

ROOT = Path(__file__).parents[2]
_UNITS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9,
          "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # fmt: skip
_AMOUNT = r"(\d[\d,]*(?:\.\d+)?) (ns|µs|ms|s|min|h|B|KiB|MiB|GiB|TiB)\b"
_OF = re.compile(rf"{_AMOUNT}(?: \([\d.]+%\))? (?:of|on|in) (?:the )?{_AMOUNT}")
_OF_THAT = re.compile(rf"{_AMOUNT} of (?:that|it|them|this)\b")
_SHARE = re.compile(r"(-?[\d.,]+)%")
_ROUNDED = 1.06
"""Numbers have three digits at most: 1.0 may be 1.049."""
_MAY_EXCEED = ("MEM", "TP", "COMP")
"""Families that compare with another amount by percents above 100, such as an allocation with the device's memory."""


def samples() -> list[Path]:
    """Every folder of traces here, public ones included where they are present."""
    roots = (ROOT / "sample_traces", ROOT / "tests" / "recordings", ROOT.parent / "shared" / "traces")
    folders = {path.parent for root in roots if root.exists() for path in root.rglob("*trace.json.gz")}
    return sorted(folder for folder in folders if "foreign" not in folder.parts)


_FEW = ("gpu/compiled", "faults/host-sync", "faults/slow-disk", "ci/red")
EVERYDAY = [ROOT / "sample_traces" / name for name in _FEW]


@pytest.mark.parametrize("folder", others_in_accuracy(samples(), EVERYDAY), ids=lambda folder: folder.name)
def test_no_part_exceeds_its_whole(folder):
    for finding in shared_findings.findings(folder):
        assert finding.impact is None or 0 <= finding.impact <= 1, finding.id
        assert not list(_excesses(f"{finding.sentence}. {finding.message}")), finding.message
        shares = [float(share.replace(",", "")) for share in _SHARE.findall(finding.message)]
        assert finding.code.startswith(_MAY_EXCEED) or all(0 <= share <= 100 for share in shares), finding.message
        if finding.evidence is not None:
            assert not list(_ratios_beyond_one(finding.evidence)), finding.id
    run = tracekit.load(folder)
    steps = run.table("breakdown")
    parts = [pl.col(name) for name in steps.columns if name.endswith("_ns") and name not in _NO_PARTS]
    assert steps.filter(pl.any_horizontal(part > pl.col("duration_ns") for part in parts)).is_empty()
    assert steps.filter(pl.any_horizontal(part < 0 for part in parts)).is_empty()
    whole = pl.sum_horizontal("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert steps.filter(whole != pl.col("duration_ns")).is_empty()
    for name in ("breakdown", "waits", "kernel_sequences", "critical_paths", "data_quality"):
        assert not list(_ratios_beyond_one(run.table(name))), name


_NO_PARTS = ("start_ns", "end_ns", "duration_ns", "communication_ns")
"""Communication may run on several streams at a time."""


def _excesses(text: str) -> Iterator[str]:
    for match in _OF.finditer(text):
        if _size(match[1], match[2]) > _ROUNDED * _size(match[3], match[4]):
            yield match[0]
    amounts = list(re.finditer(_AMOUNT, text))
    of_that = {match.start() for match in _OF_THAT.finditer(text)}
    for whole, part in pairwise(amounts):
        if part.start() in of_that and _size(part[1], part[2]) > _ROUNDED * _size(whole[1], whole[2]):
            yield f"{part[0]} of {whole[0]}"


def _size(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * _UNITS[unit]


def _ratios_beyond_one(rows: pl.DataFrame) -> Iterator[str]:
    for name in rows.columns:
        if name.endswith("_ratio") and rows[name].dtype.is_float() and name not in _COMPARISONS:
            values = rows[name].drop_nulls()
            if len(values) and not values.is_between(-1e-9, 1 + 1e-9).all():
                yield f"{name}: {values.max()}"


_COMPARISONS = ("ops_ratio", "slowdown_ratio", "load_ratio", "growth_ratio")
"""Ratios of two amounts neither of which is part of the other."""


@pytest.mark.parametrize(
    ("text", "excesses"),
    [
        ("idle 9.59 ms of 11.3 ms (85.1%). During 7.62 ms of that, it waits", []),
        ("idle 12.1 ms of 11.3 ms", ["12.1 ms of 11.3 ms"]),
        ("idle 7.95 s; 10.6 s of it are first uses", ["10.6 s of 7.95 s"]),
        ("842 MiB (42.9%) of the 1.92 GiB peak", []),
    ],
)
def test_sums_that_exceed_their_whole_are_seen(text, excesses):
    assert list(_excesses(text)) == excesses
