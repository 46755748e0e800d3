"""What the tables of a query contain, as a file, so that a command that only shows it imports no fact and no Polars.

``python -m tracekit.sql.table_documents`` writes the file; a test compares it with the tables.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tracekit import errors
from tracekit.errors import InputError
from tracekit.model import plugins
from tracekit.model.table_document import ColumnDocument, TableDocument

FILE = Path(__file__).with_name("tables.json")


def own_documents() -> tuple[TableDocument, ...]:
    """Return the documents of tracekit's own tables."""
    return tuple(
        TableDocument(table["name"], table["grain"], tuple(ColumnDocument(**column) for column in table["columns"]))
        for table in json.loads(FILE.read_text(encoding="utf-8"))
    )


def all_documents() -> tuple[TableDocument, ...]:
    """Return the documents of our tables and those of plug-ins. Raises InputError like `run_tables.facts`."""
    if plugins.entry_points(group="tracekit.tables"):
        from tracekit.sql import run_tables

        return tuple(fact.published_table.document for fact in run_tables.facts().values())
    return own_documents()


def find(name: str, documents: Iterable[TableDocument]) -> TableDocument:
    """Return the document of a table. Raises InputError with similar names if there is none."""
    by_name = {document.name: document for document in documents}
    if name.lower() in by_name:
        return by_name[name.lower()]
    raise InputError(f"{name}: no such table{errors.did_you_mean(name, by_name)}; the tables are {', '.join(by_name)}")


def as_json() -> str:
    """Return the content of the file."""
    from tracekit.sql import run_tables

    rows = [dataclasses.asdict(fact.published_table.document) for fact in run_tables.FACTS]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json(), encoding="utf-8")
