"""SQL: one SELECT over the tables of a run, with the schema beside it. An address can bring a query, never run it."""

import polars as pl
import streamlit as st

from dashboard import downloads, run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.errors import TracekitError
from tracekit.model import escaping
from tracekit.model.schema import Table
from tracekit.report import schema_pages
from tracekit.sql import run_query

SQL = "sql"
"""The query's key in the address."""
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
    "who came last": (
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
_ANSWER, _OWN, _EXAMPLE = "sql-answer", "sql-own", "sql-example"


def page(entry: RunEntry) -> None:
    """Let a person write a query, run it when told to, and show what comes back."""
    held = widgets.begin(entry)
    if held is None:
        return
    left, right = st.columns([3, 2])
    with left:
        _examples()
        key = widgets.bind_text(SQL, next(iter(EXAMPLES.values())), MAX_SQL)
        with st.form("sql-form", border=False):
            query = st.text_area("One SELECT", key=key, height=190, max_chars=MAX_SQL)
            pressed = st.form_submit_button("Run", type="primary", help="Ctrl+Enter does the same")
        st.caption(
            f"Read-only: no file, no network, no setting. At most {MAX_ROWS:,} rows, {TIMEOUT_S:g} s and "
            f"{MEMORY_BYTES >> 30} GiB. Times are ns, sizes bytes. `tracekit query` allows more."
        )
        if pressed:
            _ask(entry, held, query)
        elif st.query_params.get(SQL) not in (None, st.session_state.get(_OWN)):
            st.info("This query came with the address: read it, and press Run if you want it.", icon=":material/link:")
        _answer(entry)
    with right:
        _schema()


def _examples() -> None:
    st.pills("Examples", list(EXAMPLES), key=_EXAMPLE, on_change=_take_example)


def _take_example() -> None:
    chosen = st.session_state.get(_EXAMPLE)
    if chosen in EXAMPLES:
        st.session_state[SQL] = st.session_state[_OWN] = EXAMPLES[chosen]


def _ask(entry: RunEntry, held: run_store.OpenRun, query: str) -> None:
    st.session_state[_OWN] = query
    try:
        asked = run_query.open_query(query, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES, max_rows=MAX_ROWS + 1)
        with st.spinner("Asking"), asked as question:
            with held.lock:
                tables = question.collect_tables(held.run)
            rows = question.execute(tables)  # others may look at the run meanwhile
    except TracekitError as error:
        st.session_state[_ANSWER] = (entry.path, entry.stamp, str(error))
    else:
        st.session_state[_ANSWER] = (entry.path, entry.stamp, rows)


def _answer(entry: RunEntry) -> None:
    path, stamp, found = st.session_state.get(_ANSWER, (None, None, None))
    if (path, stamp) != (entry.path, entry.stamp):
        return
    if isinstance(found, str):
        widgets.problem(found)
        return
    shown = found.head(MAX_ROWS)
    more = found.height > MAX_ROWS
    st.caption(f"{'the first ' if more else ''}{shown.height:,} row{'s' * (shown.height != 1)}")
    st.dataframe(_flat(shown), hide_index=True, placeholder=widgets.MISSING, column_config=_headings(shown))
    downloads.table(_flat(shown), key="query")


def _flat(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows as a table can show them: what is nested or binary as text."""
    odd = [name for name, dtype in rows.schema.items() if dtype.is_nested() or dtype == pl.Binary]
    return rows.with_columns(
        pl.Series(name, [None if value is None else escaping.inert(str(value), 500) for value in rows[name].to_list()])
        for name in odd
    )


def _headings(rows: pl.DataFrame) -> dict[str, object]:
    return {name: st.column_config.Column(escaping.inert(name, 60)) for name in rows.columns}


def _schema() -> None:
    known = run_query.tables()
    names = list(known)
    name = st.selectbox("Tables", names, key=widgets.bind("table", names), format_func=escaping.inert)
    table = known[name]
    st.caption(f"One row per {widgets.plain(table.grain)}.")
    shown = escaping.html_table(("column", "type", "meaning"), _columns(table))
    st.html(f'<div class="tk-schema">{shown}</div>')


def _columns(table: Table) -> list[tuple[str, str, str]]:
    return [(column.name, schema_pages.unit_or_type(column), column.meaning) for column in table.columns]
