"""CSV of names from traces: nothing that a spreadsheet runs or a terminal obeys; the rest is unchanged."""

import csv
import io

import polars as pl
import pytest

from tracekit.report import query_rows


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+cmd|' /C calc'!A0", "-1+1", "@SUM(1)", "\t=1", "\r=1"])
def test_formulas_begin_with_an_apostrophe(text: str):
    (row,) = csv.DictReader(io.StringIO(query_rows.as_csv(pl.DataFrame({"name": [text]})), newline=""))
    assert row["name"] == f"'{text}"


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\x00b", "a\u202eb", "a\x9bb"])
def test_control_characters_are_visible(text: str):
    (row,) = csv.DictReader(io.StringIO(query_rows.as_csv(pl.DataFrame({"name": [text]}))))
    assert row["name"] == "a�" + text[2:]


def test_names_and_negative_numbers_are_unchanged():
    rows = pl.DataFrame({"name": ["aten::mm", 'a-b=c, "d"', "é"], "gap_ns": [-1, 2, None]})
    read = pl.read_csv(io.StringIO(query_rows.as_csv(rows)))
    assert read.equals(rows)


def test_a_download_is_no_formula():
    rows = pl.DataFrame({"name": ["=cmd()", "gemm", None], "dur_ns": [-1, 2, 3], "ranks": [[0, 1], [], None]})
    assert query_rows.as_csv(rows) == 'name,dur_ns,ranks\n\'=cmd(),-1,"[0, 1]"\ngemm,2,[]\n,3,\n'


def test_a_column_that_a_query_names_is_no_formula():
    rows = pl.DataFrame({"=cmd()": [1], "'=cmd()": [2], "-2+3": [3], 'a,"b"': [4], "": [5]})
    assert query_rows.as_csv(rows) == '\'=cmd(),\'=cmd(),\'-2+3,"a,""b""",\n1,2,3,4,5\n'
    assert query_rows.as_csv(rows.clear()).count("\n") == 1
