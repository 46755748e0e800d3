import csv
import datetime
import io
import json
import math

import polars as pl
import pytest

from tracekit.report import query_rows
from tracekit.report.render import text as render_text

MIXED = pl.DataFrame(
    {
        "name": ["gemm<float>", None, 'a "quoted", name\nof two lines'],
        "dur_ns": [1, 2**62, None],
        "share_ratio": [0.25, math.nan, math.inf],
        "ranks": [[0, 1], None, []],
        "raw": [b"\x00\xff", None, b""],
        "day": [datetime.date(2026, 1, 2), None, None],
    }
)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 35])
def test_json_of_many_rows_is_that_of_all_at_once(count, monkeypatch):
    monkeypatch.setattr(query_rows, "_ROWS_AT_ONCE", 10)
    rows = pl.DataFrame({"a": range(count), "b": ["],\n["] * count}, schema={"a": pl.Int64, "b": pl.String})
    assert query_rows.as_json(rows) == json.dumps(rows.to_dicts(), indent=2) + "\n"


def test_json_says_exactly_what_the_rows_hold_and_null_for_what_json_cannot_say():
    assert json.loads(query_rows.as_json(MIXED)) == [
        {
            "name": "gemm<float>",
            "dur_ns": 1,
            "share_ratio": 0.25,
            "ranks": [0, 1],
            "raw": "00ff",
            "day": "2026-01-02",
        },
        {"name": None, "dur_ns": 2**62, "share_ratio": None, "ranks": None, "raw": None, "day": None},
        {"name": MIXED["name"][2], "dur_ns": None, "share_ratio": None, "ranks": [], "raw": "", "day": None},
    ]


def test_csv_reads_back_as_the_same_values():
    read = list(csv.reader(io.StringIO(query_rows.as_csv(MIXED))))
    assert read[0] == MIXED.columns
    assert [row[:2] for row in read[1:]] == [["gemm<float>", "1"], ["", str(2**62)], [MIXED["name"][2], ""]]
    assert [row[3] for row in read[1:]] == ["[0, 1]", "", "[]"]


@pytest.mark.parametrize("width", [60, 80, 100, 300])
def test_a_table_fits_the_terminal_cuts_no_number_and_names_the_columns_left_out(width):
    wide = pl.DataFrame({f"column_{i}": [10**15 + i] for i in range(20)})
    text = render_text.render(query_rows.document(wide), width=width)
    assert max(map(len, text.splitlines())) <= width
    shown = [i for i in range(20) if str(10**15 + i) in text]
    assert shown
    left_out = text[text.find("columns not shown:") :].replace("\n", " ") if "columns not shown:" in text else ""
    assert all(i in shown or f"column_{i}" in left_out for i in range(20))


def test_a_table_shows_whole_numbers_whole_and_names_inert():
    hostile = pl.DataFrame({"name": ["[red]x[/red]\x1b[31m"], "start_ns": [1795233477365028310]})
    text = render_text.render(query_rows.document(hostile), width=80)
    assert "1795233477365028310" in text
    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_a_table_says_how_many_rows_there_are_and_whether_there_are_more():
    assert render_text.render(query_rows.document(MIXED.select("dur_ns")), width=80).splitlines()[-1] == "3 rows"
    assert "the first 3 rows: allow more with --max-rows" in render_text.render(
        query_rows.document(MIXED.select("dur_ns"), more=True), width=80
    )
    assert render_text.render(query_rows.document(MIXED.head(0).select("name")), width=80).splitlines() == [
        "name",
        "0 rows",
    ]
