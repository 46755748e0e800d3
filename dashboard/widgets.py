"""What several pages show: the choice of runs, headings, errors, charts, and tables in readable units.

A widget whose choice belongs in the address takes its key from `dashboard.url_state`.
"""

import contextlib
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeVar

import plotly.graph_objects as go
import polars as pl
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import downloads, run_store, sharing, url_state
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping, kernel_names, units
from tracekit.model.run import MeasuredTrace
from tracekit.report import charts, comparison, html_fragments, phrases
from tracekit.report.document import Cells
from tracekit.report.headlines import Headline

PAGES = "pages"
RUN = "run"
OTHERS = "compare"
UNKNOWN_RUN = "unknown_run"
"""The state with the run that the address named and that is not listed."""
UPLOAD_NAMES = "upload_names"
"""The state with the names of uploaded files, as the person knows them, by their paths on the server."""
MISSING = "—"
FULL_NAME = "full name"
_SOON_S = 0.5
"""What is measured within this time shows no progress."""
_MAX_WHOLE_NAME = 60
"""Tables without a longer name of a kernel show all names as they are."""
MAX_PRESELECTED = 4
MAX_COMPARED = 8
BYTES = "localized"
"""The format of whole bytes: 2,818,048. The unit is in the heading."""
_COMMAND = re.compile(r": (tracekit [a-z](?:(?![;,.] ).)*)$")
"""A command that helps, at the end of a message."""
_T = TypeVar("_T")
_ROW_PX, _MAX_ROWS_SHOWN = 35, 10
"""Of a table, as Streamlit draws it: with its height, the page reserves the place before the table is there."""
_USUAL, _LEAST_WRITTEN = 1e-3, 1e-6
"""The least median of a column in its unit; a browser writes a smaller number than the second with an exponent."""
_MOST_WHOLE_BYTES, _MOST_WITHOUT_UNIT = 1 << 30, 1000
"""A column with small sizes has whole bytes, up to this many; numbers without a unit are factors, or counts."""
_PLACES = ("start_ns", "end_ns", "at_ns")
_CHARACTER_PX, _CELL_PADDING_PX, _ROWS_MEASURED = 8, 18, 10
MAX_NAME_PX = 240
_SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "_ns": ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns")),
    "tflops_per_s": ((1e3, "PFLOP/s"), (1, "TFLOP/s"), (1e-3, "GFLOP/s"), (1e-6, "MFLOP/s")),
    "tbytes_per_s": ((1, "TB/s"), (1e-3, "GB/s"), (1e-6, "MB/s")),
    "bytes_per_s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")),
    "flops": ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1, "FLOP")),
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
}
_SIZES = ("TiB", "GiB", "MiB", "KiB")
"""Units of columns by the end of their names, the largest first; the first ending that fits counts."""


def choose_runs(entries: Sequence[RunEntry]) -> tuple[RunEntry, ...]:
    """Let a person choose a run and those to compare it with; return them in this order. The address names them."""
    by_name = {entry.name: entry for entry in entries}
    names = list(by_name)
    # A name in the address is looked up in the list, never taken as a path.
    name = st.selectbox("Run", names, key=url_state.bind(RUN, names), format_func=escaping.inert)
    rest = [other for other in names if other != name]
    preselected = [name for name in rest if not by_name[name].problem] if len(names) <= MAX_PRESELECTED else ()
    key = url_state.bind_several(OTHERS, rest, preselected, at_most=MAX_COMPARED)
    compared = []
    if rest:
        compared = st.multiselect(
            "Compare with", rest, key=key, format_func=escaping.inert, placeholder="Choose runs",
            max_selections=MAX_COMPARED,
        )  # fmt: skip
    if len(names) > 1 and RUN not in st.query_params:
        st.query_params[RUN] = name  # a link must not depend on which run comes first
    return tuple(by_name[run_name] for run_name in (name, *compared))


