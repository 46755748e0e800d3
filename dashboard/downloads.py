"""Downloads of tables as CSV and of figures as HTML. Files are made on click; Plotly's own camera button makes PNGs."""

import csv
import io
import re
from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from tracekit.model import escaping
from tracekit.report import html

_NESTED = (pl.List, pl.Array, pl.Struct)
# A spreadsheet runs cells that begin like this as formulas, and names in tables come from traces.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MAX_NAME = 80
_RUN = "exported_run"


def name_files_by(run: str) -> None:
    """From now on begin the names of this session's files with the run that they are of; '' for none."""
    st.session_state[_RUN] = run


def name_of(key: str) -> str:
    """Return the name of a file without its ending: of the run and of what it shows."""
    run = st.session_state.get(_RUN, "")
    return file_name(f"{run}-{key}" if run and run not in key else key)


def table(rows: pl.DataFrame, *, key: str) -> None:
    """Offer a table as CSV, in the units that its column names end with; `key` names the file."""
    _button("CSV", lambda: as_csv(rows).encode(), key=key, ending="csv", mime="text/csv")


def cells(header: Sequence[str], rows: Sequence[Sequence[str]], *, key: str) -> None:
    """Offer a table of text as CSV."""

    def content() -> bytes:
        out = io.StringIO()
        csv.writer(out).writerows([[_inert(cell) for cell in row] for row in (header, *rows)])
        return out.getvalue().encode()

    _button("CSV", content, key=key, ending="csv", mime="text/csv")


def figure(chart: go.Figure, *, key: str) -> None:
    """Offer a figure as a self-contained HTML page that can be zoomed."""
    title = name_of(key)
    _button("HTML", lambda: html.render_figure(chart, title).encode(), key=key, ending="html", mime="text/html")


def as_csv(rows: pl.DataFrame) -> str:
    r"""Return a table as CSV without formulas; lists become text.

    >>> as_csv(pl.DataFrame({"name": ["=1+1"], "dur_ns": [5]}))
    "name,dur_ns\n'=1+1,5\n"
    """
    header = io.StringIO()
    # Written apart: columns of a query may have equal names once they are escaped.
    names = (f"'{name}" if name.startswith(_FORMULA) else name for name in rows.columns)
    csv.writer(header, lineterminator="\n").writerow(names)
    nested = [name for name, dtype in rows.schema.items() if isinstance(dtype, _NESTED) or dtype == pl.Object]
    flat = rows.with_columns(_texts(rows[name]) for name in nested)
    begins = pl.col(pl.String).str.slice(0, 1).is_in(_FORMULA)
    inert = pl.when(begins).then(pl.lit("'") + pl.col(pl.String)).otherwise(pl.col(pl.String)).name.keep()
    escaped = flat.with_columns(inert) if pl.String in flat.dtypes else flat
    return header.getvalue() + escaped.write_csv(include_header=False)


def file_name(text: str) -> str:
    """Return a text as the name of a file, without an ending."""
    return re.sub(r"[^\w.-]+", "-", escaping.inert(text, _MAX_NAME)).strip("-.") or "tracekit"


def _texts(nested: pl.Series) -> pl.Series:
    return pl.Series(nested.name, [None if value is None else str(value) for value in nested.to_list()], pl.String)


def _inert(cell: str) -> str:
    # A signed number is not a formula.
    return f"'{cell}" if cell.startswith(_FORMULA) and not re.match(r"[+-]\d", cell) else cell


def _button(label: str, content: object, *, key: str, ending: str, mime: str) -> None:
    st.download_button(
        f"Download {label}",
        content,
        file_name=f"{name_of(key)}.{ending}",
        mime=mime,
        key=f"download-{ending}-{key}",
        on_click="ignore",
        type="tertiary",
    )
