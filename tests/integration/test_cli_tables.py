"""query, kernels, summary and export as a shell and a terminal see them."""

import csv
import io
import json
import math
import re
from pathlib import Path

import polars as pl
import pytest

from tests.support import loaded_runs
from tests.support.cli_runner import on_a_terminal, only_line, tracekit
from tests.support.kineto_files import slice_, trace, write
from tracekit.cli import output

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")
NASTY = {
    "red": "\x1b[31mred\x1b[0m",
    "a title": "\x1b]0;owned\x07",
    "one byte": "\x9b31m",
    "two lines": "a\nb\tc",
    "backwards": "\u202egpj.exe",
    "markup": "[bold]loud[/bold][/x]",
    "quotes": 'a,"b"',
    "long": "x" * 5000,
}
CONTROL = ("\x1b", "\x07", "\x9b", "\u202e")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose kernels and ops have names that nobody should print."""
    events = [slice_("user_annotation", "ProfilerStep#0", 0, 1000, tid=1)]
    for i, name in enumerate(NASTY.values()):
        events.append(slice_("cpu_op", name, 10 * i + 1, 8, tid=1))
        events.append(slice_("cuda_runtime", "cudaLaunchKernel", 10 * i + 2, 2, tid=1, correlation=i + 1))
        events.append(slice_("kernel", name, 10 * i + 5, 4, tid=7, device=0, stream=7, correlation=i + 1))
    run = tmp_path_factory.mktemp("nasty") / "run [x]\x1b[31m"
    write(run / "rank0 [/y].json", trace(0, 1, steps=0) | {"traceEvents": events})
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks that share four collectives; the clock of rank 1 is 40 µs fast."""
    run = tmp_path_factory.mktemp("pair")
    for rank in (0, 1):
        write(run / f"rank{rank}.json", trace(rank, start_us=100.0 + 40 * rank, steps=4))
    return run


# Names from traces can do nothing to a terminal ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("kernels", "RUN"),
        ("kernels", "RUN", "--of", "host", "--format", "csv"),
        ("query", "RUN", "SELECT name FROM ops"),
        ("query", "RUN", "SELECT name FROM ops", "--format", "csv"),
        ("query", "RUN", "SELECT name, [name] AS l, {'x': name} AS s FROM ops", "--format", "json"),
        ("query", "RUN", "SELECT error(name) FROM ops"),
        ("query", "RUN", 'SELECT "\x1b[31m" FROM ops'),
        ("kernels", "/nothing\x1b[31m"),
        ("export", "RUN", "--out", "OUT"),
        ("check", "RUN", "--fail-on", "never"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[2:])[:50].encode("ascii", "replace").decode(),
)
def test_control_characters_of_a_trace_never_reach_a_terminal(nasty, tmp_path, monkeypatch, arguments):
    # On a busy machine there is time for the progress bar, whose own control characters are not a trace's.
    monkeypatch.setattr(output, "_DELAY_S", math.inf)
    places = {"RUN": nasty, "OUT": tmp_path / "o\x1b[31m"}
    _, shown = on_a_terminal(*(places.get(each, each) for each in arguments), NO_COLOR="1")
    assert shown.strip()
    assert not [each for each in CONTROL if each in shown]
    assert "internal error of tracekit" not in shown


def test_machine_readable_output_has_names_unchanged(nasty, tmp_path):
    sql = "SELECT name FROM ops WHERE kind = 'cpu_op' ORDER BY start_ns"
    names = list(NASTY.values())
    output = tracekit("query", nasty, sql, "--format", "json")
    assert [row["name"] for row in json.loads(output.stdout)] == names
    # In CSV, control characters are visible, and formulas are texts.
    as_csv = tracekit("query", nasty, sql, "--format", "csv").stdout
    in_csv = [row["name"] for row in csv.DictReader(io.StringIO(as_csv))]
    assert [re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", "\ufffd", name) for name in names] == [
        text.removeprefix("'") if text[1:2] in "=+-@" else text for text in in_csv
    ]
    tracekit("query", nasty, sql, "--format", "parquet", "--out", tmp_path / "names.parquet")
    assert pl.read_parquet(tmp_path / "names.parquet")["name"].to_list() == names


def test_a_query_from_stdin_that_is_no_text_is_refused_in_a_line(pair):
    done = tracekit("query", pair, "-", stdin="SELECT 1 \udcba")  # written as the byte 0xba
    assert done.returncode == 2
    assert only_line(done) == "tracekit: query: stdin is not UTF-8 text: invalid start byte at byte 9"


