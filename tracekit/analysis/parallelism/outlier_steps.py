"""Outlier steps: single stalls of the host that other steps do not have, and the time that the job loses to them."""

from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.host import host_stalls
from tracekit.analysis.memory import steady_state
from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync import alignment

STALL_COLUMNS = schema.columns(
    "event window rank step gap_step device cause detail name start_ns dur_ns expected_ns excess_ns run_start_ns "
    "is_first is_last"
)
COLUMNS = {
    **schema.columns("window step gap_step is_first cause detail name is_everyone start_ns stall_ns lost_ns"),
    **schema.columns("step_ns reference_ns window_ns steps is_last"),
    "ranks": pl.List(pl.Int64),
    "events": pl.List(pl.Int64),
}
_DEVICE = ["window", "rank", "device"]
_PLACE = [*_DEVICE, "place", "nth"]
_FEW = 3
"""With as many other steps or fewer, all of them must contradict a stall."""
_ALLOCATOR = (host_stalls.RETRY, host_stalls.ALLOCATION)
_PAUSE_NS = 1_000_000
"""Allocator calls with longer pauses between them belong to different allocations."""
_FREES = 2
_RECURRING_RATIO = 0.5
_ALONE_RATIO = 4.0
"""In a window of one step: how much longer than the step's third longest a stall must be."""
_MIN_STEP_RATIO = 0.02
_SAME_RATIO = 0.5
_EVERYONE_RATIO = 0.75
_TOGETHER_RATIO = 0.75
"""Share of the longer one of two stalls for which both last at the same time."""
_UNCERTAIN_RATIO = 0.05
_SHOWN_RATIO = 0.3
"""Share of a stall by which the step must be longer: otherwise the device had work, or other steps lose as much."""


@run_fact
def outlier_stalls(run: Run) -> pl.DataFrame:
    """Return the stalls of the host that other steps of the same rank do not have; use ``run.table``.

    Columns STALL_COLUMNS: expected_ns (how long the same place, or the longest stall of the same cause, takes in other
    steps), excess_ns, run_start_ns (on the run's clock), is_first (the first step of several), is_last (after the last
    work of the window), event (number of the group of stalls of one cause that overlap in time on several ranks). One
    row per stall. With three other steps or fewer, each of them must contradict the stall; a window of one step is
    compared with its own other stalls. Stalls in saves are left out.
    """
    all_stalls = run.table(host_stalls.host_stalls).filter(pl.col("cause") != host_stalls.SAVE).with_row_index("id")
    # Where steps are marked, saves have rules of their own.
    saving = run.table(save_stages.save_spans).select("window", "step").drop_nulls().unique()
    stalls = all_stalls
    for step in ("step", "gap_step"):
        stalls = stalls.join(
            saving, left_on=["window", step], right_on=["window", "step"], how="anti", maintain_order="left"
        )
    if stalls.is_empty():
        return schema.empty(STALL_COLUMNS)
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0)
    counted = steps.group_by(_DEVICE).agg(
        pl.len().cast(pl.Int64).alias("steps"), pl.col("step").min().alias("first"), pl.col("duration_ns").median()
    )
    joined = stalls.join(counted, on=_DEVICE, nulls_equal=True, maintain_order="left")
    # A step that saves is not judged, but shows which stalls recur at their place without the save.
    at_place = all_stalls.select("id").with_columns(_usual(all_stalls, steps, _PLACE))
    with_usual = (
        joined.with_columns(_usual(joined, steps, [*_DEVICE, "cause"]))
        .join(at_place, on="id", how="left", maintain_order="left")
        .with_columns(_usual_calls(run, joined, steps))
    )
    # What the allocator does may be hidden behind queued work in other steps.
    usual_calls = pl.when(pl.col("cause").is_in(_ALLOCATOR)).then("usual_calls").otherwise(0)
    usual_ns = pl.max_horizontal("usual_cause", usual_calls)
    recurs = pl.when(usual_ns >= _RECURRING_RATIO * pl.col("dur_ns")).then(usual_ns).otherwise(0)
    third_ns = pl.col("dur_ns").sort(descending=True).get(2, null_on_oob=True).over(_DEVICE).fill_null(0)
    alone_ns = pl.when(pl.col("dur_ns") >= _ALONE_RATIO * third_ns).then(0).otherwise("dur_ns")
    expected_ns = pl.when(pl.col("steps") > 1).then(pl.max_horizontal(recurs, "usual_place")).otherwise(alone_ns)
    is_first = (pl.col("steps") > 1) & (pl.col("step") <= pl.col("first"))
    # The next step's batch is loaded at the end of a step, so the last step of a window shows no loading.
    is_judged = (pl.col("cause") != host_stalls.DATA) | (pl.col("steps") > _FEW)
    expected = with_usual.with_columns(
        expected_ns.cast(pl.Int64).alias("expected_ns"), is_first.alias("is_first"), run_start_ns="start_ns"
    )
    at_run = alignment.on_run_clock(expected.filter(is_judged), run.offsets, ("run_start_ns",))
    least_ns = pl.max_horizontal(_MIN_STEP_RATIO * pl.col("duration_ns"), _SAME_RATIO * pl.col("dur_ns"))
    excess_ns = pl.col("dur_ns") - pl.col("expected_ns")
    compared = _with_retries_of_others(at_run, at_run.filter(excess_ns >= least_ns))
    outliers = compared.with_columns(excess_ns.alias("excess_ns")).filter(pl.col("excess_ns") >= least_ns)
    aligned = outliers.sort("window", "cause", "run_start_ns", "rank")
    reach_ns = (pl.col("run_start_ns") + pl.col("dur_ns")).cum_max().shift(1).over("window", "cause")
    starts_event = (pl.col("run_start_ns") > reach_ns).fill_null(value=True)
    events = aligned.with_columns(starts_event.cum_sum().cast(pl.Int64).alias("event"))
    return events.sort("window", "run_start_ns", "rank").pipe(schema.select, STALL_COLUMNS)


