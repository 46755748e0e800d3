"""The tables of a run by name, for completion in a notebook: ``run.tables.<Tab>``."""

from collections.abc import Callable, Iterator

import polars as pl

from tracekit.model import escaping
from tracekit.sql import table_documents


class Tables:
    """Tables of docs/schema.md: ``run.tables.steps`` and ``run.tables["steps"]`` are ``run.table("steps")``."""

    def __init__(self, table: Callable[[str], pl.DataFrame]) -> None:
        """Serve the tables of a run, each by `table` when it is requested."""
        self._table = table

    def __getitem__(self, name: str) -> pl.DataFrame:
        return self._table(name)

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name.startswith("_") or name not in list(self):  # IPython asks for names such as _repr_mimebundle_
            raise AttributeError(f"no table {name}; the tables are {', '.join(self)}")
        return self._table(name)

    def __iter__(self) -> Iterator[str]:
        return (document.name for document in table_documents.all_documents())

    def __len__(self) -> int:
        return len(table_documents.all_documents())

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<{len(self)} tables: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        documents = table_documents.all_documents()
        return escaping.html_table(("table", "one row per"), [(table.name, table.grain) for table in documents])
