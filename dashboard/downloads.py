"""Downloads of tables as CSV and of figures as HTML. Files are made on click; Plotly's own camera button makes PNGs."""

import csv
import io
import re
from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from tracekit.model import escaping
from tracekit.report import html, query_rows

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
    _button("CSV", lambda: query_rows.as_csv(rows).encode(), key=key, ending="csv", mime="text/csv")


def cells(header: Sequence[str], rows: Sequence[Sequence[str]], *, key: str) -> None:
    """Offer a table of text as CSV."""

    def content() -> bytes:
        out = io.StringIO()
        csv.writer(out).writerows([map(escaping.csv_cell, row) for row in (header, *rows)])
        return out.getvalue().encode()

    _button("CSV", content, key=key, ending="csv", mime="text/csv")


def figure(chart: go.Figure, *, key: str) -> None:
    """Offer a figure as a self-contained HTML page that can be zoomed."""
    title = name_of(key)
    _button("HTML", lambda: html.render_figure(chart, title).encode(), key=key, ending="html", mime="text/html")


def file_name(text: str) -> str:
    """Return a text as the name of a file, without an ending."""
    return re.sub(r"[^\w.-]+", "-", escaping.inert(text, _MAX_NAME)).strip("-.") or "tracekit"


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
