import json
from pathlib import Path

import pytest

from tracekit.errors import InputError
from tracekit.regression.history import store
from tracekit.report import explanations
from tracekit.report.render import json as render_json
from tracekit.report.render import text as render_text
from tracekit.sql import run_tables, table_documents

ROOT = Path(__file__).parents[3]
TABLES = {fact.name: fact.published_table for fact in run_tables.FACTS}
DOCUMENTS = [table.document for table in TABLES.values()]


def test_the_file_of_tables_is_what_the_schema_says_now():
    assert table_documents.FILE.read_text(encoding="utf-8") == table_documents.as_json(), (
        "write it again: python -m tracekit.sql.table_documents"
    )
    assert table_documents.all_documents() == tuple(DOCUMENTS)


def test_the_page_of_tables_is_what_the_schema_says_now():
    page = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    assert page == explanations.schema_page(DOCUMENTS), (
        "write it again: tracekit explain --kind table --format markdown --out docs/schema.md"
    )


def test_every_column_has_a_sentence_and_every_quantity_its_unit():
    for table in TABLES.values():
        assert not table.grain.endswith(".")
        for column in table.columns:
            assert column.meaning.endswith("."), f"{table.name}.{column.name}"
            assert column.name.endswith("_ns") == (column.unit == "ns"), f"{table.name}.{column.name}"
            if column.name.endswith("bytes"):
                assert column.unit == "bytes", f"{table.name}.{column.name}"


def test_the_page_of_histories_has_the_tables_that_a_history_file_has():
    documents = [table.document for table in (store.VERSION, *store.RUN_TABLES)]
    page = (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
    assert page.endswith(explanations.tables_as_markdown(documents, heading="###"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_schema_fits_the_terminal_and_names_every_column(width):
    text = render_text.render(explanations.tables_document(DOCUMENTS), width=width)
    assert max(map(len, text.splitlines())) <= width
    for table in DOCUMENTS:
        assert table.name in text
        assert all(column.name in text for column in table.columns)


def test_the_schema_as_json_holds_the_same():
    tables = json.loads(render_json.render(explanations.tables_document(DOCUMENTS)))
    assert [each["name"] for each in tables] == list(TABLES)
    ops = next(each for each in tables if each["name"] == "ops")
    assert {"name": "start_ns", "type": "integer", "unit": "ns", "meaning": "Start."} in ops["columns"]


def test_a_table_is_found_by_any_case_and_an_unknown_name_lists_similar_ones(wording):
    assert table_documents.find("OPS", DOCUMENTS).name == "ops"
    with wording.raises(InputError):
        table_documents.find("collective", DOCUMENTS)
