"""Timelines of all ranks on the run's clock: the state of each rank, and the rank that it waits for."""

import numpy as np
import polars as pl

from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.parallelism import stragglers
from tracekit.analysis.time import breakdown
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync import alignment

COMPUTE, TRANSFER, WAITING, COPY = STATES = ("compute", "transfer", "waiting", "copy")
COLUMNS = schema.columns("window rank device state start_ns dur_ns op unit peer_rank")
_OF = ("window", "rank", "device")
_KEY = ["window", "rank", "activity_id"]
_NO_DEVICE = -1


@run_fact
def states(run: Run) -> pl.DataFrame:
    """Return the state of each rank over time, on the run's clock; use ``run.table``.

    Columns COLUMNS; one row per span, disjoint on a device, by start. state: compute; transfer (exposed communication
    with all known ranks present); waiting (all running collectives wait for a rank); copy. The rest is idle. op and
    unit are those of the collective that started last, null in a checkpoint save; peer_rank is its last arrival, null
    where unknown.
    """
    calls = _calls(run)
    # Without a null in the keys: the device of a CPU run is null, and nulls do not match.
    began, pieces = (
        rows.with_columns(pl.col("device").fill_null(_NO_DEVICE)).sort("start_ns")
        for rows in (calls, _pieces(run.table(breakdown.spans), calls))
    )
    began = began.select(*_OF, "start_ns", "op", "unit", "peer_rank")
    with_calls = pieces.join_asof(began, on="start_ns", by=list(_OF), check_sortedness=False)
    communicates, waits = pl.col("state").is_in([TRANSFER, WAITING]), pl.col("state") == WAITING
    table = with_calls.with_columns(
        *(pl.when(communicates).then(name).alias(name) for name in ("op", "unit")),
        pl.when(waits).then("peer_rank").alias("peer_rank"),
        pl.when(pl.col("device") != _NO_DEVICE).then("device").alias("device"),
    ).pipe(schema.select, COLUMNS)
    shifted = alignment.on_run_clock(table, run.offsets, ("start_ns",))
    return shifted.select(*COLUMNS).sort("window", "rank", "device", "start_ns")


