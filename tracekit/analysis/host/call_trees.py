"""Call trees: host and device time by the stack of slices, and the functions on a stack; what flame graphs draw."""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.host import ops
from tracekit.analysis.time import host_state, trace_columns
from tracekit.errors import ConfigError, InputError
from tracekit.model import columns, intervals, nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Window
from tracekit.model.run import OnTrace, Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace, TraceFact

HOST, DEVICE = KINDS = ("host", "device")
TREE = schema.columns("node parent name count self_ns total_ns", name=pl.String)
WINDOW_TREE = schema.columns("node parent name count self_ns total_ns longest_id", name=pl.String)
DIFFERENCE = schema.columns("node parent name before_self_ns after_self_ns before_ns after_ns", name=pl.String)
UNLINKED = "(launch not recorded)"
MAX_FRAMES = 500
"""Of a stack: the files list whole stacks, so they would grow with the square of the depth."""
_FRAME = (
    pl.when(pl.col("name").cast(pl.String).str.contains(r"^ProfilerStep#\d+$"))
    .then(pl.lit("ProfilerStep"))
    .otherwise(pl.col("name").cast(pl.String).fill_null("?"))
    .alias("frame")
)
_ROOT = schema.columns("node parent name count self_ns", name=pl.String)
_SUMS = ("count", "self_ns")
_Ints = npt.NDArray[np.int64]
_NONE: _Ints = np.empty(0, np.int64)

FUNCTION_COLUMNS = {"file": pl.String, "line": pl.Int64, "function": pl.String, "inside_ns": pl.Int64}
_MAX_DEPTH = 200
_PLACE = {"name": pl.String, "dur_ns": pl.Int64}
_HARDLY_MORE, _MOST = 0.8, 0.5
"""An annotation that is hardly more than a pause is named after what pauses; so is one that is mostly a pause, if it is
less than a step."""


def call_tree(
    run: Run,
    kind: str = DEVICE,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    by_rank: bool = False,
    on_progress: OnTrace | None = None,
) -> pl.DataFrame:
    """Time of a run by call stack: columns TREE, one row per different stack.

    Rows are numbered by node, each after its parent, which is -1 for the outermost frames. Of the host: the self time
    of each slice under those that enclose it, below the kind of its thread. Of the device: the duration of each
    activity under the slices that enclose its launch; activities that run at the same time all count. All spans of
    steps have one name. total_ns includes the nodes below. `step` and `ranks` select a part; with `by_rank` the
    outermost frames are ranks. Nodes without any slice or activity are left out. Raises ConfigError for an unknown
    `kind`, InputError for a rank that has no trace, or where nothing is left.
    """
    if kind not in KINDS:
        raise ConfigError(f"{kind!r} is not a kind of time; use one of: {', '.join(KINDS)}")
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing:
        raise InputError(f"no trace of rank {missing[0]}; there are {len(run.ranks)}, from {run.ranks[0]}")
    fact = _tree_fact(kind, step)
    run.measure((fact,), on_progress)
    rows = run.table(fact)
    if ranks is not None:
        rows = rows.filter(pl.col("rank").is_in(list(ranks)))
    if rows.is_empty():
        in_step = "" if step is None else f" in step {step}"
        other = HOST if kind == DEVICE else DEVICE
        raise InputError(f"the traces have no work of the {kind}{in_step}; use --of {other} for the {other}")
    # Trees of several traces as one, with total_ns.
    parts = rows.partition_by("window", "rank", maintain_order=True)
    if by_rank:
        for index, part in enumerate(parts):
            root = pl.DataFrame([(0, -1, f"rank {part['rank'][0]}", 0, 0)], _ROOT, orient="row")
            parts[index] = pl.concat([root, part.with_columns(pl.col("node", "parent") + 1).select(root.columns)])
    joined = _joined_forest(parts)
    sums = {name: np.concatenate([part[name].to_numpy() for part in parts]) for name in _SUMS}
    table = _tree(joined["name"], joined["parent"].to_numpy(), **sums)
    total_ns = _totals(table["parent"].to_numpy(), table["self_ns"].to_numpy())
    return table.with_columns(pl.Series("total_ns", total_ns)).select(list(TREE))