def go_to(address: str, **parameters: Any) -> None:
    """Open another page, with widgets on it set by their names in the address: ``go_to("timeline", rank=3)``.

    The run stays unless `parameters` names another.
    """
    if RUN in parameters:
        st.session_state.pop(UNKNOWN_RUN, None)
    query = {name: texts for name, texts in url_state.parameters().items() if name in (RUN, OTHERS)}
    query |= {
        name: [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
        for name, value in parameters.items()
    }
    url_state.open_address(st.session_state[PAGES][address], query)


def try_reading(entry: RunEntry, read: Callable[[RunEntry], _T], doing: str = "Reading and checking") -> _T | None:
    """Result of `read` on a run; where that is impossible, show why and return None."""
    if entry.problem:
        if entry.snapshots:
            snapshots_only(entry)
        elif entry.is_live and not entry.files:
            st.info(plain(entry.problem), icon=":material/hourglass_empty:")
        else:
            problem(entry.problem)
        return None
    try:
        with st.spinner(f"{doing} {plain(entry.name)}"):
            return read(entry)
    except (TracekitError, RuleError) as error:
        problem(f"{entry.name}: {error}")
        return None


@contextlib.contextmanager
def measuring(what: str = "Measuring") -> Iterator[None]:
    """Show a spinner while the block measures a run; of what takes long, how many traces are measured."""
    began_s, count, place = time.monotonic(), 0, None

    def note(measured: MeasuredTrace) -> None:
        nonlocal count, place
        traces = len(measured.sources)
        count = count % traces + 1  # there may be several passes
        if time.monotonic() - began_s > _SOON_S:
            place = place or st.empty()
            place.progress(count / traces, f"{what}: {count:,} of {units.count(traces, 'trace')}")

    token = run_store.on_trace.set(note)
    try:
        with st.spinner(what):
            yield
    finally:
        run_store.on_trace.reset(token)
        if place is not None:
            place.empty()


def snapshots_only(entry: RunEntry) -> None:
    """Show that a run has memory snapshots and no traces, and offer the page that shows it."""
    info(plain(entry.problem))
    if st.button("Open the page Memory and checkpoints", type="primary", key=f"memory-of-{entry.name}"):
        go_to("memory", **{RUN: entry.name})


def choose_window(windows: Sequence[int], place: DeltaGenerator | None = None) -> int:
    """Return the profiled window to show: chosen in `place` if there are several."""
    if len(windows) == 1:
        return windows[0]
    window: int = (place or st).selectbox("Window", windows, key=url_state.bind("window", windows), width=160)
    return window


def headline(answer: Headline | None) -> None:
    """Show the sentence that answers a page's question; nothing where there is none."""
    if answer is not None:
        html(html_fragments.headline(answer.text, answer.about, answer.status, is_verdict=answer.is_verdict))


def html(fragment: str) -> None:
    """Show HTML that a template made."""
    st.html(fragment)
    sharing.html(fragment)


def subheader(text: str) -> None:
    """Show a heading."""
    st.subheader(text)
    sharing.text("heading", text)


def caption(text: str) -> None:
    """Show text below a heading or a figure."""
    st.caption(text)
    sharing.text("caption", text)


def info(text: str, **options: Any) -> None:
    """Show why something is not shown; `options` are those of st.info."""
    st.info(text, **options)
    sharing.text("caption", text)


def note(text: str) -> None:
    """Show a remark below a figure; nothing for ''."""
    if text:
        caption(plain(text))


def problem(message: str) -> None:
    """Show an error as text, with uploaded files by the names that the person knows; a command at its end as code."""
    for path, name in st.session_state.get(UPLOAD_NAMES, {}).items():
        message = message.replace(path, name)
    command = _COMMAND.search(message)
    st.error(plain(message[: command.start()] if command else message), icon=":material/error:")
    if command:
        st.code(escaping.inert(command[1], 500), language=None)


def heading(entry: RunEntry, run: LoadedRun) -> None:
    """Show which run a page is about and, while it is being recorded, when it was read."""
    title(entry.name, phrases.subtitle(run.run))
    if entry.is_live:
        read_at = datetime.fromtimestamp(run.read_s, UTC).strftime("%H:%M:%S")
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"This run is being recorded. The page shows its files as read at {read_at} UTC.")
            if st.button("Read again", key="read_again"):
                run_store.read_again(entry)
                st.rerun()


