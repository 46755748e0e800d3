"""SQL: one SELECT over the tables of the run, next to their schema."""

import polars as pl
import streamlit as st

from dashboard import downloads, sharing, widgets
from dashboard.pages.page import TOOLS, Page
from dashboard.run_store import OpenRun, queryable_tables
from dashboard.url_state import bind, bind_text
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import headlines

SQL = "sql"
"""The query's parameter in the address."""
MAX_SQL = 4000
MAX_ROWS = 10_000
TIMEOUT_S = 30.0
MEMORY_BYTES = 1 << 30
EXAMPLES = {
    "top kernels": (
        "SELECT name, count(*) AS calls, sum(dur_ns) AS total_ns\n"
        "FROM activities WHERE kind = 'compute'\nGROUP BY name ORDER BY total_ns DESC LIMIT 20"
    ),
    "step times": (
        "SELECT step, rank, duration_ns / 1e6 AS step_ms, idle_ns / 1e6 AS idle_ms\nFROM breakdown ORDER BY step, rank"
    ),
    "messages": (
        'SELECT op, "group", sent_bytes, count(*) AS calls\nFROM collectives GROUP BY ALL ORDER BY sent_bytes DESC'
    ),
    "stragglers": (
        "SELECT last_rank, count(*) AS calls, sum(max_wait_ns) / 1e6 AS waited_ms\n"
        "FROM instances GROUP BY ALL ORDER BY waited_ms DESC"
    ),
    "ops without a kernel": (
        "SELECT o.name, count(*) AS calls, sum(o.dur_ns) / 1e6 AS host_ms FROM ops o\n"
        "WHERE o.kind = 'cpu_op' AND NOT EXISTS (SELECT 1 FROM activities a\n"
        '  JOIN ops l ON l.id = a.launch_id AND l.rank = a.rank AND l."window" = a."window"\n'
        '  WHERE l.parent_id = o.id AND l.rank = o.rank AND l."window" = o."window")\n'
        "GROUP BY o.name ORDER BY host_ms DESC LIMIT 20"
    ),
}
_RESULT, _TRUSTED, _EXAMPLE = "sql-result", "sql-trusted", "sql-example"


def show(run: OpenRun) -> None:
    """Let a person write a query, and run it on request: an address can contain a query, but never run it."""
    query_column, schema_column = st.columns([3, 2])
    with query_column:
        st.pills("Examples", list(EXAMPLES), key=_EXAMPLE, on_change=_take_example)
        key = bind_text(SQL, next(iter(EXAMPLES.values())), MAX_SQL)
        with st.form("sql-form", border=False):
            query = st.text_area("One SELECT", key=key, height=190, max_chars=MAX_SQL)
            is_pressed = st.form_submit_button("Run", type="primary", help="Ctrl+Enter does the same")
        st.caption(
            f"Read-only: no file, no network, no setting. At most {MAX_ROWS:,} rows, {TIMEOUT_S:g} s and "
            f"{MEMORY_BYTES >> 30} GiB. Times are ns, sizes bytes. `tracekit query` allows more."
        )
        if is_pressed:
            _run_query(run, query)
        elif st.query_params.get(SQL) not in (None, st.session_state.get(_TRUSTED)):
            widgets.info(
                "This query is part of the link that you opened. Read it before you run it.", icon=":material/link:"
            )
        _show_result(run)
    with schema_column:
        _schema()


def _take_example() -> None:
    example = st.session_state.get(_EXAMPLE)
    if example in EXAMPLES:
        st.session_state[SQL] = st.session_state[_TRUSTED] = EXAMPLES[example]


def _run_query(run: OpenRun, text: str) -> None:
    st.session_state[_TRUSTED] = text
    result: pl.DataFrame | str
    try:
        with widgets.measuring("Running the query"):
            result = run.query(text, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES, max_rows=MAX_ROWS + 1)
    except TracekitError as error:
        result = str(error)
    st.session_state[_RESULT] = (run.entry.path, run.entry.stamp, result)


def _show_result(run: OpenRun) -> None:
    path, stamp, result = st.session_state.get(_RESULT, (None, None, None))
    if (path, stamp) != (run.entry.path, run.entry.stamp):
        return
    if isinstance(result, str):
        widgets.problem(result)
        return
    rows = _flat(result.head(MAX_ROWS))
    sharing.html(escaping.fragment("code", st.session_state.get(_TRUSTED, "")))
    is_cut = result.height > MAX_ROWS
    widgets.caption(f"{'the first ' if is_cut else ''}{units.count(rows.height, 'row')}")
    headings = {name: st.column_config.Column(escaping.inert(name, 60)) for name in rows.columns}
    sharing.table(rows)
    st.dataframe(rows, hide_index=True, placeholder=widgets.MISSING, column_config=headings)
    downloads.table(rows, key="query")


def _flat(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with nested and binary values as text, which a table can show."""
    nested = [name for name, dtype in rows.schema.items() if dtype.is_nested() or dtype == pl.Binary]
    return rows.with_columns(
        pl.Series(name, [None if value is None else escaping.inert(str(value), 500) for value in rows[name].to_list()])
        for name in nested
    )


def _schema() -> None:
    tables = {table.name: table for table in queryable_tables()}
    table = tables[st.selectbox("Tables", list(tables), key=bind("table", list(tables)), format_func=escaping.inert)]
    st.caption(f"One row per {widgets.plain(table.grain)}.")
    rows = [(column.name, column.unit_or_type, column.meaning) for column in table.columns]
    schema_html = escaping.html_table(("column", "type", "meaning"), rows)
    st.html(f'<div class="tk-schema">{schema_html}</div>')


PAGE = Page.described_by(__doc__, "sql", show, section=TOOLS, headline=lambda run: run.headline(headlines.tables))