def of_window(trace: Trace, window: Window, lane: int | None = None) -> pl.DataFrame:
    """Host time of a part of a trace by call stack, of one thread or by default of all.

    Columns WINDOW_TREE, rows as in `call_tree` of the host; `window` is in ns on the clock of the trace. Slices count
    with their part inside the window. longest_id is the id of the op with the longest such part, the first of equal
    ones; null for threads.
    """
    begin_ns, end_ns = window
    past_ns = pl.col("start_ns") + pl.col("dur_ns")
    of_lane = trace.ops if lane is None else trace.ops.filter(lane=lane)
    # The slices around one that is inside end at the window's start at the earliest.
    slices = of_lane.filter(pl.col("start_ns") < end_ns, past_ns >= begin_ns)
    is_inside = slices.select((past_ns > begin_ns) | (pl.col("start_ns") >= begin_ns)).to_series().to_numpy()
    begins_ns = pl.col("start_ns").clip(begin_ns, None)
    cut = slices.with_columns(start_ns=begins_ns, dur_ns=(past_ns.clip(None, end_ns) - begins_ns).clip(0))
    tree = _host_tree(cut, trace.lanes, is_inside.astype(np.int64), longest=cut["dur_ns"].to_numpy())
    total_ns = _totals(tree["parent"].to_numpy(), tree["self_ns"].to_numpy())
    return schema.select(tree.with_columns(pl.Series("total_ns", total_ns)), WINDOW_TREE)


def search(tree: pl.DataFrame, text: str) -> tuple[int, int]:
    """Count the frames of a tree that contain `text`, in any case, and sum their time: nested ones count once."""
    folded, match_count, total_ns = text.casefold(), 0, 0
    is_below = np.zeros(tree.height + 1, np.bool_)  # the last for the frames without a parent
    for node, parent, name, ns in tree.select("node", "parent", "name", "total_ns").iter_rows():
        is_match = folded in name.casefold()
        match_count += int(is_match)
        total_ns += ns if is_match and not is_below[parent] else 0
        is_below[node] = is_match or is_below[parent]
    return match_count, total_ns


def difference(before: pl.DataFrame, after: pl.DataFrame, shares: tuple[float, float] = (1.0, 1.0)) -> pl.DataFrame:
    """Return two call trees as one: columns DIFFERENCE, one row per stack of either.

    The times of each tree are multiplied by its share, such as one over its steps and ranks, and rounded.
    """
    sides = [
        tree.select("node", "parent", "name", (pl.col("self_ns") * share).round().cast(pl.Int64).alias("self_ns"))
        for tree, share in zip((before, after), shares, strict=True)
    ]
    zeros = [np.zeros(side.height, np.int64) for side in sides]
    joined = _joined_forest(sides)
    self_ns = [side["self_ns"].to_numpy() for side in sides]
    table = _tree(
        joined["name"],
        joined["parent"].to_numpy(),
        before_self_ns=np.concatenate([self_ns[0], zeros[1]]),
        after_self_ns=np.concatenate([zeros[0], self_ns[1]]),
    )
    totals = {
        f"{side}_ns": _totals(table["parent"].to_numpy(), table[f"{side}_self_ns"].to_numpy())
        for side in ("before", "after")
    }
    return table.with_columns(pl.Series(name, values) for name, values in totals.items()).select(list(DIFFERENCE))


def steps(run: Run, *, step: int | None = None, ranks: Sequence[int] | None = None) -> int:
    """Count the steps of ranks that a call tree of the run covers; windows without steps count as one."""
    rows = run.table(_step_count)
    if ranks is not None:
        rows = rows.filter(pl.col("rank").is_in(list(ranks)))
    return max(1, rows.height if step is not None else int(rows["steps"].sum()))


def stacks(tree: pl.DataFrame) -> list[tuple[str, ...]]:
    """Stack of each node of a tree, outermost frame first."""
    node_stacks: list[tuple[str, ...]] = []
    for parent, name in tree.select("parent", "name").iter_rows():
        node_stacks.append((*(node_stacks[parent] if parent >= 0 else ()), name))
    return node_stacks