def title(name: str, about: str = "") -> None:
    """Show the title of a page, with the control that shares it."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(f'<div class="tk-title"><b>{escaping.escape(name)}</b><span>{escaping.escape(about)}</span></div>')
        sharing.title(name, about)


def frame(
    table: pl.DataFrame,
    *,
    key: str | None = None,
    selection: str | None = None,
    full: pl.DataFrame | None = None,
    first: Sequence[str] = (),
    labels: Mapping[str, str] = MappingProxyType({}),
    shared_rows: int = sharing.MAX_ROWS,
    **options: Any,
) -> Any:
    """Show the columns of a table that have a value, with numbers in readable units; it can be sorted and searched.

    With a `key`, the table, or `full` of which it is a part, can be downloaded below it in its original units. With a
    `selection`, a row can be selected: the state of that name has its number. A shared page has the first
    `shared_rows`. The columns `first` come first: those that fit a window of 800 pixels. `labels` are the headings of
    columns whose names do not say enough. Long names of kernels have their short form, and their full name in the last
    column. `options` are those of st.dataframe; its event is returned.
    """
    original = table = table.select(*(name for name in first if name in table.columns), pl.exclude(first))
    table = table.select(column for column in table if column.null_count() < table.height or table.is_empty())
    sharing.table(table, shared_rows)
    table = _with_short_names(table)
    if selection is not None:
        options |= {"on_select": "rerun", "selection_mode": "single-row"}
    scaled: list[pl.Series] = []
    columns: dict[str, Any] = {}
    for series in table:
        label = labels.get(series.name) or escaping.heading(series.name)
        scale = _scale(series) if series.dtype.is_numeric() else None
        if scale:
            divisor, pattern = scale
            series = series / divisor if divisor != 1 else series
            if pattern == BYTES and label != "bytes":
                label = f"{label}, B"
            texts = [MISSING if value is None else _number(pattern, value) for value in series.head(_ROWS_MEASURED)]
            columns[series.name] = st.column_config.NumberColumn(label, format=pattern, width=_width_px(texts))
        else:
            texts = [MISSING if value is None else str(value) for value in series.head(_ROWS_MEASURED)]
            columns[series.name] = st.column_config.Column(label, width=_width_px(texts))
        scaled.append(series)
    columns |= options.pop("column_config", {})
    event = st.dataframe(
        pl.DataFrame(scaled),
        column_config=columns,
        hide_index=True,
        placeholder=MISSING,
        key=selection or key,
        height=(min(table.height, _MAX_ROWS_SHOWN) + 1) * _ROW_PX + 2,
        **options,
    )
    if key is not None:
        downloads.table(original if full is None else full, key=key)
    return event


def _with_short_names(table: pl.DataFrame) -> pl.DataFrame:
    if table.schema.get("name") != pl.String:
        return table
    forms = kernel_names.short_names(table["name"].drop_nulls().unique().to_list())
    if not any(len(name) > _MAX_WHOLE_NAME and form != name for name, form in forms.items()):
        return table
    names = table["name"].to_list()
    short = pl.Series("name", [None if name is None else forms[name] for name in names], pl.String)
    full = pl.Series(FULL_NAME, [None if forms.get(name) == name else name for name in names], pl.String)
    return table.with_columns(short, full)


def time_unit(longest_ns: float) -> tuple[float, str]:
    """Return the unit for times up to `longest_ns`: its length in ns, and its name.

    >>> time_unit(25_000_000_000), time_unit(999)
    ((1000000000.0, 's'), (1, 'ns'))
    """
    return _unit(_SCALES["_ns"], longest_ns)


def _unit(scales: Sequence[tuple[float, str]], largest: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in scales if largest >= size), scales[-1])


def _scale(series: pl.Series) -> tuple[float, str] | None:
    """Return the divisor and the number format of a column, by the unit at the end of its name.

    One unit per column, so that values compare at a glance: that of the largest value, or the next smaller one where
    the median would begin behind the third decimal, or the least value have an exponent. Numbers have three digits, as
    in sentences; those of places in time have six, so that neighbours differ.
    """
    if series.name.endswith("_ratio"):
        return 0.01, "%.1f%%"
    scales = next((scales for ending, scales in _SCALES.items() if series.name.endswith(ending)), None)
    sizes = series.drop_nulls().abs()
    positive = sizes.filter(sizes > 0)
    smallest, median, largest = (float(str(size or 0)) for size in (positive.min(), positive.median(), positive.max()))
    if scales is None:
        return (1, "%.3g") if series.dtype.is_float() and largest < _MOST_WITHOUT_UNIT else None
    divisor, unit = _unit(scales, largest)
    if unit in _SIZES and smallest < _USUAL * divisor and largest < _MOST_WHOLE_BYTES:
        return 1, BYTES
    if median < _USUAL * divisor or smallest < _LEAST_WRITTEN * divisor:
        divisor, unit = _unit(scales, 0.999 * divisor)
    if unit in ("ns", "B"):
        return 1, f"%.0f {unit}"
    return divisor, f"%.{6 if series.name.endswith(_PLACES) else 3}g {unit}"


def _number(pattern: str, value: float) -> str:
    return f"{value:,.0f}" if pattern == BYTES else pattern % value


def _width_px(texts: Sequence[str]) -> int | None:
    """Return the width of a column whose first rows are `texts`; None where the browser finds it.

    The browser leaves out what is twice as wide as the mean of the first rows: a number among empty cells, or a long
    name among short ones.
    """
    lengths = [len(text) for text in texts]
    if not lengths or max(lengths) < 2 * sum(lengths) / len(lengths):
        return None
    return min(_CHARACTER_PX * max(lengths) + _CELL_PADDING_PX, MAX_NAME_PX)


def text_table(cells: Cells, *, key: str = "", **options: Any) -> None:
    """Show a table of a report, with a `key` also its download; `options` are those of `escaping.html_table`."""
    rows = [list(map(comparison.with_minus_signs, row)) for row in cells.rows]
    right = [column in cells.numbers for column in range(len(cells.header))]
    html(escaping.html_table(cells.header, rows, right=right, **options))
    if key:
        downloads.cells(cells.header, rows, key=key)


def numbers(values: Mapping[str, str]) -> None:
    """Show a row of large numbers with their labels."""
    html(html_fragments.numbers({label: (value, "") for label, value in values.items()}))


def segments(label: str, name: str, options: Sequence[str] | Mapping[str, str]) -> str:
    """Return the option chosen in a row of buttons and bound to the address; a mapping gives options their labels."""
    text = options.get if isinstance(options, Mapping) else str
    key = url_state.bind(name, list(options))
    choice: str = st.segmented_control(
        label, list(options), format_func=text, key=key, label_visibility="collapsed", required=True
    )
    return choice


def chart(figure: go.Figure, *, key: str, download: bool = True, **options: Any) -> Any:
    """Show a figure in the page's own colours, by default with a download; return the event of st.plotly_chart."""
    charts.with_title(figure, sharing.figure_title())
    sharing.figure(figure, key=key)
    # A font of the system: in an image, that of the page is not there, and another one may not fit the margins.
    ink = "#e6eaf0" if st.context.theme.type == "dark" else "#1b2330"
    figure.update_layout(font={"color": ink, "family": "Arial, sans-serif"})
    # Larger than on the page, so that its text can be read in a document.
    image = {"toImageButtonOptions": {"filename": downloads.name_of(key), "scale": 2}}
    config = {**charts.CONFIG, **options.pop("config", {}), **image}
    # Known to the page before Plotly draws, so that what is below does not move then.
    height = figure.layout.height or "content"
    event = st.plotly_chart(figure, theme=None, key=key, config=config, height=height, **options)
    # What is shared and downloaded fits any page. A copy of the figure would take longer than to draw it.
    figure.update_layout(font={"color": None, "family": None})
    if download:
        downloads.figure(figure, key=key)
    return event


def clickable(figure: go.Figure, *, key: str) -> tuple[Any, ...] | None:
    """Show a figure as `chart` does and return the custom data of the clicked point, None without one."""
    event = chart(figure, key=key, on_select="rerun", selection_mode="points")
    points = event["selection"]["points"] if event else []
    return next((tuple(point["customdata"]) for point in points if point.get("customdata")), None)


def plain(text: str) -> str:
    r"""Return `text` so that Streamlit's Markdown shows it as it is.

    >>> print(plain("![x](y)"))
    \!\[x\]\(y\)
    """
    inert = escaping.inert(text, 1000)
    return "".join("\\" + c if c in string.punctuation else c for c in inert)
