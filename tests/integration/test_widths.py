"""What commands print for recorded runs at widths from 40 columns on: no line is wider, and no number is cut."""

import functools
import re
from pathlib import Path

import pytest

import tracekit
from tracekit.analysis.time import breakdown
from tracekit.regression import comparison
from tracekit.regression.comparison import RunSamples
from tracekit.report import comparison as comparison_report
from tracekit.report import summary_tables, text, what_if
from tracekit.report.document import Document
from tracekit.report.render import text as render_text
from tracekit.rules import stated_savings

SAMPLES = Path(__file__).parents[2] / "sample_traces"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d.,]*(?: [kMGT]?i?B| [mµn]?s|%)(?!\w)")


@functools.cache
def document(kind: str, name: str) -> Document:
    run = tracekit.load(SAMPLES / name)
    if kind == "summary":
        return summary_tables.document(breakdown.slowest_device_by_rank(run))
    if kind == "compare":
        other = tracekit.load(SAMPLES / "demo-fsdp2")
        compared = comparison.compare(RunSamples.of(other), RunSamples.of(run), allow_different=True)
        return comparison_report.document(compared)
    report = run.check()
    if kind == "whatif":
        return what_if.document(stated_savings.answer(report), (), run=run.name)
    return text.brief(report, run) if kind == "check" else text.document(report, run)


@pytest.mark.parametrize("name", ["ci/red", "gpu/slow-rank", "parallelism/moe-ep2"])
@pytest.mark.parametrize("kind", ["check", "check -v", "summary", "whatif", "compare"])
def test_numbers_are_whole_at_every_width(kind: str, name: str) -> None:
    whole = set(NUMBER.findall(" ".join(render_text.render(document(kind, name), width=400).split())))
    assert whole
    for width in (40, 60, 80, 120):
        printed = render_text.render(document(kind, name), width=width)
        assert max(map(len, printed.splitlines())) <= width, width
        numbers = set(NUMBER.findall(" ".join(printed.split())))
        assert numbers <= whole, (width, numbers - whole)
        assert not re.search(r"(?<![\w.])[+-]?\d[\d.,]*…", printed), (width, printed)
