import json
from pathlib import Path

import pytest

from tracekit import querying
from tracekit.errors import InputError
from tracekit.history import tables
from tracekit.reports import columns

ROOT = Path(__file__).parents[2]


def test_the_page_of_tables_is_what_the_schema_says_now():
    page = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    assert page == columns.as_markdown(list(querying.TABLES.values())), (
        "write it again: tracekit schema --format markdown --output docs/schema.md"
    )


def test_every_column_has_a_sentence_and_every_quantity_its_unit():
    for table in querying.TABLES.values():
        assert not table.grain.endswith(".")
        for column in table.columns:
            assert column.meaning.endswith("."), f"{table.name}.{column.name}"
            assert column.name.endswith("_ns") == (column.unit == "ns"), f"{table.name}.{column.name}"
            if column.name.endswith("bytes"):
                assert column.unit == "bytes", f"{table.name}.{column.name}"


def test_the_page_of_histories_has_the_tables_that_a_history_file_has():
    page = (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
    assert page.endswith(columns.tables_as_markdown([tables.VERSION, *tables.KEPT], heading="###"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_schema_fits_the_terminal_and_names_every_column(width):
    tables = list(querying.TABLES.values())
    text = columns.as_text(tables, width=width)
    assert max(map(len, text.splitlines())) <= width
    for table in tables:
        assert table.name in text
        assert all(column.name in text for column in table.columns)


def test_the_schema_as_json_holds_the_same():
    told = json.loads(columns.as_json(querying.TABLES.values()))
    assert [each["name"] for each in told] == list(querying.TABLES)
    ops = next(each for each in told if each["name"] == "ops")
    assert {"name": "start_ns", "type": "integer", "unit": "ns", "meaning": "Start."} in ops["columns"]


def test_a_table_is_found_by_any_case_and_a_wrong_name_tells_the_near_ones():
    assert querying.find_table("OPS").name == "ops"
    with pytest.raises(InputError, match="did you mean collectives"):
        querying.find_table("collective")
