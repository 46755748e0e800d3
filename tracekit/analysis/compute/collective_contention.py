"""Slowdown of collectives by concurrent compute, from bus bandwidth at the same size; totals of all contention."""

import numpy as np
import polars as pl

from tracekit.analysis.communication import collective_instances, communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes, contention
from tracekit.analysis.compute.contention import COMMUNICATION, COMPUTE, KINDS, PREPARATION
from tracekit.analysis.time import launched_work
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

CALL_COLUMNS = schema.columns(
    "activity_id device lane step phase unit name op group group_size dtype bytes start_ns dur_ns compute_ns "
    "others chain waited_ns"
)
_MIXED = -1

PHASE_COLUMNS = schema.columns("rank phase kind concurrent_kind calls overlapped_ns judged_ns lost_ns")
COSTLY_COLUMNS = schema.columns(
    "kind concurrent_kind lost_ns dur_ns alone_ns name unit phase step window rank start_ns"
)
MAX_CALLS = 100


@trace_fact
def calls(trace: Trace) -> pl.DataFrame:
    """Collectives on devices with their concurrent work, and how long compute waited for each.

    Columns CALL_COLUMNS: bytes (the larger of sent and received), compute_ns (overlapped by compute), others (other
    kinds that overlapped it most of the time, as bits of `contention.KINDS`; -1 where one did in part), chain (number
    of the last communication gap before it, not counting preparation and gaps up to 20 µs; -1 before the first),
    waited_ns (how long compute was idle because of it). One row per collective; empty on a CPU run.
    """
    waits = (
        compute_gap_causes.compute_gap_causes(trace)
        .filter(pl.col("cause") == communication_gap_causes.COLLECTIVE)
        .group_by("collective_id")
        .agg(pl.col("dur_ns").sum().alias("waited_ns"))
    )
    # A delay propagates to the next collective through preparation on its lane.
    idle_ns = pl.col("dur_ns") - pl.col("preparation_ns") - pl.col("contention_ns")
    long_gaps = compute_gap_causes.chains(trace).filter(idle_ns > communication_gap_causes.NEAR_NS)
    parts = [schema.empty(CALL_COLUMNS)]
    for device in contention.device_work(trace):
        rows = np.flatnonzero(device.kind == KINDS.index(COMMUNICATION))
        quiet = long_gaps.filter(pl.col("device") == device.device)["start_ns"].sort().to_numpy()
        starts = device.spans[rows, 0]
        messages = launched_work.collectives(trace, device.device)
        parts.append(
            messages.rename({"id": "activity_id", "message_bytes": "bytes"})
            .join(waits, left_on="activity_id", right_on="collective_id", how="left", maintain_order="left")
            .with_columns(
                pl.Series("compute_ns", device.concurrent_ns[rows, KINDS.index(COMPUTE)]),
                pl.Series("others", _others(device, rows)),
                pl.Series("chain", np.searchsorted(quiet, starts, side="right") - 1),
                pl.col("waited_ns").fill_null(0),
            )
            .pipe(schema.select, CALL_COLUMNS)
        )
    return pl.concat(parts)


COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, "instance": pl.Int64, **CALL_COLUMNS, "transfer_ns": pl.Int64,
    "whole": pl.Boolean, "alone_ns": pl.Int64, "excess_ns": pl.Int64, "judged": pl.Boolean, "alone": pl.Boolean,
    "concurrent": pl.Boolean,
}  # fmt: skip


@run_fact
def compared_calls(run: Run) -> pl.DataFrame:
    """Compare the collectives of all ranks with the same collectives without concurrent compute.

    Use ``run.table``. Columns window, rank, instance (below 0 where no other rank is known to share it), CALL_COLUMNS',
    transfer_ns (from the last known arrival: its duration on that rank), whole (every rank of the group has a trace),
    alone_ns (the median transfer of the same op, group, dtype and size without concurrent compute, in the same step if
    there is one; with the same other kinds overlapping if there are such, else any), excess_ns, judged (whether there
    is such a sample), alone, concurrent. The rank that arrived last defines the concurrent work. One row per call.
    """
    call_key, key = ["window", "rank", "activity_id"], ["window", "instance"]
    instances = run.table(collective_instances.waits).select(*call_key, "instance").unique(call_key)
    rank_calls = run.table(calls).join(instances, on=call_key, how="left", maintain_order="left")
    if rank_calls.is_empty():
        return schema.empty(COLUMNS)
    # A call known on one rank only is its own instance.
    own_instance = -1 - pl.int_range(pl.len()).cast(pl.Int64)
    is_whole = (pl.len().over(key) >= pl.col("group_size")).fill_null(value=False)
    transfers = rank_calls.with_columns(pl.coalesce("instance", own_instance).alias("instance"))
    transfers = transfers.with_columns(is_whole.alias("whole"))
    last_calls = transfers.sort("dur_ns", maintain_order=True).unique(key, keep="first", maintain_order=True)
    facts = _compare_instances(last_calls).rename({"dur_ns": "transfer_ns"})
    joined = transfers.drop("compute_ns").join(facts, on=key, how="left", maintain_order="left")
    return schema.select(joined, COLUMNS)


