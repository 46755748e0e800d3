"""Communication inside pipelines: transfers between stages, and data-parallel collectives of micro-batches."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.parallelism import axis_communication, pipeline_bubbles, pipeline_stages, rank_places
from tracekit.analysis.parallelism.pipeline_actions import COMPUTE_ACTIONS, POINT_TO_POINT, pipeline_actions
from tracekit.analysis.parallelism.pipeline_stages import PIPELINE
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import CP, EP, PP, REDUCE_SCATTER, TP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment, collective_matching
from tracekit.sync.collective_matching import PAIRED

LINKS = schema.columns(
    "window pipeline source_rank rank source_stage rank_stage calls low_ns delay_ns usual_ns saved_ns duration_ns"
)
_LINK = ["window", "pipeline", "source_rank", "rank"]
_ACTION = ["stage", "micro_batch", "action"]
_LARGE_BYTES = 1 << 20
_BUSY_RATIO = 0.1
"""A rank that computes for more of a delay than this was not waiting."""
FACTS: tuple[TraceFact, ...] = (*pipeline_bubbles.FACTS, *axis_communication.FACTS, *rank_places.FACTS)

_OF = ("window", "rank", "device")

MICRO_BATCH_COLUMNS = schema.columns(
    "window rank step axis op with_calls micro_batches calls bytes exposed_ns lost_ns duration_ns"
)
PASSES = schema.columns("window pipeline step lost_ns delayed_ns duration_ns")
_OPS = ("all_gather", "reduce_scatter")
_KEY = [*pipeline_stages.PIPELINE, "rank", *_ACTION]
LAUNCHES = schema.columns("activity_id launched_micro_batch")


@trace_fact
def micro_batches_of_launches(trace: Trace) -> pl.DataFrame:
    """Micro-batch of the last action that the host began before it launched a collective.

    Columns LAUNCHES; one row per collective whose launch was recorded, none without a pipeline.
    """
    actions = pipeline_actions(trace).filter(pl.col("action").is_in(COMPUTE_ACTIONS))
    if actions.is_empty():
        return schema.empty(LAUNCHES)
    launches = trace.activities.join(trace.collectives, left_on="id", right_on="activity_id", how="semi")
    launched = launches.select("launch_id", activity_id="id").join(
        trace.ops.select(launch_id="id", launched_ns="start_ns"), on="launch_id"
    )
    begun = actions.select("host_start_ns", launched_micro_batch="micro_batch").sort("host_start_ns")
    rows = launched.sort("launched_ns").join_asof(begun, left_on="launched_ns", right_on="host_start_ns")
    return schema.conform(rows.drop_nulls("launched_micro_batch"), LAUNCHES)


MICRO_BATCH_FACTS: tuple[TraceFact, ...] = (
    *pipeline_bubbles.FACTS, *axis_communication.FACTS, exposed_communication.exposed_calls,
    breakdown.by_step, micro_batches_of_launches, )  # fmt: skip
"""The facts that the run tables of this module read."""


@run_fact
def arrivals(run: Run) -> pl.DataFrame:
    """Return the actions for whose input a rank was waiting when it was complete; use ``run.table``.

    Columns of `pipeline_bubbles.GAPS`, source_rank (which computed the input) and delay_ns: from then to the start of
    the action, the time of the transfer. Where a rank was busy, with an action or with other compute such as the last
    step's optimizer, or the input was there before, the time is not known.
    """
    gaps = run.table(pipeline_bubbles.idle_gaps).drop_nulls(["action", "ready_ns"])
    sources = pipeline_stages.dependencies(run.table(pipeline_stages.staged_actions))
    key = [*PIPELINE, "rank", *_ACTION]
    with_sources = gaps.join(sources.select(*key, source_rank="producer_rank").unique(key), on=key, nulls_equal=True)
    waited = with_sources.filter(pl.col("start_ns") < pl.col("ready_ns"), pl.col("ready_ns") <= pl.col("end_ns"))
    delayed = waited.with_columns((pl.col("end_ns") - pl.col("ready_ns")).alias("delay_ns"))
    # Time that the rank of each row computes between ready_ns and end_ns.
    compute = axis_communication.compute_spans(run)
    times = alignment.on_trace_clock(
        delayed.select("window", "rank", "ready_ns", "end_ns").with_row_index("row"),
        run.offsets,
        ("ready_ns", "end_ns"),
    )
    parts = [pl.DataFrame(schema={"row": pl.UInt32, "computing_ns": pl.Int64})]
    for place, rank_times in times.partition_by("window", "rank", as_dict=True).items():
        spans = intervals.from_columns(rank_times["ready_ns"], rank_times["end_ns"] - rank_times["ready_ns"])
        covered = intervals.coverage(spans, compute.get(place, intervals.EMPTY))
        parts.append(pl.DataFrame({"row": rank_times["row"], "computing_ns": pl.Series(covered, dtype=pl.Int64)}))
    return delayed.filter(pl.concat(parts).sort("row")["computing_ns"] <= _BUSY_RATIO * delayed["delay_ns"])


@run_fact
def links(run: Run) -> pl.DataFrame:
    """Return the transfer time of each link between ranks of a pipeline, and what it costs; use ``run.table``.

    Columns LINKS; one row per link and direction: source_stage and rank_stage (their first stages), low_ns and delay_ns
    (lower quartile and median), usual_ns, saved_ns (what the median step is shorter if this link, in both
    directions, takes the usual time) and duration_ns (of that step). usual_ns is the least of two medians: of other
    links of the same kind (inside a node, or between nodes), and of the same link of other replicas; null where there
    is neither.
    """
    waited = run.table(arrivals)
    if waited.is_empty():
        return schema.empty(LINKS)
    delay_ns = pl.col("delay_ns")
    table = waited.group_by(_LINK).agg(
        delay_ns.quantile(0.25).round().cast(pl.Int64).alias("low_ns"),
        delay_ns.median().round().cast(pl.Int64),
        pl.len().cast(pl.Int64).alias("calls"),
    )
    return schema.conform(_with_savings(run, _with_usual(run, table.sort(_LINK))), LINKS)


def transfer_rates(run: Run) -> dict[bool, float]:
    """Return the median bandwidth of large transfers between stages inside nodes (True) and across them, in bytes/s.

    A send and its receive end together, so the shorter of the two has no wait for the other rank in it. Ranks count as
    of one node where nodes are not known.
    """
    calls = run.table(collective_matching.calls).filter(pl.col("op") == PAIRED, pl.col("bytes") >= _LARGE_BYTES)
    pipelined = run.table(pipeline_stages.staged_actions)["rank"].unique()
    turn = pl.int_range(pl.len()).over("window", "rank", "members", order_by="start_ns").alias("turn")
    took_ns = (pl.col("end_ns") - pl.col("start_ns")).min()
    pairs = calls.filter(pl.col("rank").is_in(pipelined.implode())).with_columns(turn)
    pairs = pairs.group_by("window", "members", "turn").agg(took_ns.alias("took_ns"), pl.col("bytes").first(), pl.len())
    timed = pairs.filter(pl.col("len") == 2, pl.col("took_ns") > 0)
    node_of = rank_places.node_of_rank(run)
    rates: dict[bool, list[float]] = {}
    for members, size_bytes, took in timed.select("members", "bytes", "took_ns").iter_rows():
        source, target = (node_of.get(int(rank)) for rank in members.split(">"))
        rates.setdefault(source == target, []).append(collective_instances.SECOND_NS * size_bytes / took)
    return {is_inside: float(np.median(values)) for is_inside, values in rates.items()}


@run_fact
def exposed_transfers_by_step(run: Run) -> pl.DataFrame:
    """Return `exposed_communication.exposed_by_step` with the sends and receives of a pipeline in waited_ns."""
    calls = run.table(exposed_communication.exposed_transfers)
    steps = run.table(exposed_communication.exposed_by_step)
    if not pipeline_stages.is_pipelined(run):
        return steps
    sends = _spans_of(calls.filter(_is_send()))
    other_spans = _spans_of(calls.filter(~_is_send()))
    exposed = exposed_communication.exposed_on_devices(run)
    parts = [steps.clear()]
    for place, device_steps in steps.partition_by(_OF, as_dict=True, maintain_order=True).items():
        only = intervals.subtract(sends.get(place, intervals.EMPTY), other_spans.get(place, intervals.EMPTY))
        moved = intervals.intersect(only, exposed.get(place, intervals.EMPTY))
        windows = intervals.from_columns(device_steps["start_ns"], device_steps["duration_ns"])
        moved_ns = pl.Series(intervals.coverage(windows, moved), dtype=pl.Int64)
        parts.append(device_steps.with_columns(pl.col("exposed_ns") - moved_ns, pl.col("waited_ns") + moved_ns))
    return pl.concat(parts)


@run_fact
def exposed_transfers(run: Run) -> pl.DataFrame:
    """Return `exposed_communication.exposed_transfers` without the sends and receives of a pipeline."""
    calls = run.table(exposed_communication.exposed_transfers)
    return calls.filter(~_is_send()) if pipeline_stages.is_pipelined(run) else calls


@run_fact
def sharded_micro_batches(run: Run) -> pl.DataFrame:
    """Number of micro-batches that data-parallel collectives run for; use ``run.table``.

    Columns MICRO_BATCH_COLUMNS; one row per rank, step, axis and op (all_gather, reduce_scatter): with_calls
    (micro-batches during or after whose actions such a collective was launched, or started where its launch is
    unknown), exposed_ns (without waits), lost_ns (that
    beyond one micro-batch), duration_ns (of the pipeline in that step). Empty without a pipeline.
    """
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles)
    if bubbles.is_empty():
        return schema.empty(MICRO_BATCH_COLUMNS)
    calls = run.table(data_parallel_calls).filter(pl.col("op").is_in(_OPS))
    if calls.is_empty():
        return schema.empty(MICRO_BATCH_COLUMNS)
    aligned = alignment.on_run_clock(calls, run.offsets, ("start_ns",)).sort("start_ns")
    actions = run.table(pipeline_stages.staged_actions).select(
        "window", "rank", "step", "micro_batch", at_ns="start_ns"
    )
    during = aligned.join_asof(
        actions.sort("at_ns"),
        left_on="start_ns",
        right_on="at_ns",
        by=["window", "rank", "step"],
        check_sortedness=False,
    )
    launches = run.table(micro_batches_of_launches)
    launched = during.join(launches, on=["window", "rank", "activity_id"], how="left", nulls_equal=True)
    sums = launched.group_by("window", "rank", "step", "axis", "op").agg(
        pl.coalesce("launched_micro_batch", "micro_batch").drop_nulls().n_unique().alias("with_calls"),
        pl.len().alias("calls"),
        pl.col("bytes", "exposed_ns").sum(),
    )
    steps = bubbles.unique(["window", "rank", "step"]).select("window", "rank", "step", "micro_batches", "duration_ns")
    lost = pl.col("exposed_ns") - pl.col("exposed_ns") // pl.col("with_calls").clip(1)
    joined = sums.join(steps, on=["window", "rank", "step"], nulls_equal=True).with_columns(lost.alias("lost_ns"))
    return schema.conform(joined, MICRO_BATCH_COLUMNS).sort("window", "rank", "step", "axis", "op")


@run_fact
def micro_batch_passes(run: Run) -> pl.DataFrame:
    """Delay of one pass of each pipeline by those collectives; use ``run.table``.

    Columns PASSES; one row per pipeline, for its pass of median duration. Its actions are scheduled on links without
    cost, each with its own duration and the exposed collectives right before it; a rank also needs what its
    reduce-scatters take after its last action, before the optimizer. delayed_ns is what the pass is longer than
    without the exposed collectives before actions, lost_ns what it is longer than if the collectives took the time of
    one micro-batch.
    """
    by_pipeline = pipeline_stages.representative_passes(run)
    if not by_pipeline:
        return schema.empty(PASSES)
    exposed = exposed_spans(run)
    reductions = reduce_scatters(run)
    after_ns = pl.max_horizontal("start_ns", pl.min_horizontal(pl.coalesce("ready_ns", "start_ns"), "end_ns"))
    gaps = run.table(pipeline_bubbles.idle_gaps).drop_nulls("action")
    delays = gaps.select(*_KEY, idle_ns=pl.col("end_ns") - after_ns)
    rows = []
    for (window, pipeline), actions in by_pipeline.items():
        place = (pl.col("rank").rank("dense") - 1).cast(pl.Int64)
        schedule = pipeline_stages.schedule_graph(tuple(actions.select(place, *_ACTION).iter_rows()))
        if schedule is None:
            continue
        idle_ns = actions.join(delays, on=_KEY, how="left", nulls_equal=True, maintain_order="left")["idle_ns"]
        before_ns, within_ns = exposed_around(actions, idle_ns.fill_null(0), exposed)
        own_ns = (actions["end_ns"] - actions["start_ns"]).to_numpy().astype(np.float64)
        one_ns = (before_ns + within_ns) / actions["micro_batch"].n_unique()
        cases = np.stack([own_ns + before_ns, own_ns, own_ns - within_ns + one_ns], axis=1)
        ends = pipeline_stages.end_times(schedule, cases)
        trailing_ns, trailing_once_ns = reduced_after_actions(actions, reductions, exposed)
        ends += np.stack([trailing_ns, trailing_ns, trailing_once_ns], axis=1)
        with_ns, undelayed_ns, once_ns = ends.max(axis=0)
        step, lost_ns = actions["step"][0], round(max(0.0, with_ns - once_ns))
        rows.append((window, pipeline, step, lost_ns, round(with_ns - undelayed_ns), round(with_ns)))
    return pl.DataFrame(rows, schema=PASSES, orient="row")


def exposed_spans(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans in which each rank runs such collectives, all of whose ranks have arrived, and computes nothing.

    Keys are (window, rank), times on the clock of the rank's trace.
    """
    compute = axis_communication.compute_spans(run)
    # Calls that `exposed_transfers` leaves out, such as those of checkpoint saves, have no times.
    calls = run.table(data_parallel_calls).filter(pl.col("op").is_in(_OPS)).drop_nulls("dur_ns")
    of_rank = calls.partition_by("window", "rank", as_dict=True)
    return {
        place: intervals.subtract(exposed_communication.transfer_spans(rank_calls), compute.get(place, intervals.EMPTY))
        for place, rank_calls in of_rank.items()
    }


