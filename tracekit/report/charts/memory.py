"""Memory: allocated memory over time by owner, block lifetimes, the segments of a device, and replays."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from tracekit.analysis.memory import usage as holding
from tracekit.model import escaping, units
from tracekit.report.charts import style
from tracekit.report.charts.style import COLOURS

_OWNERS = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "optimizer": "#009E73",
    "clip": "#CC79A7",
    "data": "#F0E442",
    "checkpoint": "#56B4E9",
    holding.EARLIER: "#8C95A1",
    holding.OTHERS: "#C4C9D1",
}
_EXTRA_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B9AFD4", "#DDB765", "#4FC3A1", "#7D8796",
)  # fmt: skip
_STATES = {
    "allocated": ("#0072B2", ("active_allocated",)),
    "waiting for another stream": ("#E69F00", ("active_pending_free", "active_awaiting_free")),
    "free": ("#C4C9D1", ("inactive",)),
}
_BLUES = [[0, "rgba(86, 180, 233, 0.15)"], [0.6, "rgba(40, 144, 205, 0.75)"], [1, "#0072B2"]]
"""Small values are close to the page, be it light or dark."""
_SIZE_AND_TIME = "%{customdata[0]} at %{customdata[1]}<extra></extra>"
_MIB = 1 << 20
_ROW_UNIT = 20 * _MIB
_MOST_ROWS, _CELLS, _MOST_EDGES = 40, 220, 1500


_HEIGHT_PX, _LEGEND_LINE_PX, _USUAL_LINES, _LONG_NAME = 420, 19, 4, 24


def memory_over_time(table: pl.DataFrame, *, origin_ns: int | None = None) -> go.Figure:
    """Return allocated memory over time, stacked by owner, with the peak marked and reserved memory as a line.

    `table` is the part of `memory.usage.over_time` for one device and one kind of owner. 0 ms is `origin_ns`, or the
    first time.
    """
    if table.is_empty():
        return style.empty()
    figure = go.Figure()
    begin_ns = int(str(table["at_ns"].min())) if origin_ns is None else origin_ns
    moments = table.unique("at_ns", keep="first", maintain_order=True).sort("at_ns", maintain_order=True)
    divisor, unit = _byte_scale(int(str(table.select(pl.max_horizontal("live_bytes", "reserved_bytes").max()).item())))
    owners = table["owner"].unique(maintain_order=True).to_list()
    for owner, colour in zip(owners, _colours(owners), strict=True):
        rows = table.filter(pl.col("owner") == owner)
        figure.add_scatter(
            x=((rows["at_ns"] - begin_ns) / 1e6).round(6).to_list(),
            y=(rows["bytes"] / divisor).round(4).to_list(),
            name=escaping.escape(owner, 60),
            stackgroup="allocated",
            mode="lines",
            line={"width": 0, "shape": "hv"},
            fillcolor=colour,
            customdata=_hovers(rows, "bytes", begin_ns),
            hovertemplate=f"<b>{escaping.escape(owner, 120)}</b> {_SIZE_AND_TIME}",
        )
    if moments["reserved_bytes"].is_not_null().any():
        figure.add_scatter(
            x=((moments["at_ns"] - begin_ns) / 1e6).round(6).to_list(),
            y=(moments["reserved_bytes"] / divisor).round(4).to_list(),
            name="reserved",
            mode="lines",
            line={"width": 2, "dash": "dash", "shape": "hv", "color": COLOURS["phase"]},
            customdata=_hovers(moments, "reserved_bytes", begin_ns),
            hovertemplate=f"<b>reserved</b> {_SIZE_AND_TIME}",
        )
    _mark_peak(figure, moments, begin_ns, divisor)
    style.scale_times(figure)
    figure.update_yaxes(title="allocated", ticksuffix=f" {unit}", rangemode="tozero")
    names = [trace.name for trace in figure.data]
    lines = len(names) if max(map(len, names)) > _LONG_NAME else 0
    return style.with_style(figure, height_px=_HEIGHT_PX + (_LEGEND_LINE_PX * max(0, lines - _USUAL_LINES)))


def _hovers(rows: pl.DataFrame, column: str, begin_ns: int) -> list[list[str]]:
    return [
        ["" if size is None else units.size(size), units.duration(at_ns - begin_ns)]
        for size, at_ns in rows.select(column, "at_ns").rows()
    ]


def block_lifetimes(table: pl.DataFrame) -> go.Figure:
    """Return a map of block sizes and lifetimes: a stronger blue means more bytes allocated in such blocks.

    `table` is one device's part of `analysis.memory.usage.lifetimes`.
    """
    if table.is_empty():
        return style.empty()
    figure = go.Figure()
    outlives = table["high_ns"].max()
    lived = table.with_columns(pl.col("low_ns").fill_null(outlives))
    columns, rows = lived["low_ns"].unique().sort().to_list(), lived["low_bytes"].unique().sort().to_list()
    cells = {(low_bytes, low_ns): row for low_bytes, low_ns, *row in lived.select(
        "low_bytes", "low_ns", "bytes", "count", "op", "high_bytes", "high_ns"
    ).iter_rows()}  # fmt: skip
    grid = [[cells.get((size, time)) for time in columns] for size in rows]
    figure.add_heatmap(
        x=list(range(len(columns))),
        y=list(range(len(rows))),
        z=[[None if cell is None else _log(cell[0]) for cell in line] for line in grid],
        customdata=[
            [
                None if cell is None else _lifetime_hover(size, time, cell)
                for time, cell in zip(columns, line, strict=True)
            ]
            for size, line in zip(rows, grid, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        colorscale=_BLUES,
        zmin=10,
        xgap=2,
        ygap=2,
        colorbar=_colourbar(lived["bytes"]),
    )
    past = [None if time == outlives and table["low_ns"].null_count() else time for time in columns]
    figure.update_xaxes(
        title="lifetime of at least",
        tickvals=list(range(len(columns))),
        ticktext=["longer" if time is None else units.duration(time) for time in past],
        showgrid=False,
    )
    figure.update_yaxes(
        title="size of at least",
        tickvals=list(range(len(rows))),
        ticktext=[units.size(size) for size in rows],
        showgrid=False,
    )
    return style.with_style(figure, height_px=min(160 + 24 * len(rows), 760))


def segment_map(table: pl.DataFrame) -> go.Figure:
    """Return the memory that the allocator reserved on a device, in address order like lines of text: area is bytes.

    `table` is `snapshot_facts.segment_map`. Each pool starts on a new line; a tick marks the end of a segment.
    Adjacent blocks of the same state that are too narrow to see are merged.
    """
    if table.is_empty():
        return style.empty()
    figure = go.Figure()
    row_bytes = _row_bytes(table)
    blocks = _in_rows(table, row_bytes)
    bars = _merge_narrow(blocks, row_bytes / _CELLS)
    divisor, unit = _byte_scale(row_bytes)
    for label, (colour, states) in _STATES.items():
        rows = bars.filter(pl.col("state").is_in(states))
        style.add_bars(
            figure,
            rows["row"],
            (rows["bytes"] / divisor).round(4),
            base=(rows["at_bytes"] / divisor).round(4),
            width=0.86,
            name=f"{label}: {units.size(int(table.filter(pl.col('state').is_in(states))['bytes'].sum()))}",
            colour=colour,
            customdata=[_block_hover(row, label) for row in rows.iter_rows(named=True)],
            hover="%{customdata}",
        )
    _segment_ends(figure, blocks, divisor)
    names = blocks.unique("pool_name", keep="first", maintain_order=True)
    last = int(str(blocks["row"].max()))
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(range=[0, row_bytes / divisor], ticksuffix=f" {unit}", showgrid=False)
    figure.update_yaxes(
        tickvals=names["row"].to_list(),
        ticktext=[escaping.escape(name, 60) for name in names["pool_name"]],
        range=[last + 0.6, -0.6],
        fixedrange=True,
        showgrid=False,
    )
    return style.with_style(figure, height_px=120 + 15 * (last + 1) + 30)


def reserved_memory(peaks: Mapping[str, tuple[int, bool]], *, peak_allocated_bytes: int | None = None) -> go.Figure:
    """Return bars of the peak reserved memory by label: the bytes, and whether it is a prediction.

    A line marks `peak_allocated_bytes`: at least this much must be reserved.
    """
    sizes, are_predicted = [size for size, _ in peaks.values()], [predicted for _, predicted in peaks.values()]
    divisor, unit = _byte_scale(max(sizes, default=0))
    figure = go.Figure()
    style.add_bars(
        figure,
        range(len(sizes)),
        [size / divisor for size in sizes],
        colour=COLOURS["compute"],
        marker_pattern={"shape": ["/" if predicted else "" for predicted in are_predicted], "fgopacity": 0.5},
        text=[units.size(size) for size in sizes],
        textposition="outside",
        cliponaxis=False,
        hover="%{text}",
        showlegend=False,
    )
    if peak_allocated_bytes:
        figure.add_vline(
            x=peak_allocated_bytes / divisor,
            line={"color": COLOURS["phase"], "dash": "dot"},
            annotation={"text": f"peak allocated {units.size(peak_allocated_bytes)}", "yanchor": "bottom", "y": 1},
        )
    figure.update_layout(bargap=0.35)
    figure.update_xaxes(title="peak reserved", ticksuffix=f" {unit}", rangemode="tozero")
    style.label_rows(figure, list(peaks), max_characters=60)
    return style.with_style(figure, height_px=150 + 44 * len(peaks))


def memory_categories(table: pl.DataFrame) -> go.Figure:
    """Return bars of what memory is for, largest first, from a table of `categories.by_category`."""
    rows = table.sort("bytes", "category", descending=[True, False])
    sizes = rows["bytes"].to_list()
    divisor, unit = _byte_scale(max(sizes, default=0))
    figure = go.Figure()
    style.add_bars(
        figure,
        range(len(sizes)),
        [size / divisor for size in sizes],
        colour=COLOURS["compute"],
        text=[f"{units.size(size)} ({units.share(s)})" for size, s in rows.select("bytes", "peak_ratio").rows()],
        textposition="outside",
        cliponaxis=False,
        customdata=[[f"{count:,}", evidence or ""] for count, evidence in rows.select("count", "evidence").rows()],
        hover="%{text} in %{customdata[0]} blocks<br>%{customdata[1]}",
        showlegend=False,
    )
    figure.update_layout(bargap=0.35)
    figure.update_xaxes(ticksuffix=f" {unit}", range=[0, 1.25 * max(sizes, default=0) / divisor or 1])
    style.label_rows(figure, rows["category"].to_list())
    return style.with_style(figure, height_px=110 + 34 * len(sizes))


def _colours(owners: Sequence[str]) -> list[str]:
    further = iter([colour for colour in _EXTRA_COLOURS if colour not in {_OWNERS.get(owner) for owner in owners}])
    spare = iter(sample_colorscale("Viridis", [i / max(len(owners) - 1, 1) for i in range(len(owners))]))
    return [_OWNERS.get(owner) or next(further, None) or str(next(spare)) for owner in owners]


def _mark_peak(figure: go.Figure, moments: pl.DataFrame, begin_ns: int, divisor: int) -> None:
    peak = moments.sort("live_bytes", descending=True, maintain_order=True).row(0, named=True)
    figure.add_annotation(
        x=(peak["at_ns"] - begin_ns) / 1e6,
        y=peak["live_bytes"] / divisor,
        text=f"peak {units.size(peak['live_bytes'])}",
        showarrow=True,
        arrowhead=2,
        arrowcolor="rgba(128, 138, 150, 0.9)",
        ax=0,
        ay=-26,
        yanchor="bottom",
    )


def _lifetime_hover(low_bytes: int, low_ns: int, cell: Sequence[object]) -> str:
    size, count, op, high_bytes, high_ns = cell
    lives = "outlive the profiled window"
    if high_ns:
        lives = f"live {units.duration(low_ns)} to {units.duration(int(str(high_ns)))}"
    return (
        f"<b>{int(str(count)):,} blocks</b> of {units.size(low_bytes)} to {units.size(int(str(high_bytes)))} that "
        f"{lives}<br>{units.size(int(str(size)))} in total, mostly by {escaping.escape(str(op or 'no op'), 120)}"
    )


def _colourbar(sizes: pl.Series) -> dict[str, object]:
    powers = [power for power in range(10, 63, 5) if power <= _log(int(str(sizes.max()))) + 1]
    return {"title": "allocated", "tickvals": powers, "ticktext": [units.size(1 << power) for power in powers]}


def _log(size_bytes: int) -> int:
    return max(size_bytes, 1).bit_length() - 1


def _byte_scale(largest_bytes: int) -> tuple[int, str]:
    """Return the unit for values up to `largest_bytes`: its bytes and its name."""
    power = min(max((largest_bytes.bit_length() - 1) // 10, 0), 4)
    return 1 << (10 * power), ("B", "KiB", "MiB", "GiB", "TiB")[power]


def _row_bytes(table: pl.DataFrame) -> int:
    """Bytes of memory on a line, so that all pools together have at most _MOST_ROWS lines."""
    pools = table.group_by("pool", "kind", "stream").agg(pl.col("bytes").sum())["bytes"]
    size = _ROW_UNIT
    while int((-(-pools // size)).sum()) > max(_MOST_ROWS, 2 * len(pools)):
        size *= 2
    return size


def _in_rows(table: pl.DataFrame, row_bytes: int) -> pl.DataFrame:
    """Return the blocks, split at the ends of lines, with row, at_bytes (offset in the line) and pool_name."""
    key = ["pool", "kind", "stream"]
    private = pl.when(pl.col("pool") == "0:0").then(pl.lit("")).otherwise(pl.format(", pool {}", "pool"))
    stream = pl.when(pl.col("stream") == 0).then(pl.lit("")).otherwise(pl.format(", stream {}", "stream"))
    blocks = table.with_columns(pool_name=pl.format("{}{}{}", "kind", stream, private))
    rows = pl.col("bytes").sum().floordiv(row_bytes) + 1
    lines = blocks.group_by(key, maintain_order=True).agg(lines=rows)
    lines = lines.with_columns(first_row=pl.col("lines").cum_sum() - pl.col("lines"))
    offset = pl.col("bytes").cum_sum().over(key) - pl.col("bytes")
    placed_blocks = blocks.join(lines, on=key, how="left", maintain_order="left").with_columns(start=offset)
    last = (pl.col("start") + pl.col("bytes") - 1).clip(lower_bound=pl.col("start")) // row_bytes
    cut = placed_blocks.with_columns(line=pl.int_ranges(pl.col("start") // row_bytes, last + 1)).explode("line")
    begin = pl.max_horizontal("start", pl.col("line") * row_bytes)
    end = pl.min_horizontal(pl.col("start") + pl.col("bytes"), (pl.col("line") + 1) * row_bytes)
    return cut.with_columns(
        row=pl.col("first_row") + pl.col("line"), at_bytes=begin - pl.col("line") * row_bytes, part_bytes=end - begin
    )


def _merge_narrow(blocks: pl.DataFrame, least_bytes: float) -> pl.DataFrame:
    """Return the blocks; adjacent ones narrower than `least_bytes` are merged per state."""
    wide = pl.col("part_bytes") >= least_bytes
    cell = (pl.col("at_bytes") / least_bytes).floor().cast(pl.Int64)
    marked = blocks.with_columns(wide=wide, cell=cell, run=wide.cum_sum())
    wide_blocks = marked.filter("wide").select(
        "row", "at_bytes", "state", "op", "segment_address", bytes="part_bytes", blocks=pl.lit(1, pl.Int64),
        whole_bytes="bytes",
    )  # fmt: skip
    key = ["row", "cell", "run"]
    small = marked.filter(~pl.col("wide")).with_columns(begin=pl.col("at_bytes").min().over(key))
    merged = small.group_by(*key, "begin", "state", maintain_order=True).agg(
        pl.col("op", "segment_address").first(),
        bytes=pl.col("part_bytes").sum(),
        blocks=pl.len().cast(pl.Int64),
        whole_bytes=pl.col("part_bytes").sum(),
    )
    before = pl.col("bytes").cum_sum().over(key) - pl.col("bytes")
    together = merged.with_columns(at_bytes=pl.col("begin") + before).select(wide_blocks.columns)
    return pl.concat([wide_blocks, together])


def _block_hover(row: dict[str, object], label: str) -> str:
    count, size = int(str(row["blocks"])), units.size(int(str(row["whole_bytes"])))
    many = f"{count:,} blocks, {size} in total" if count > 1 else size
    owner = f"<br>{escaping.escape(str(row['op']), 120)}" if row["op"] and label != "free" else ""
    return f"<b>{label}</b> {many}{owner}<br>segment {int(str(row['segment_address'])):#x}"


def _segment_ends(figure: go.Figure, blocks: pl.DataFrame, divisor: int) -> None:
    """Draw the end of each segment as a tick, unless there are too many."""
    lasts = blocks.group_by("segment_address", maintain_order=True).last()
    if lasts.height > _MOST_EDGES:
        return
    ends = lasts.select("row", (pl.col("at_bytes") + pl.col("part_bytes")) / divisor).rows()
    figure.add_scatter(
        x=[x for _, end in ends for x in (end, end, None)],
        y=[y for row, _ in ends for y in (row - 0.5, row + 0.5, None)],
        mode="lines",
        line={"width": 1, "color": COLOURS["phase"]},
        hoverinfo="skip",
        showlegend=False,
    )
