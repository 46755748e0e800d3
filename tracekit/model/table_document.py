"""TableDocument: a table and its columns as documentation shows them. Needs no Polars."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnDocument:
    """A column: its name, what its values are in a word or two, its unit ("" where it has none) and its meaning."""

    name: str
    type_name: str
    unit: str
    meaning: str

    @property
    def unit_or_type(self) -> str:
        """Return the unit, or what the values are where there is none."""
        return self.unit or self.type_name


@dataclass(frozen=True)
class TableDocument:
    """A table: its name, what one row is, and its columns in order."""

    name: str
    grain: str
    columns: tuple[ColumnDocument, ...]