def reduce_scatters(run: Run) -> dict[tuple[object, ...], pl.DataFrame]:
    """Reduce-scatters of gradients on data-parallel axes by (window, rank, step), with waited_ns, in order of start."""
    calls = run.table(data_parallel_calls).filter(pl.col("op") == REDUCE_SCATTER).drop_nulls("dur_ns")
    return calls.sort("start_ns").partition_by("window", "rank", "step", as_dict=True)


def reduced_after_actions(
    actions: pl.DataFrame,
    reductions: Mapping[tuple[object, ...], pl.DataFrame],
    exposed: Mapping[tuple[object, ...], intervals.Spans],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Exposed time in ns of a rank's reduce-scatters after its last action; shape (actions,), 0 for other actions.

    The second array is what is left of it if they run for the last micro-batch only: these queue for the link, each
    from the time at which a part of the last action is done. `reductions` and `exposed` are those of `reduce_scatters`
    and `exposed_spans`.
    """
    measured, once = np.zeros((2, actions.height), np.int64)
    indexed = actions.with_row_index("row").sort("trace_start_ns")
    for (window, rank, step), rows in indexed.partition_by("window", "rank", "step", as_dict=True).items():
        calls = reductions.get((window, rank, step))
        if calls is None:
            continue
        row, start_ns = rows["row"][-1], rows["trace_start_ns"][-1]
        last_ns = rows["end_ns"][-1] - rows["start_ns"][-1]
        spans = exposed_communication.transfer_spans(calls)
        after = intervals.clip(spans, (start_ns + last_ns, int(spans.max(initial=0))))
        measured[row] = intervals.length(intervals.intersect(after, exposed.get((window, rank), intervals.EMPTY)))
        of_last = (spans[:, 1] - spans[:, 0])[-math.ceil(calls.height / rows["micro_batch"].n_unique()) :]
        link_free_ns = 0.0
        for place, took_ns in enumerate(of_last, start=1):
            link_free_ns = max(link_free_ns, last_ns * place / of_last.size) + took_ns
        once[row] = min(measured[row], round(link_free_ns - last_ns))
    return measured, once


@run_fact
def data_parallel_calls(run: Run) -> pl.DataFrame:
    """Return the calls of `axis_communication.calls` on data-parallel axes, with exposed_ns and waited_ns.

    Use ``run.table``.
    """
    other_axes = [PP, TP, EP, CP, "world"]
    calls = run.table(axis_communication.calls).filter(~pl.col("axis").is_in(other_axes).fill_null(value=True))
    times = ("exposed_ns", "waited_ns", "dur_ns")
    exposed = run.table(exposed_communication.exposed_transfers).select("window", "rank", "activity_id", *times)
    return calls.drop(times, strict=False).join(
        exposed, on=["window", "rank", "activity_id"], how="left", maintain_order="left"
    )


def exposed_around(
    actions: pl.DataFrame, idle_ns: pl.Series, exposed: Mapping[tuple[object, ...], intervals.Spans]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the exposed time of collectives in the idle_ns before each action, and within it.

    `exposed` are the spans of `exposed_spans`.
    """
    before, within = np.zeros((2, actions.height), np.int64)
    indexed = actions.with_row_index("at").with_columns(
        idle_ns.alias("idle_ns"), (pl.col("end_ns") - pl.col("start_ns")).alias("own")
    )
    for place, rows in indexed.partition_by("window", "rank", as_dict=True).items():
        index, start_ns, idle = (rows[name] for name in ("at", "trace_start_ns", "idle_ns"))
        spans = exposed.get(place, intervals.EMPTY)
        before[index] = intervals.coverage(intervals.from_columns(start_ns - idle, idle), spans)
        within[index] = intervals.coverage(intervals.from_columns(start_ns, rows["own"]), spans)
    return before, within


def _with_usual(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    node_of = rank_places.node_of_rank(run)
    stage_of = dict(run.table(pipeline_stages.staged_actions).group_by("rank").agg(pl.col("stage").min()).iter_rows())
    rows = table.to_dicts()
    for row in rows:
        ends = row["source_rank"], row["rank"]
        row["kind"] = node_of.get(ends[0]) == node_of.get(ends[1])
        row["between"] = frozenset(stage_of[rank] for rank in ends)
        row["ranks"] = frozenset(ends)
    usual = []
    for row in rows:
        peers = [r["delay_ns"] for r in rows if r["kind"] == row["kind"] and r["between"] != row["between"]]
        replicas = [r["delay_ns"] for r in rows if r["between"] == row["between"] and r["ranks"] != row["ranks"]]
        medians = [int(np.median(delays)) for delays in (peers, replicas) if delays]
        usual.append(min(medians, default=None))
    rank_columns = {"source_stage": "source_rank", "rank_stage": "rank"}
    return table.with_columns(
        pl.Series("usual_ns", usual, pl.Int64),
        *(
            pl.col(rank).replace_strict(stage_of, return_dtype=pl.Int64).alias(name)
            for name, rank in rank_columns.items()
        ),
    )


def _with_savings(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    rows = []
    examples = pipeline_stages.representative_passes(run)
    for row in table.iter_rows(named=True):
        actions = examples.get((row["window"], row["pipeline"]))
        saved = (0, 0)
        if actions is not None and row["usual_ns"] is not None and row["delay_ns"] > row["usual_ns"]:
            links = table.filter(pl.col("window") == row["window"], pl.col("pipeline") == row["pipeline"])
            saved = _saved_ns(actions, links, {row["source_rank"], row["rank"]})
        rows.append(row | {"saved_ns": saved[0], "duration_ns": saved[1]})
    return pl.DataFrame(rows, infer_schema_length=None)


def _saved_ns(actions: pl.DataFrame, links_of: pl.DataFrame, pair: set[int]) -> tuple[int, int]:
    """Time saved in a pass if a link takes the usual time, and the pass with all links as measured."""
    place = (pl.col("rank").rank("dense") - 1).cast(pl.Int64)
    order = tuple(actions.select(place, *_ACTION).iter_rows())
    schedule = pipeline_stages.schedule_graph(order)
    if schedule is None:
        return 0, 0
    ranks = actions["rank"].to_list()
    links = {(row["source_rank"], row["rank"]): row for row in links_of.iter_rows(named=True)}
    delays = np.zeros((len(order), 2))
    for index, sender in enumerate(schedule.sender):
        link = links.get((ranks[sender], ranks[index])) if sender is not None else None
        if link is not None:
            is_slow = {link["source_rank"], link["rank"]} == pair
            usual_ns = min(link["delay_ns"], link["usual_ns"] or link["delay_ns"])
            delays[index] = link["delay_ns"], usual_ns if is_slow else link["delay_ns"]
    dur_ns = actions.select(pl.col("end_ns") - pl.col("start_ns")).to_series().to_numpy().astype(np.float64)
    ends = pipeline_stages.end_times(schedule, np.stack([dur_ns, dur_ns], axis=1), delays).max(axis=0)
    return max(0, round(ends[0] - ends[1])), round(ends[0])


def _is_send() -> pl.Expr:
    return pl.col("op").is_in(POINT_TO_POINT).fill_null(value=False)


def _spans_of(calls: pl.DataFrame) -> dict[tuple[object, ...], intervals.Spans]:
    by_place = calls.partition_by(_OF, as_dict=True)
    return {place: intervals.union(exposed_communication.transfer_spans(rows)) for place, rows in by_place.items()}