def _with_retries_of_others(stalls: pl.DataFrame, outliers: pl.DataFrame) -> pl.DataFrame:
    """Return the stalls, with nothing expected of a rank's retry while another one's is an outlier.

    Ranks that free their caches at once lose as much. In other steps a retry may also wait for other ranks.
    """
    is_retry = pl.col("cause") == host_stalls.RETRY
    columns = ["window", "run_start_ns", "dur_ns"]
    retries = stalls.filter(is_retry).select("id", *columns)
    window, start_ns, dur_ns = (retries[name].to_numpy() for name in columns)
    overlaps = np.zeros(retries.height, bool)
    for of_window, of_start_ns, of_dur_ns in outliers.filter(is_retry).select(columns).iter_rows():
        both_ns = np.minimum(start_ns + dur_ns, of_start_ns + of_dur_ns) - np.maximum(start_ns, of_start_ns)
        overlaps |= (window == of_window) & (both_ns >= _TOGETHER_RATIO * np.maximum(dur_ns, of_dur_ns))
    together = retries["id"].filter(pl.Series(overlaps))
    expected_ns = pl.when(pl.col("id").is_in(together.implode())).then(0).otherwise("expected_ns")
    return stalls.with_columns(expected_ns.cast(pl.Int64).alias("expected_ns"))


@run_fact
def outlier_steps(run: Run) -> pl.DataFrame:
    """Return the steps that take longer because the host of one rank, or of all, stalled once; use ``run.table``.

    Columns COLUMNS: step (null where none is marked), gap_step (in which the device is idle; the work that comes late
    may belong to the next step), is_first (the first of several), cause (of `host_stalls.CAUSES`), detail and name of
    the longest stall, ranks (those that stall; others wait for them), events (the numbers of their stalls in
    `outlier_stalls`), is_everyone (whether all ranks do), stall_ns (how long, beyond what is usual in other steps),
    lost_ns (the job's: at most what the step takes longer than the reference), step_ns and reference_ns (of the step,
    and the median of steps without outliers: the median over ranks), window_ns and steps (of the window), is_last
    (whether the longest stall is after the last work of the window); one row per step, cause and set of ranks.

    In the last step of a window, the length is that of the ranks that stall: the others would wait in the next step.
    """
    events = _events(run)
    if events.is_empty():
        return schema.empty(COLUMNS)
    lengths, of_ranks = step_lengths(run), last_steps(run)
    parts = [
        _with_losses(stalls, lengths.filter(pl.col("window") == window), of_ranks.filter(pl.col("window") == window))
        for (window,), stalls in events.group_by("window", maintain_order=True)
    ]
    return pl.concat(parts).sort("window", "start_ns")


def step_lengths(run: Run) -> pl.DataFrame:
    """Return the median rank's device window of each step. Columns window, step, duration_ns."""
    of_rank = run.table(breakdown.by_step).group_by("window", "rank", "step").agg(pl.col("duration_ns").max())
    return of_rank.group_by("window", "step").agg(pl.col("duration_ns").median().cast(pl.Int64)).sort("window", "step")


def last_steps(run: Run) -> pl.DataFrame:
    """Duration of the last of several steps on each rank, until it ends on the host if nothing runs before.

    Columns window, rank, step, duration_ns.
    """
    key = ["window", "rank", "step"]
    steps = run.table(breakdown.by_step).drop_nulls("step").filter(pl.col("step").n_unique().over("window") > 1)
    last = steps.filter(pl.col("step") == pl.col("step").max().over("window"))
    tails = run.table(host_stalls.host_stalls).filter("is_last").group_by(key).agg(tail_ns=pl.col("dur_ns").max())
    lengths = last.group_by(key).agg(pl.col("duration_ns").max()).join(tails, on=key, how="left")
    return lengths.select(*key, pl.col("duration_ns") + pl.col("tail_ns").fill_null(0))


