"""Pieces that several pages show: the choice of runs, boxes for what went wrong, findings, tables in readable units.

A widget whose choice belongs in the address takes its key from `kept` and its kin: see `dashboard.url_state`.
"""

import string
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from dashboard import downloads, run_store, url_state
from dashboard.run_catalog import RunEntry
from dashboard.url_state import bind, bind_flag, bind_number, bind_several, bind_text
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping
from tracekit.report import charts, html_fragments, phrases
from tracekit.rules.rule import Finding

__all__ = ["bind", "bind_flag", "bind_number", "bind_several", "bind_text"]

PAGES = "pages"
RUN = "run"
OTHERS = "compare"
MISSING = "—"
SHOWN_FINDING = "shown_finding"
SHOWN_MOMENT = "shown_moment"
MAX_PRESELECTED = 4
MAX_COMPARED = 8
MAX_EVIDENCE_ROWS = 1000
BYTES = "localized"
"""How whole bytes are written: 2,818,048. The unit stands in the heading."""
_LEAST = 0.001
"""Less of a unit than this reads badly."""

STYLE = f"""<style>{html_fragments.style()}
[data-testid="stMainBlockContainer"] {{padding: 4rem 2.2rem 3rem; max-width: 1500px}}
.tk-title {{display: flex; flex-wrap: wrap; gap: 14px; align-items: baseline; margin: 0}}
.tk-title b {{font-size: 1.5rem; font-weight: 650; overflow-wrap: anywhere}}
.tk-title span {{opacity: .75}}
.tk-schema td:not(:last-child) {{overflow-wrap: normal; white-space: nowrap}}
[class*="st-key-download-"] {{margin-top: -.9rem}}
[class*="st-key-download-"] button {{min-height: 0; padding: 0; opacity: .7}}
[class*="st-key-download-"] button p {{font-size: .8rem}}
[class*="st-key-download-"] button:is(:hover, :focus-visible) {{opacity: 1}}
</style>"""


def nothing_opened() -> None:
    """Say how to open the dashboard on something."""
    st.title("tracekit")
    st.info("No run was given. Open the dashboard on a run, or on a folder of runs:")
    st.code("tracekit dashboard runs/", language=None)


def choose(listed: Sequence[RunEntry]) -> tuple[RunEntry, tuple[RunEntry, ...]]:
    """Let a person choose a run; return it, and those chosen to compare it with. The address names the run."""
    by_name = {entry.name: entry for entry in listed}
    names = list(by_name)
    # A name in the address is looked up among the listed, never taken as a path.
    name = st.selectbox("Run", names, key=bind(RUN, names), format_func=escaping.inert)
    rest = [other for other in names if other != name]
    usable = [other for other in rest if not by_name[other].problem]
    preselected = usable if len(names) <= MAX_PRESELECTED else ()
    key = bind_several(OTHERS, rest, preselected, at_most=MAX_COMPARED)
    others = (
        st.multiselect(
            "Compare with",
            rest,
            key=key,
            format_func=escaping.inert,
            placeholder="Choose runs",
            max_selections=MAX_COMPARED,
        )
        if rest
        else []
    )
    if len(names) > 1 and RUN not in st.query_params:
        st.query_params[RUN] = name  # which run comes first is nothing that a link can rely on
    return by_name[name], tuple(by_name[other] for other in others)


def go_to(page: str, **chosen: Any) -> None:
    """Turn to another page, with widgets on it set by their names in the address: ``go_to("timeline", rank=3)``.

    The run stays unless `chosen` names another.
    """
    told = {name: texts for name, texts in url_state.parameters().items() if name in (RUN, OTHERS)}
    told |= {
        name: [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
        for name, value in chosen.items()
    }
    st.switch_page(st.session_state[PAGES][page], query_params=told)


def begin(entry: RunEntry) -> run_store.OpenRun | None:
    """Begin a page about a run: return it under its heading, or say why it cannot be opened and return None."""
    held = open_or_say(entry)
    if held is not None:
        heading(entry, held)
    return held


def open_or_say(entry: RunEntry) -> run_store.OpenRun | None:
    """Return the run, or say in a box why it cannot be opened and return None."""
    if entry.problem:
        if entry.is_live and not entry.files:
            st.info(plain(entry.problem), icon=":material/hourglass_empty:")
        else:
            problem(entry.problem)
        return None
    try:
        with st.spinner(f"Reading and checking {plain(entry.name)}"):
            return run_store.open_run(entry)
    except (TracekitError, RuleError) as error:
        problem(f"{entry.name}: {error}")
        return None


def problem(message: str) -> None:
    """Show what went wrong, as text."""
    st.error(plain(message), icon=":material/error:")


def heading(entry: RunEntry, held: run_store.OpenRun) -> None:
    """Show which run a page is about and, while it is being recorded, as of when it is shown."""
    about = escaping.escape(phrases.subtitle(held.run))
    st.html(f'<div class="tk-title"><b>{escaping.escape(entry.name)}</b><span>{about}</span></div>')
    if entry.is_live:
        read_at = datetime.fromtimestamp(held.read_s, UTC).strftime("%H:%M:%S")
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"Its files change: it is being recorded. What you see was read at {read_at} UTC.")
            if st.button("Read again", key="read_again"):
                run_store.read_again(entry)
                st.rerun()