def functions(trace: Trace, evidence: pl.DataFrame) -> pl.DataFrame:
    """Python functions that ran while the work in `evidence` was done or launched, the longest first.

    `evidence` has columns start_ns and dur_ns, on the clock of the trace. Columns file, line, function, inside_ns; one
    row per function. The time of a function includes its callees, and it comes before them. No rows where the trace has
    no stacks.
    """
    python = trace.ops.lazy().filter(pl.col("kind") == "python").select("id", "name", "start_ns", "dur_ns")
    name_fields = pl.col("name").str.extract_groups(trace_columns.FRAME_NAME).struct.unnest()
    calls = python.with_columns(name_fields).drop_nulls("file").with_columns(pl.col("line").cast(pl.Int64)).collect()
    spans = _host_spans(trace, evidence)
    if calls.is_empty() or not len(spans):
        return schema.empty(FUNCTION_COLUMNS)
    inside_ns = intervals.coverage(intervals.from_table(calls), spans)
    return (
        calls.with_columns(pl.Series("inside_ns", inside_ns))
        .filter(pl.col("inside_ns") > 0)
        .group_by("file", "line", "function")
        # Recursion must not exceed the total time.
        .agg(pl.col("inside_ns").sum().clip(upper_bound=intervals.length(spans)), pl.col("id").min())
        .sort("inside_ns", "id", descending=[True, False])
        .select(list(FUNCTION_COLUMNS))
    )


def locations_at(trace: Trace, at_ns: Ints) -> pl.Series:
    """Innermost function of the program (not of torch) in which a launching thread is at each time.

    Column stack: "train.py(12): main"; null where no such function runs, or no stacks were recorded.
    """
    located = _innermost_at(trace, trace_columns.is_program_frame(trace), at_ns)
    return located["name"].alias("stack")