def _usual(stalls: pl.DataFrame, steps: pl.DataFrame, key: list[str]) -> pl.Series:
    """Length of the longest stall with the same key in other steps, for each stall."""
    longest = stalls.group_by(*key, "gap_step").agg(pl.col("dur_ns").max().alias("_other_ns"))
    of_step = steps.select(*_DEVICE, pl.col("step").alias("_other")).unique()
    pairs = (
        stalls.select("id", *key, "gap_step")
        .join(of_step, on=_DEVICE, nulls_equal=True)
        .filter(pl.col("_other").ne_missing(pl.col("gap_step")))
        .join(longest, left_on=[*key, "_other"], right_on=[*key, "gap_step"], how="left", nulls_equal=True)
    )
    by_stall = pairs.group_by("id").agg(_usual_of(pl.col("_other_ns").fill_null(0)).cast(pl.Int64).alias("usual"))
    name = f"usual_{'cause' if 'cause' in key else 'place'}"
    joined = stalls.select("id").join(by_stall, on="id", how="left", maintain_order="left")
    return joined["usual"].fill_null(0).alias(name)


def _usual_calls(run: Run, stalls: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Length of the longest sequence of allocator calls in other steps, for each stall.

    For an allocation retry it is the longest sequence that frees memory, as a retry does, else the longest other one.
    """
    trace = ["window", "rank"]
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    calls = run.table(steady_state.device_calls).sort(*trace, "start_ns")
    pause_ns = pl.col("start_ns") - end_ns.cum_max().shift(1).over(trace)
    begins = (pause_ns > _PAUSE_NS).fill_null(value=True) | (pl.col("step") != pl.col("step").shift(1)).fill_null(True)
    number = calls.with_columns(begins.cum_sum().alias("sequence"))
    # The first call of a retry also waits for the device.
    sequences = number.group_by(*trace, "step", "sequence").agg(
        (pl.col("dur_ns").median() * pl.len()).cast(pl.Int64).alias("dur_ns"),
        frees=pl.col("name").str.contains("Free").sum() >= _FREES,
    )
    longest = sequences.group_by(*trace, "step").agg(
        pl.col("dur_ns").filter("frees").max().alias("retry_ns"),
        pl.col("dur_ns").filter(~pl.col("frees")).max().alias("filling_ns"),
    )
    of_step = steps.select(*_DEVICE, pl.col("step").alias("_other")).unique()
    pairs = (
        stalls.select("id", *_DEVICE, "step", "cause")
        .join(of_step, on=_DEVICE, nulls_equal=True)
        .filter(pl.col("_other").ne_missing(pl.col("step")))
        .join(longest, left_on=[*trace, "_other"], right_on=[*trace, "step"], how="left", nulls_equal=True)
    )
    taken_ns = pl.when(pl.col("cause") == host_stalls.RETRY).then("retry_ns").otherwise("filling_ns").fill_null(0)
    by_stall = pairs.group_by("id").agg(_usual_of(taken_ns).cast(pl.Int64).alias("usual"))
    joined = stalls.select("id").join(by_stall, on="id", how="left", maintain_order="left")
    return joined["usual"].fill_null(0).alias("usual_calls")


def _usual_of(taken_ns: pl.Expr) -> pl.Expr:
    """Usual time in other steps: what more than half of them have, so that half of all steps may have a stall.

    Rules on the median step judge what more steps have.
    """
    return taken_ns.sort().get(pl.len() // 2)


def _events(run: Run) -> pl.DataFrame:
    """Return the events with their culprits; those of one step, cause and set of ranks are one."""
    stalls = run.table(outlier_stalls)
    ranks_of = run.table(breakdown.by_rank).group_by("window").agg(pl.col("rank").n_unique().alias("ranks_of"))
    by_rank = stalls.sort("excess_ns", descending=True).group_by("window", "event", "rank", maintain_order=True)
    of_ranks = by_rank.agg(
        pl.col("step", "gap_step", "is_first", "is_last", "cause", "detail", "name").first(),
        pl.col("run_start_ns").min().alias("start_ns"), pl.col("excess_ns").sum(),
    )  # fmt: skip
    culprits = of_ranks.filter(pl.col("excess_ns") >= _SAME_RATIO * pl.col("excess_ns").max().over("window", "event"))
    events = (
        culprits.group_by("window", "event", maintain_order=True)
        .agg(
            pl.col("step", "gap_step", "is_first", "is_last", "cause", "detail", "name").first(),
            pl.col("start_ns").min(), pl.col("excess_ns").median().cast(pl.Int64).alias("stall_ns"),
            pl.col("rank").unique().sort().alias("ranks"),
        )
        .join(ranks_of, on="window", how="left", maintain_order="left")
        .with_columns(
            is_everyone=(pl.col("ranks").list.len() >= _EVERYONE_RATIO * pl.col("ranks_of")) & (pl.col("ranks_of") > 1)
        )
    )  # fmt: skip
    largest = events.sort("stall_ns", descending=True)
    key = [
        "window",
        "gap_step",
        "cause",
        "is_everyone",
        pl.when("is_everyone").then(None).otherwise("ranks").alias("_of"),
    ]
    return largest.group_by(key, maintain_order=True).agg(
        pl.col("step", "is_first", "is_last", "detail", "name", "ranks").first(),
        pl.col("event").alias("events"), pl.col("start_ns").min(), pl.col("stall_ns").sum(),
    ).drop("_of")  # fmt: skip


def _with_last_step(length_of: dict[int | None, int], events: pl.DataFrame, of_ranks: pl.DataFrame) -> None:
    """Set the length of the last step to that of the ranks that stall in it, if it is longer on these."""
    for event in events.iter_rows(named=True):
        in_step = pl.col("step").is_in([event["step"], event["gap_step"]]) & pl.col("rank").is_in(event["ranks"])
        medians = of_ranks.filter(in_step).group_by("step").agg(pl.col("duration_ns").median())
        for step, length_ns in medians.iter_rows():
            length_of[step] = max(length_of.get(step, 0), int(length_ns))


def _with_losses(events: pl.DataFrame, lengths: pl.DataFrame, of_ranks: pl.DataFrame) -> pl.DataFrame:
    """Return the events of one window with what the job loses to each.

    What a step takes longer than the reference is shared out among its events, the longest stall first. A stall costs
    at most that, and the spread of the other steps in addition if the step shows it.
    """
    length_of: dict[int | None, int] = dict(lengths.select("step", "duration_ns").iter_rows())
    _with_last_step(length_of, events, of_ranks)
    reference_ns, spread_ns = _reference({*events["step"].to_list(), *events["gap_step"].to_list()}, length_of)
    longer_ns = {step: max(0, ns - reference_ns) if len(length_of) > 1 else ns for step, ns in length_of.items()}
    window = {
        "window_ns": sum(length_of.values()),
        "steps": len(length_of),
        "reference_ns": reference_ns if len(length_of) > 1 else None,
    }
    rows = []
    for event in events.sort("stall_ns", descending=True).iter_rows(named=True):
        places = _places(event, length_of)
        shown_ns = sum(longer_ns.get(step, 0) for step in places)
        lost_ns = min(event["stall_ns"], shown_ns + (spread_ns if shown_ns >= _SHOWN_RATIO * event["stall_ns"] else 0))
        left_ns = lost_ns
        for step in places:
            part_ns = min(left_ns, longer_ns.get(step, 0))
            longer_ns[step], left_ns = longer_ns.get(step, 0) - part_ns, left_ns - part_ns
        rows.append({**event, **window, "lost_ns": lost_ns, "step_ns": length_of.get(event["step"])})
    return pl.DataFrame(rows, schema=COLUMNS)


def _places(event: dict[str, Any], length_of: dict[int | None, int]) -> list[int | None]:
    """Return the steps that a stall makes longer: its own, and the next one, in which the other ranks wait."""
    steps: list[int | None] = [event["step"], event["gap_step"]]
    if not event["is_everyone"] and event["gap_step"] is not None:
        steps += sorted(step for step in length_of if step is not None and step > event["gap_step"])[:1]
    return list(dict.fromkeys(steps))


def _reference(stalled: set[int | None], length_of: dict[int | None, int]) -> tuple[int, int]:
    """Return the median of the steps without outliers, and their spread; the first step counts if there is no other.

    It is at most the median of all steps: a stall makes no step shorter, so where many steps have small ones, those
    without may be few and long for other reasons.
    """
    first = min((step for step in length_of if step is not None), default=None)
    of_all_ns = sorted(length_of.values())[(len(length_of) - 1) // 2] if length_of else 0
    for left_out in ({*stalled, first}, stalled):
        clean = [ns for step, ns in length_of.items() if step not in left_out]
        if clean:
            median_ns = min(sorted(clean)[(len(clean) - 1) // 2], of_all_ns)
            spread_ns = max(abs(ns - median_ns) for ns in clean)
            return median_ns, spread_ns if len(clean) > 1 else int(_UNCERTAIN_RATIO * median_ns)
    shortest_ns = min(length_of.values(), default=0)
    return shortest_ns, int(_UNCERTAIN_RATIO * shortest_ns)