def test_a_query_can_be_read_from_stdin_and_begin_with_a_comment(pair):
    query = "-- how many\nSELECT count(*) AS n FROM activities;\n"
    done = tracekit("query", pair, "-", "--format", "csv", stdin=query)
    assert (done.stdout, done.stderr) == ("n\n16\n", "")


# One clock, and collectives across ranks -----------------------------------------------------------------------------


def test_offsets_residuals_and_instances_are_shown_by_rank(pair):
    output = json.loads(tracekit("summary", pair, "--by", "clock", "--format", "json").stdout)
    assert [(row["rank"], row["offset_ns"], row["residual_ns"], row["pairs"]) for row in output] == [
        (0, 0, 0, 4),
        (1, -40_000, 0, 4),
    ]
    shown = tracekit("summary", pair, "--by", "clock").stdout
    assert "-40 µs" in shown
    assert "residual" in shown
    sql = 'SELECT instance, op, ranks, end_ns - last_arrival_ns AS transfer_ns FROM instances WHERE "window" = 0'
    rows = json.loads(tracekit("query", pair, sql, "--format", "json").stdout)
    assert [(row["op"], row["ranks"], row["transfer_ns"]) for row in rows] == [("all_reduce", [0, 1], 200_000)] * 4


def test_clock_skew_is_reported_only_beyond_the_residual(pair, tmp_path):
    report = json.loads(tracekit("check", pair, "--format", "json", "--fail-on", "never").stdout)
    (said,) = [found["message"] for found in report["findings"] if "clock of rank" in found["message"]]
    assert "40 µs off" in said
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(rank, start_us=100.0, steps=4))
    alike = json.loads(tracekit("check", tmp_path, "--format", "json", "--fail-on", "never").stdout)
    assert not [found for found in alike["findings"] if "clock" in found["message"]]


# What cannot be done is one line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["query", "RUN", "SELECT durr_ns FROM ops"], 'did you mean "dur_ns"'),
        (["query", "RUN", "SELECT 1", "--format", "parquet"], "name a file with --out"),
        (["query", "absent", "SELECT 1"], "absent: no such file or folder"),
        (["query", "RUN", "PIVOT ops ON kind USING count(*)"], "list the values of a PIVOT"),
        (["query", "RUN", "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000))", "--timeout", "0.3"], "0.3 s"),
        (["query", "RUN", "SELECT length(repeat('x', 4000000000))", "--memory", "0.05"], "0.05 GiB"),
        (["kernels", "RUN", "--by", "nmae"], "--by nmae: expected some of name, op"),
        (["kernels", "RUN", "--of", "host", "--kind", ""], "--kind: expected some of cpu_op"),
        (["export", "RUN", "--out", "OUT", "--ranks", ""], "--ranks: expected ranks"),
        (["export", "RUN", "--out", "OUT", "--ranks", "7"], "--ranks 7: no trace of that rank"),
        (["export", "RUN", "--out", "OUT", "--step", "99"], "--step 99: no such step; the traces have 0, 1, 2, 3"),
        (["export", "RUN", "--out", "no/such/folder/x"], "cannot be written"),
    ],
)
def test_an_impossible_export_prints_one_line_and_leaves_no_file(pair, tmp_path, arguments, expected):
    places = {"RUN": str(pair), "OUT": str(tmp_path / "out")}
    done = tracekit(*[places.get(each, each) for each in arguments])
    assert done.returncode == 2
    assert expected in only_line(done)
    assert list(tmp_path.iterdir()) == []


def test_exporting_ranks_without_a_common_clock_prints_a_warning(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(rank, start_us=100.0, steps=1))
    done = tracekit("export", tmp_path, "--out", tmp_path / "run.pftrace")
    assert done.returncode == 0
    assert "ranks 0–1 share too few collectives" in done.stderr


@pytest.mark.parametrize("command", ["query", "kernels", "export"])
def test_without_cache_no_file_is_written(pair, tmp_path, command):
    more = {"query": ["SELECT 1 FROM ops"], "export": ["--out", str(tmp_path / "out")]}.get(command, [])
    done = tracekit(command, pair, *more, "--no-cache", TRACEKIT_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0
    assert not list((tmp_path / "cache").rglob("*.parquet"))