def _compare_instances(calls: pl.DataFrame) -> pl.DataFrame:
    """Compare each instance, as the last-arriving rank recorded it, with the same collective alone."""
    dur, by, other_kinds = (calls[name].to_numpy() for name in ("dur_ns", "compute_ns", "others"))
    sized = calls["bytes"].is_not_null().to_numpy()
    quiet = sized & (by <= contention.ALONE_RATIO * dur)
    concurrent = sized & (other_kinds != _MIXED) & (by >= contention.CONCURRENT_RATIO * dur)
    solo, step = quiet & (other_kinds != _MIXED), calls["step"].fill_null(-1).to_numpy()
    exact = contention.compare_with_alone(
        _same(calls, *_MESSAGE, "others"), step, dur, solo=solo, concurrent=concurrent
    )
    # A concurrent collective can only have slowed the sample, so the excess is a lower bound.
    lower_bound = contention.compare_with_alone(_same(calls, *_MESSAGE), step, dur, solo=quiet, concurrent=concurrent)
    is_judged = exact.is_judged & sized & (other_kinds != _MIXED) & ~solo
    rest = lower_bound.is_judged & sized & (other_kinds == 0) & ~quiet & ~is_judged
    return calls.select(
        "window", "instance", "dur_ns", "compute_ns",
        pl.Series("alone_ns", np.where(rest, lower_bound.alone_ns, exact.alone_ns).round()),
        pl.Series("excess_ns", np.where(is_judged, exact.excess_ns, np.where(rest, lower_bound.excess_ns, 0)).round()),
        pl.Series("judged", is_judged | rest),
        pl.Series("alone", solo),
        pl.Series("concurrent", concurrent),
    )  # fmt: skip


_MESSAGE = ("op", "group", "group_size", "dtype", "bytes")


def _same(calls: pl.DataFrame, *names: str) -> Ints:
    return calls.select(pl.struct(names).rank("dense")).to_series().to_numpy().astype(np.int64)


@run_fact
def by_step(run: Run) -> pl.DataFrame:
    """Return `contention.by_step` for collectives with concurrent compute, and the compute that waited.

    Use ``run.table``. Columns window, rank, `contention.STEP_COLUMNS`', inferred_ns (the estimated loss of overlapped
    time without a solo sample, at the slowdown of the rest of the rank), waited_ns (the part of both losses that
    delayed compute, within each chain of collectives without a gap: a loss can only delay later compute).
    """
    calls = run.table(compared_calls)
    is_judged = pl.col("judged")
    sums = calls.group_by("rank").agg(
        pl.col("compute_ns").filter(is_judged).sum().alias("together_ns"),
        pl.col("excess_ns").filter(is_judged).sum().alias("more_ns"),
    )
    share = (pl.col("more_ns") / pl.max_horizontal("together_ns", 1)).clip(0, 1)
    inferred = pl.when(is_judged).then(0.0).otherwise(pl.col("compute_ns") * pl.col("lost_share"))
    compared = (
        calls.join(
            sums.select("rank", share.alias("lost_share")), on="rank", how="left", maintain_order="left"
        ).with_columns(inferred.alias("inferred_ns"))
    ).sort("window", "rank", "start_ns")
    place, chain = ["window", "rank", "device", "step", "phase", "unit"], ["window", "rank", "device", "chain"]
    lost = (pl.col("excess_ns") + pl.col("inferred_ns")).clip(0)
    bound = pl.col("so_far_ns") + pl.col("later_ns")
    columns = {"window": pl.Int64, "rank": pl.Int64, **contention.STEP_COLUMNS, "inferred_ns": pl.Int64}
    return (
        compared.with_columns(
            lost.cum_sum().over(chain).alias("so_far_ns"),
            pl.col("waited_ns").sum().over(chain).alias("whole_ns"),
            (pl.col("waited_ns").sum().over(chain) - pl.col("waited_ns").cum_sum().over(chain)).alias("later_ns"),
        )
        # Savings up to a collective are at most the loss so far, and at most the loss before it plus its wait.
        .with_columns(pl.min_horizontal(bound.min().over(chain), "whole_ns").alias("saved_ns"))
        .with_columns((pl.col("saved_ns") * lost / pl.max_horizontal(lost.sum().over(chain), 1)).alias("waited_ns"))
        .filter(pl.col("compute_ns") > 0)
        .group_by(place, maintain_order=True)
        .agg(
            pl.len().alias("calls"),
            pl.col("compute_ns").sum().alias("overlapped_ns"),
            pl.col("judged").sum().alias("judged_calls"),
            pl.col("compute_ns").filter("judged").sum().alias("judged_ns"),
            pl.col("excess_ns").filter("judged").sum().alias("lost_ns"),
            pl.col("inferred_ns", "waited_ns").sum().round(),
        )
        .with_columns(pl.lit(COMMUNICATION).alias("kind"), pl.lit(COMPUTE).alias("concurrent_kind"))
        .pipe(schema.select, {**columns, "waited_ns": pl.Int64})
    )