def finding(found: Finding, held: run_store.OpenRun, *, key: str) -> None:
    """Show a finding with its evidence, and the way to the moment that proves it."""
    with st.container(border=True):
        st.html(html_fragments.finding(found))
        rows = found.evidence.height
        if not rows:
            return
        with st.expander(f"Evidence, {rows:,} row" + "s" * (rows > 1)):
            # Above the table, which comes a moment later and would push it away from under a hand.
            if can_be_shown(found) and st.button("Show in the timeline", key=f"show-{key}"):
                st.session_state[SHOWN_FINDING] = key
                go_to("timeline", finding=key)
            shown = found.evidence.head(MAX_EVIDENCE_ROWS)
            frame(phrases.from_trace_start(shown, phrases.trace_starts(held.run)))
            if rows > MAX_EVIDENCE_ROWS:
                st.caption(f"The first {MAX_EVIDENCE_ROWS:,} rows of {rows:,}; the download has all.")
            downloads.table(found.evidence, key=f"{found.id}-evidence-{key}")


def can_be_shown(found: Finding) -> bool:
    """Return whether a finding's evidence says where in which trace it lies."""
    needed = {"rank", "start_ns", "dur_ns"}
    return needed <= set(found.evidence.columns) and bool(found.evidence.drop_nulls(list(needed)).height)


def finding_keys(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Return the findings by a name that is unique even where one rule speaks twice of the same thing."""
    return {f"{number}-{found.id}": found for number, found in enumerate(findings)}


def frame(table: pl.DataFrame, *, key: str | None = None, **options: Any) -> Any:
    """Show a table with its numbers in readable units; it can be sorted and searched.

    With a `key`, what was measured can be downloaded below it, in its own units. `options` are those of st.dataframe,
    whose answer is returned.
    """
    shown: list[pl.Series] = []
    columns: dict[str, Any] = {}
    for series in table:
        label = escaping.heading(series.name)
        scale = _scale(series) if series.dtype.is_numeric() else None
        if scale:
            divisor, pattern = scale
            series = series / divisor if divisor != 1 else series
            if pattern == BYTES and label != "bytes":
                label = f"{label}, B"
            columns[series.name] = st.column_config.NumberColumn(label, format=pattern)
        else:
            columns[series.name] = st.column_config.Column(label)
        shown.append(series)
    columns |= options.pop("column_config", {})
    event = st.dataframe(
        pl.DataFrame(shown), column_config=columns, hide_index=True, placeholder=MISSING, key=key, **options
    )
    if key is not None:
        downloads.table(table, key=key)
    return event


def _scale(series: pl.Series) -> tuple[float, str] | None:
    """Return what a column is divided by, and how it is written then, by the ending of its name."""
    scales = {"_ns": (1e6, "%.3f ms"), "_ratio": (0.01, "%.1f%%"), "_bytes_per_s": (1e6, "%.2f MB/s")}
    for ending, scale in scales.items():
        if series.name.endswith(ending):
            return scale
    if not series.name.endswith("bytes"):
        return None
    sizes = series.drop_nulls().abs()
    least, most = (float(str(size or 0)) for size in (sizes.filter(sizes > 0).min(), sizes.max()))
    # One unit for all of a column, so that it can be sorted by eye; digits by which small sizes can be told apart, too.
    for unit_bytes, pattern in ((2**30, "%.4g GiB"), (2**20, "%.4g MiB"), (2**10, "%.4g KiB")):
        if most >= unit_bytes:
            return (unit_bytes, pattern) if least >= unit_bytes * _LEAST else (1, BYTES)
    return 1, "%d B"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, key: str, right: Sequence[bool] = ()) -> None:
    """Show a table of text, as `markup.html_table` makes it, with a download."""
    st.html(escaping.html_table(header, rows, right=right))
    downloads.cells(header, rows, key=key)


def chart(figure: go.Figure, *, key: str, **config: bool) -> None:
    """Show a figure in the page's own colours and font, with a download; `config` adds to Plotly's configuration."""
    given = go.Figure(figure)
    figure.update_layout(font=font())
    st.plotly_chart(figure, theme=None, config={**charts.CONFIG, **config}, key=key)
    downloads.figure(given, key=key)


def clickable(figure: go.Figure, *, key: str) -> tuple[Any, ...] | None:
    """Show a figure as `chart` does and return the custom data of the point that a person clicked, None without one."""
    given = go.Figure(figure)
    figure.update_layout(font=font())
    event = st.plotly_chart(
        figure, theme=None, config=charts.CONFIG, key=key, on_select="rerun", selection_mode="points"
    )
    downloads.figure(given, key=key)
    points = event["selection"]["points"] if event else []
    return next((tuple(point["customdata"]) for point in points if point.get("customdata")), None)


def font() -> dict[str, str | int]:
    """Return the font of the page, as figures take it."""
    ink = "#e6eaf0" if st.context.theme.type == "dark" else "#1b2330"
    return {"color": ink, "family": '"Source Sans", "Source Sans Pro", sans-serif', "size": 13}


def plain(text: str) -> str:
    r"""Return `text` so that Streamlit's Markdown shows it as it is.

    >>> print(plain("![x](y)"))
    \!\[x\]\(y\)
    """
    inert = escaping.inert(text, 1000)
    return "".join("\\" + c if c in string.punctuation else c for c in inert)