def pauses_in_annotations(trace: Trace, start_ns: Ints, dur_ns: Ints) -> pl.Series:
    """Innermost annotation of the program around each pause of a launching thread, if it has little else in it.

    Column annotation, in quotes: '"wait for rollouts"'; null where no annotation is around the middle of a pause, or
    where much of it is something else, as in that of a step: it then says little about what the host does.
    """
    around = _innermost_at(trace, trace_columns.is_program_annotation(trace), start_ns + dur_ns // 2)
    step_ns = (trace.steps["end_ns"] - trace.steps["start_ns"]).median() or 0
    share = pl.Series(dur_ns) / around["dur_ns"]
    is_part = around["dur_ns"] < _HARDLY_MORE * float(str(step_ns))
    is_pause = (share >= _HARDLY_MORE) | ((share >= _MOST) & is_part)
    quoted = pl.format('"{}"', pl.col("name"))
    return around.select(pl.when(pl.lit(is_pause)).then(quoted).alias("annotation")).to_series()


def _innermost_at(trace: Trace, is_place: Flags, at_ns: Ints) -> pl.DataFrame:
    """Name and dur_ns of the innermost flagged slice of a launching thread at each time; null where none is."""
    none = pl.DataFrame({"name": [None] * len(at_ns), "dur_ns": [None] * len(at_ns)}, schema=_PLACE)
    if not is_place.any():
        return none
    flagged = trace.ops.with_columns(pl.Series("own", is_place))
    ops = flagged.join(host_state.launching_threads(trace), on="lane", how="semi")
    if ops.is_empty():
        return none
    ops = ops.sort("start_ns", "id").with_row_index("at")
    row_of = ops.select(parent_id="id", row=pl.col("at").cast(pl.Int64))
    parent = ops.join(row_of, on="parent_id", how="left", maintain_order="left")["row"].fill_null(-1).to_numpy()
    nearest = nesting.nearest(parent, ops["own"].to_numpy())
    innermost = np.full(len(at_ns), -1, np.int64)
    for (_,), thread in ops.select("at", "lane", "start_ns").group_by("lane"):
        rows = np.append(thread["at"].to_numpy().astype(np.int64), -1)  # the last one for times before the first slice
        row = rows[np.searchsorted(thread["start_ns"].to_numpy(), at_ns, side="right") - 1]
        row = _around(row, at_ns, parent, (ops["start_ns"] + ops["dur_ns"]).to_numpy())
        innermost = np.maximum(innermost, np.where(row >= 0, nearest[np.maximum(row, 0)], -1))  # the one entered last
    located = ops.select("name", "dur_ns")[np.maximum(innermost, 0)].with_columns(known=pl.Series(innermost >= 0))
    return located.select(pl.when("known").then(name).alias(name) for name in _PLACE)


@trace_fact
def _step_count(trace: Trace) -> pl.DataFrame:
    return pl.DataFrame({"steps": [max(1, trace.steps["step"].drop_nulls().n_unique())]})


@functools.cache
def _tree_fact(kind: str, step: int | None) -> TraceFact:
    return functools.partial(_host_call_tree if kind == HOST else _device_call_tree, step=step)


def _host_call_tree(trace: Trace, step: int | None) -> pl.DataFrame:
    slices = trace.ops
    counts = np.ones(slices.height, np.int64) if step is None else (slices["step"] == step).fill_null(False).to_numpy()
    return _host_tree(slices, trace.lanes, counts)


def _host_tree(slices: pl.DataFrame, lanes: pl.DataFrame, counts: _Ints, longest: _Ints | None = None) -> pl.DataFrame:
    """Tree of an ops table, or of a part that has the parents of its rows, below the kinds of threads.

    `counts` is 1 for each row that counts. With `longest`, shape (slices,), the tree has a column longest_id.
    """
    frames = slices.select("id", "lane", "parent_id", _FRAME, ops.self_times(slices))
    joined = frames.join(lanes.select("lane", thread="name"), on="lane", how="left", maintain_order="left")
    # Without the thread's number, which differs between ranks: "thread 140 (pt_autograd_1)" is pt_autograd.
    kind = pl.col("thread").str.extract(r"\((.+?)(?:_\d+)?\)$").fill_null("thread")
    threads = joined.select(kind)["thread"]
    roots = threads.unique(maintain_order=True)
    root_of = threads.replace_strict(roots, range(len(roots)), return_dtype=pl.Int64).to_numpy()
    ids = frames["id"].to_numpy()
    parent = columns.rows_of(ids, columns.to_ints(frames["parent_id"], -1))
    none = np.zeros(len(roots), np.int64)
    tree = _tree(
        pl.concat([roots.alias("frame"), frames["frame"]]),
        np.concatenate([none - 1, np.where(parent >= 0, parent + len(roots), root_of)]),
        order_by=None if longest is None else np.concatenate([none - 1, np.where(counts, longest, -1)]),
        count=np.concatenate([none, counts]),
        self_ns=np.concatenate([none, np.where(counts, frames["self_ns"].to_numpy(), 0)]),
    )
    if longest is None:
        return tree
    row = tree["largest"].to_numpy() - len(roots)
    longest_id = pl.Series("longest_id", ids[np.maximum(row, 0)] if len(ids) else row, pl.Int64)
    return tree.with_columns(pl.when(pl.Series(row >= 0)).then(longest_id).alias("longest_id"))


def _device_call_tree(trace: Trace, step: int | None) -> pl.DataFrame:
    if not trace.on_device:
        return _tree(pl.Series([], dtype=pl.String), _NONE, count=_NONE, self_ns=_NONE)
    work = trace.activities if step is None else trace.activities.filter(step=step)
    slices = trace.ops.select("kind", "parent_id", _FRAME)
    parent = slices["parent_id"].fill_null(-1).to_numpy()
    # Runtime calls, such as cudaLaunchKernel, say nothing that the kernel does not.
    around = nesting.nearest(parent, (slices["kind"] != "runtime").fill_null(True).to_numpy())
    launch = work["launch_id"].fill_null(-1).to_numpy()
    op = np.full(work.height, slices.height, np.int64)
    op[launch >= 0] = around[launch[launch >= 0]]
    none = np.zeros(slices.height + 1, np.int64)
    return _tree(
        pl.concat([slices["frame"], pl.Series("frame", [UNLINKED]), work.select(_FRAME)["frame"]]),
        np.concatenate([parent, [-1], op]),
        count=np.concatenate([none, np.ones(work.height, np.int64)]),
        self_ns=np.concatenate([none, work["dur_ns"].to_numpy()]),
    )


def _joined_forest(trees: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Names and parents of several trees below each other. Columns name, parent (the row)."""
    parts, first = [], 0
    for tree in trees:
        parent = pl.when(pl.col("parent") >= 0).then(pl.col("parent") + first).otherwise(-1)
        parts.append(tree.select("name", parent.alias("parent")))
        first += tree.height
    return pl.concat(parts)


def _tree(names: pl.Series, parent: _Ints, *, order_by: _Ints | None = None, **sums: _Ints) -> pl.DataFrame:
    """Return frames with the same stack as one node: columns node, parent, name and `sums`.

    `parent` is the row of the frame around each frame, -1 for none. Deeper frames than MAX_FRAMES count as part of the
    frame at that depth. Nodes below which all sums are 0 are left out. With `order_by`, a column largest has the row of
    each node where it is largest, the first of equal ones.
    """
    texts = names.unique(maintain_order=True)
    codes = names.replace_strict(texts, range(len(texts)), return_dtype=pl.Int64).to_numpy()
    node_of = np.full(len(parent), -1, np.int64)
    parts, first = [np.empty((0, 2), np.int64)], 0
    levels = nesting.levels(parent, np.arange(len(parent)))
    for level in levels[:MAX_FRAMES]:
        above = np.where(parent[level] >= 0, node_of[parent[level]], -1)
        keys, which = np.unique(np.stack([above, codes[level]], axis=1), axis=0, return_inverse=True)
        node_of[level] = first + which.reshape(-1)
        parts.append(keys)
        first += len(keys)
    for level in levels[MAX_FRAMES:]:
        node_of[level] = node_of[parent[level]]
    nodes = np.concatenate(parts)
    values = {name: np.zeros(first, np.int64) for name in sums}
    for name, amounts in sums.items():
        np.add.at(values[name], node_of, amounts)
    has_time = sum((_totals(nodes[:, 0], node_sums) for node_sums in values.values()), np.zeros(first, np.int64)) > 0
    number = np.cumsum(has_time) - 1
    above = np.where(nodes[:, 0] >= 0, number[nodes[:, 0]], -1)
    if order_by is not None:
        order = np.lexsort((-np.arange(len(order_by)), order_by))
        values["largest"] = np.zeros(first, np.int64)
        values["largest"][node_of[order]] = order  # of several rows of a node, the last counts
    table = pl.DataFrame({"parent": above, "name": texts.gather(nodes[:, 1]), **values}).filter(pl.Series(has_time))
    return table.with_row_index("node").with_columns(pl.col("node").cast(pl.Int64))


def _totals(parent: _Ints, amounts: _Ints) -> _Ints:
    """Return each node's own value and those of all nodes below it."""
    total = amounts.copy()
    for level in reversed(nesting.levels(parent, np.arange(len(parent)))):
        inner = level[parent[level] >= 0]
        np.add.at(total, parent[inner], total[inner])
    return total


def _around(row: Ints, at_ns: Ints, parent: Ints, end_ns: Ints) -> Ints:
    """Innermost slice that still runs at each time: `row` or one around it; -1 for none."""
    for _ in range(_MAX_DEPTH):
        ended = (row >= 0) & (end_ns[np.maximum(row, 0)] <= at_ns)
        if not ended.any():
            return row
        row = np.where(ended, parent[np.maximum(row, 0)], row)
    return np.where(ended, -1, row)


def _host_spans(trace: Trace, evidence: pl.DataFrame) -> intervals.Spans:
    """Spans in which the host did the work in the evidence: for device work, those in which it launched that work."""
    rows = evidence.select("start_ns", "dur_ns").drop_nulls()
    if trace.on_device:
        work = trace.activities.select("start_ns", "dur_ns", "launch_id")
        calls = trace.ops.select(launch_id="id", launched_ns="start_ns", call_ns="dur_ns")
        launched = rows.join(work, on=["start_ns", "dur_ns"], how="left").join(calls, on="launch_id", how="left")
        rows = launched.select(start_ns=pl.coalesce("launched_ns", "start_ns"), dur_ns=pl.coalesce("call_ns", "dur_ns"))
    # An instant has no duration, but still lies inside a function.
    return intervals.union(intervals.from_columns(rows["start_ns"], np.maximum(rows["dur_ns"].to_numpy(), 1)))