@run_fact
def all_pairs(run: Run) -> pl.DataFrame:
    """Return `contention.pairs` including collectives with concurrent compute; use ``run.table``."""
    rank_pairs = pl.concat([run.table(contention.pairs), contention.pool_pairs(run.table(by_step))])
    return rank_pairs.sort("rank", "device", "kind", "concurrent_kind")


@run_fact
def bandwidths(run: Run) -> pl.DataFrame:
    """Bus bandwidth of collectives by kind and size, alone and with concurrent compute.

    Use ``run.table``. Columns op, group, group_size, dtype, bytes, alone_calls, concurrent_calls, alone_ns,
    concurrent_ns (median transfers), alone_bus_bytes_per_s, concurrent_bus_bytes_per_s (as nccl-tests counts it; null
    for unknown ops), whole. One row per kind and size, the one with most time first.
    """
    instances = run.table(compared_calls).unique(["window", "instance"])
    transfer = pl.col("transfer_ns")
    sums = instances.group_by("op", "group", "group_size", "dtype", "bytes", maintain_order=True).agg(
        pl.col("alone").sum().cast(pl.Int64).alias("alone_calls"),
        pl.col("concurrent").sum().cast(pl.Int64).alias("concurrent_calls"),
        transfer.filter("alone").median().alias("alone_ns"),
        transfer.filter("concurrent").median().alias("concurrent_ns"),
        transfer.sum().alias("total_ns"),
        pl.col("whole").all(),
    )
    factor = collective_instances.bus_factor()
    moved = pl.col("bytes") * factor * collective_instances.SECOND_NS
    speed = [
        pl.when(pl.col(f"{n}_ns") > 0).then(moved / pl.col(f"{n}_ns")).alias(f"{n}_bus_bytes_per_s") for n in _CASES
    ]
    return sums.with_columns(speed).sort("total_ns", descending=True).drop("total_ns")


@run_fact
def contention_by_phase(run: Run) -> pl.DataFrame:
    """Time in which each kind of work of a rank overlapped another in each phase, and the loss.

    Columns PHASE_COLUMNS, as `contention.by_step`, including collectives with concurrent compute; summed over steps,
    units, devices and windows. Use ``run.table``.
    """
    key = ["rank", "phase", "kind", "concurrent_kind"]
    both = pl.concat(
        part.select(*key, "calls", "overlapped_ns", "judged_ns", "lost_ns")
        for part in (run.table(contention.by_step), run.table(by_step))
    )
    summed = both.group_by(key).agg(pl.col("calls", "overlapped_ns", "judged_ns", "lost_ns").sum())
    return schema.select(summed, PHASE_COLUMNS).sort(key)


@run_fact
def costliest_calls(run: Run) -> pl.DataFrame:
    """Calls with the largest loss to concurrent work, at most MAX_CALLS; use ``run.table``.

    Columns COSTLY_COLUMNS: kind and concurrent_kind (of `contention.KINDS`), lost_ns (duration less alone_ns, the solo
    duration of the same work), start_ns (on the clock of the rank's trace). Of each compute kernel only the costliest
    call counts; each preparation kernel counts; each collective counts once, on the rank that waited least.
    """
    prepared = run.table(contention.preparation).drop_nulls("alone_ns")
    prepared = prepared.filter(pl.col("overlapped_ns") * 2 > pl.col("dur_ns")).with_columns(
        kind=pl.lit(PREPARATION), concurrent_kind=pl.lit(COMPUTE)
    )
    kernels = run.scan(contention.by_kernel).filter(pl.col("kind") == COMPUTE).collect()
    calls = (
        run.table(compared_calls)
        .filter("judged")
        .sort("dur_ns", "rank")
        .unique(["window", "instance"], keep="first", maintain_order=True)
        .with_columns(kind=pl.lit(COMMUNICATION), concurrent_kind=pl.lit(COMPUTE), lost_ns=pl.col("excess_ns"))
    )
    lost_ns = pl.col("dur_ns") - pl.col("alone_ns")
    parts = (prepared.with_columns(lost_ns=lost_ns), kernels.with_columns(lost_ns=lost_ns), calls)
    return (
        pl.concat(schema.conform(part, COSTLY_COLUMNS) for part in parts)
        .filter(pl.col("lost_ns") > 0)
        .sort("lost_ns", "start_ns", descending=[True, False])
        .head(MAX_CALLS)
    )


_CASES = ("alone", "concurrent")


def _others(device: contention.DeviceWork, rows: Ints) -> Ints:
    bits = np.zeros(len(rows), np.int64)
    dur_ns = device.dur_ns[rows]
    for kind in range(len(KINDS)):
        if kind == KINDS.index(COMPUTE):
            continue
        near = device.concurrent_ns[rows, kind]
        bits = np.where(
            (near > contention.ALONE_RATIO * dur_ns) & (near < contention.CONCURRENT_RATIO * dur_ns), _MIXED, bits
        )
        bits = np.where((bits != _MIXED) & (near >= contention.CONCURRENT_RATIO * dur_ns), bits | (1 << kind), bits)
    return bits
