"""Reports as text: readable at every width, plain where colours are not wanted, inert whatever the names in a trace."""

import re
from collections.abc import Callable

import polars as pl
import pytest

from tests.support import drawn_traces, sample_report
from tracekit.report import text
from tracekit.rules.rule import Finding, Severity

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [80, 160])
def test_a_report_reads_as_its_golden_file(golden: Golden, width: int) -> None:
    run = sample_report.run()
    golden(f"report_{width}.txt", text.render(sample_report.report(run), run, width=width, is_detailed=True))


@pytest.mark.parametrize("width", [40, 80])
def test_a_report_in_brief_reads_as_its_golden_file(golden: Golden, width: int) -> None:
    run = sample_report.run()
    golden(f"report_brief_{width}.txt", text.render(sample_report.report(run), run, width=width))


@pytest.mark.parametrize("width", [80, 160])
def test_two_reports_stand_side_by_side_where_there_is_room(golden: Golden, width: int) -> None:
    pairs = [
        (sample_report.report(today), today)
        for today in (sample_report.run("runs/fsdp2"), sample_report.run("runs/yafsdp", strategy="yafsdp"))
    ]
    pairs[1] = (sample_report.report(pairs[1][1], found=sample_report.findings()[1:]), pairs[1][1])
    golden(f"reports_{width}.txt", text.render_several(pairs, width=width, is_detailed=True))


def test_a_run_without_findings_says_so_first(golden: Golden) -> None:
    run = sample_report.run()
    golden("report_clean.txt", text.render(sample_report.report(run, found=()), run, width=80))


@pytest.mark.parametrize("is_detailed", [False, True])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 160, 220])
def test_no_line_is_wider_than_the_limit(width: int, is_detailed: bool) -> None:
    run = sample_report.run("runs/" + "a_very_long_name_of_a_run_" * 5)
    pairs = [(sample_report.report(run), run)] * 3
    options = {"width": width, "is_detailed": is_detailed}
    for shown in (text.render(*pairs[0], **options), text.render_several(pairs, **options)):
        assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100])
def test_numbers_of_evidence_are_whole_at_every_width(width: int) -> None:
    run = sample_report.run()
    shown = text.render(sample_report.report(run), run, width=width, is_detailed=True)
    assert re.search(r"6 ms +2 ms +50\.0%", shown)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_number_of_evidence_is_cut_however_many_columns_there_are(width: int) -> None:
    row = {"rank": [0], "step": [3], "name": ["ncclDevKernel_AllGather_RING_LL"], "start_ns": [27_800_000]}
    row |= {f"measure{number}_ns": [1_234_567 + number] for number in range(12)}
    found = Finding("COMM001", Severity.WARNING, "slow", "hurry", evidence=pl.DataFrame(row))
    run = sample_report.run()
    shown = text.render(sample_report.report(run, found=(found,)), run, width=width, is_detailed=True)
    cells = next(line for line in shown.splitlines() if "27.8 ms" in line).split()
    assert [cell for cell in cells if "…" in cell and not cell.startswith("ncclDev")] == []


def test_evidence_drops_empty_columns_and_then_the_least_important() -> None:
    row = {"rank": [0], "device": [None], "lane": [7], "name": ["gloo:all_gather"], "op": ["all_gather"]}
    row |= {"unit": ["model.decoder.layers.11.feed_forward"], "dur_ns": [31_400_000]}
    run = sample_report.run()
    found = Finding("COMM001", Severity.WARNING, "slow", "hurry", evidence=pl.DataFrame(row))
    report = sample_report.report(run, found=(found,))

    def header(width: int) -> list[str]:
        shown = text.render(report, run, width=width, is_detailed=True)
        return next(line.split() for line in shown.splitlines() if "duration" in line)

    assert header(120) == ["rank", "lane", "name", "op", "unit", "duration"]
    assert header(80) == ["rank", "op", "unit", "duration"]


def test_colours_are_used_only_on_request() -> None:
    run = sample_report.run()
    assert "\x1b[" in text.render(sample_report.report(run), run, color=True)
    assert "\x1b" not in text.render(sample_report.report(run), run, color=False)


def test_colours_change_no_letter() -> None:
    run = sample_report.run()
    coloured = text.render(sample_report.report(run), run, width=80, color=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == text.render(
        sample_report.report(run), run, width=80
    ).splitlines()


def test_names_in_a_trace_cannot_steer_the_terminal() -> None:
    nasty = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\u202e"
    evidence = pl.DataFrame({"rank": [0], "name": [nasty]})
    found = Finding("COMM001", Severity.WARNING, f"bad {nasty}", nasty, evidence=evidence)
    run = sample_report.run(f"runs/{nasty}", strategy=nasty)
    report = sample_report.report(run, found=(found,))
    shown = text.render(report, run, width=100) + text.render_several([(report, run)] * 2, width=100)
    assert not set(shown) & set("\x1b\x07\u202e")
    assert "[bold red]x[/]" in shown  # no markup language is read from it either


def test_a_run_of_many_ranks_shows_the_typical_one_and_says_where_the_rest_is() -> None:
    many = drawn_traces.run(
        *(drawn_traces.trace(sample_report.PICTURE, rank=rank) for rank in range(40)), path="runs/many"
    )
    shown = text.render(sample_report.report(many), many, is_detailed=True)
    assert "of 40 ranks; all of them: tracekit summary runs/many" in shown
    assert re.search(r"typical +0 ", shown)
    assert re.search(r"95th percentile +— ", shown)


def test_a_run_without_work_says_so() -> None:
    empty = drawn_traces.run(drawn_traces.trace("compute ...."), path="runs/empty")
    assert "no activities" in text.render(sample_report.report(empty, found=()), empty)