def within(rows: pl.DataFrame, window: intervals.Window) -> pl.DataFrame:
    """Return the states in a window of the run's clock (ns), clipped to it; the columns are those of `rows`."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    inside = rows.filter(pl.col("start_ns") < window[1], end_ns > window[0])
    start_ns = pl.col("start_ns").clip(window[0])
    return inside.with_columns(start_ns.alias("start_ns"), (end_ns.clip(None, window[1]) - start_ns).alias("dur_ns"))


def totals(rows: pl.DataFrame, window: intervals.Window) -> pl.DataFrame:
    """Return the time of each rank in each state within a window of the run's clock (ns); the parts sum to its length.

    Columns rank, device, compute_ns, transfer_ns, waiting_ns, copy_ns, idle_ns, and waiting_for_N_ns for each awaited
    rank; waiting for an unknown rank is in waiting_ns only.
    """
    key, inside = ["rank", "device"], within(rows, window)
    dur_ns, peer = pl.col("dur_ns"), pl.col("peer_rank")
    sums = [dur_ns.filter(pl.col("state") == state).sum().alias(f"{state}_ns") for state in STATES]
    late = inside["peer_rank"].drop_nulls().unique().sort().to_list()
    sums += [dur_ns.filter(peer == rank).sum().alias(f"waiting_for_{rank}_ns") for rank in late]
    table = inside.group_by(key).agg(dur_ns.sum().alias("_all_ns"), *sums).sort(key)
    idle_ns = (window[1] - window[0] - pl.col("_all_ns")).alias("idle_ns")
    names = [*(f"{state}_ns" for state in STATES), "idle_ns", *(f"waiting_for_{rank}_ns" for rank in late)]
    return table.with_columns(idle_ns).select(*key, *names)


@run_fact
def wait_times(run: Run) -> pl.DataFrame:
    """Time that each rank waited for each other rank; use ``run.table``.

    Columns rank, peer_rank (the last arrival; null where unknown), waited_ns: the states of kind waiting, so that
    concurrent collectives count once and hidden waiting does not count. One row per pair that occurs.
    """
    waits = run.table(states).filter(pl.col("state") == WAITING)
    return waits.group_by("rank", "peer_rank").agg(pl.col("dur_ns").sum().alias("waited_ns")).sort("rank", "peer_rank")


@run_fact
def awaited_times(run: Run) -> pl.DataFrame:
    """Time that other ranks wait for each rank in each step; use ``run.table``.

    Columns window, step (of the rank that waits; null outside steps), rank (the last arrival), awaited_ns (the longest
    wait of one other rank), waiting_rank (which rank that is) and all_waits_ns (the sum over ranks); one row per step
    and rank that is waited for. Waiting is that of `states`: each moment of a rank counts once.
    """
    waits = run.table(states).filter(pl.col("state") == WAITING).drop_nulls("peer_rank")
    steps = run.table(breakdown.by_step).select(
        *_OF, "step", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    aligned = alignment.on_run_clock(steps, run.offsets, ("start_ns", "end_ns"))
    # Without a null in the keys: the device of a CPU run is null, and nulls do not match.
    waits, aligned = (rows.with_columns(pl.col("device").fill_null(-1)).sort("start_ns") for rows in (waits, aligned))
    in_steps = waits.join_asof(aligned, on="start_ns", by=list(_OF), check_sortedness=False)
    in_step = pl.when(pl.col("start_ns") < pl.col("end_ns")).then("step").alias("step")
    pairs = in_steps.group_by("window", in_step, "peer_rank", "rank").agg(pl.col("dur_ns").sum())
    longest_first = pairs.sort("dur_ns", "rank", descending=[True, False])
    table = longest_first.group_by("window", "step", "peer_rank", maintain_order=True).agg(
        pl.col("dur_ns").first().alias("awaited_ns"),
        pl.col("rank").first().alias("waiting_rank"),
        pl.col("dur_ns").sum().alias("all_waits_ns"),
    )
    return table.rename({"peer_rank": "rank"}).sort("window", "step", "rank")


@run_fact
def spread(run: Run) -> pl.DataFrame:
    """Exposed communication per step (`exposed_communication.spread`), with the time that others wait for each rank.

    More columns: awaited_ns and waiting_rank of `awaited_times` (0 and null where nobody waits); lost_ns, the longer of
    awaited_ns and of what the other ranks lose to the rank, or to its group (`stragglers.straggler_costs`): where
    compute hides a wait, the following collectives start late instead; and lost_ratio, the share of the median step of
    all ranks.
    """
    key = ["window", "step", "rank"]
    waits = run.table(awaited_times).drop_nulls("step").drop("all_waits_ns")
    costs = run.table(stragglers.straggler_costs).explode("late_ranks")
    costs = costs.select("window", "step", pl.col("late_ranks").alias("rank"), "lost_ns")
    joined = run.table(exposed_communication.spread)
    for columns in (waits, costs):
        joined = joined.join(columns, on=key, how="left", maintain_order="left")
    measured = joined.with_columns(pl.col("awaited_ns", "lost_ns").fill_null(0))
    lost_ns = pl.max_horizontal("awaited_ns", "lost_ns")
    return measured.with_columns(lost_ns.alias("lost_ns"), lost_ratio=lost_ns / pl.col("median_ns"))


def _calls(run: Run) -> pl.DataFrame:
    key = ["window", "instance"]
    last = run.table(collective_instances.instances).select(*key, pl.col("last_rank").alias("peer_rank"))
    waits = run.table(collective_instances.waits).join(last, on=key, how="left")
    peers = waits.select(*_KEY, "peer_rank").unique(_KEY)
    calls = run.table(exposed_communication.exposed_transfers).join(peers, on=_KEY, how="left", maintain_order="left")
    # Without a name: a save is not a collective of the step, and not part of the one before it either.
    saves = run.table(exposed_communication.save_collectives)
    return pl.concat([calls, saves.with_columns(waited_ns=pl.lit(0, pl.Int64))], how="diagonal")


def _pieces(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Spans of all devices by state: columns window, rank, device, state, start_ns, dur_ns.

    Made of arrays: with tables for each of a thousand devices it would take three times as long.
    """
    spans_of, calls_of = (rows.partition_by(_OF, as_dict=True) for rows in (spans, calls))
    pieces = [
        (*place, state, piece)
        for place, device_spans in spans_of.items()
        for state, piece in _device_pieces(device_spans, calls_of.get(place)).items()
    ]
    *columns, edges = zip(*pieces, strict=True) if pieces else ([], [], [], [], [])
    types = {**schema.columns("window rank device"), "state": pl.String}
    places = pl.DataFrame(dict(zip(types, columns, strict=True)), types)
    start_ns, end_ns = np.concatenate([intervals.EMPTY, *edges]).T
    rows = np.repeat(np.arange(len(edges)), list(map(len, edges)))
    return places[rows].with_columns(start_ns=pl.Series(start_ns), dur_ns=pl.Series(end_ns - start_ns))


def _device_pieces(spans: pl.DataFrame, calls: pl.DataFrame | None) -> dict[str, intervals.Spans]:
    """Return the spans of one device by state: its exposed communication is split."""
    spans_of = {part: _of(rows) for (part,), rows in spans.partition_by("part", as_dict=True).items()}
    exposed = spans_of.get(breakdown.EXPOSED_COMMUNICATION, intervals.EMPTY)
    waiting = intervals.EMPTY
    if calls is not None:
        waiting = intervals.subtract(_of(calls), intervals.union(exposed_communication.transfer_spans(calls)))
    return {
        COMPUTE: spans_of.get(breakdown.COMPUTE, intervals.EMPTY),
        TRANSFER: intervals.subtract(exposed, waiting),
        WAITING: intervals.intersect(exposed, waiting),
        COPY: spans_of.get(breakdown.EXPOSED_COPY, intervals.EMPTY),
    }


def _of(rows: pl.DataFrame) -> intervals.Spans:
    return intervals.union(intervals.from_table(rows))
