"""Potential savings: the time saved without a cause, which rules report as the cost of their findings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.replay.graph import (
    causes,
    contention_update,
    dependency_graph,
    representative_ranks,
    slow_ranks,
    steps,
)
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError, Replay
from tracekit.replay.graph.transforms import (
    BEFORE_WINDOW,
    CONTENTION_TRANSFORMS,
    TRANSFORMS,
    HostSpan,
    in_order,
    on_ranks,
    outside_stalls,
    without_excess,
    without_stalls,
)

STEP_COLUMNS = schema.columns("window rank step device duration_ns replayed_ns without_ns saved_ns")
BY_RANK_COLUMNS = schema.columns("cause rank duration_ns replayed_ns without_ns saved_ns")
AND = " and "
"""Joins the names of causes that are removed together."""
MAX_ERROR_RATIO = 0.05
"""The largest relative error of the unchanged replay at which it may price findings."""
MIN_BEFORE_RATIO = 0.01
"""The least part of a step, saved before the first device work of its window, that texts state."""


@dataclass(frozen=True, eq=False)
class Saving:
    """The steps of a run replayed without one cause.

    `saved_ns` is per step: the mean over steps on the slowest rank; `saved_ratio` its share of the recorded step,
    `step_ns` that step. `confidence` is from 0 to 1. `steps` has columns window, rank, step, device, duration_ns
    (recorded), replayed_ns (replay without changes), without_ns (replay without the cause) and saved_ns (their
    difference); one row per window, rank, step and device. `before_steps_ns` is the part of `saved_ns` before the first
    device work of the window: the first step begins so much earlier here than elsewhere. Without an answer all are 0,
    `steps` is empty, and `unavailable_reason` says why. `caveat` says what limits the answer.
    """

    cause: str
    saved_ns: int
    saved_ratio: float
    step_ns: int
    confidence: float
    steps: pl.DataFrame
    unavailable_reason: str = ""
    caveat: str = ""
    before_steps_ns: int = 0


@dataclass(frozen=True)
class Removal:
    """A cause to remove from a replay: on these ranks; without ranks, on all. The host time in `stalls` stays.

    Of a cause of `causes.OF_FINDINGS`, `stalls` are what is removed.

    Of `straggler` the ranks are those that nobody shall wait for: without ranks, those that the others wait for most.
    """

    cause: str
    ranks: tuple[int, ...] = ()
    stalls: tuple[HostSpan, ...] = ()

    def union(self, other: "Removal | None") -> "Removal":
        """Return the removal of a cause on the ranks of both; the stalls that stay are those of both."""
        if other is None:
            return self
        stalls = tuple(stall for stall in self.stalls if stall in other.stalls)
        ranks = tuple(sorted({*self.ranks, *other.ranks})) if self.ranks and other.ranks else ()
        return Removal(self.cause, ranks, stalls)


def saving(run: Run, cause: str) -> Saving:
    """Return the potential saving of a run without a cause, from a replay of its dependency graph.

    `cause` is a name in `tracekit.replay.graph.causes.CAUSES`, which lists each with its rule. The graph of a run is
    built once and cached with the run; a replay takes some hundredths of a second. Raises InputError for any other
    name.
    """
    return combined_saving(run, (cause,))


def combined_saving(run: Run, names: Iterable[str]) -> Saving:
    """Return the potential saving without several causes at once. Raises InputError for an unknown name.

    Where one of them has no answer, neither have all together.
    """
    return saving_of(run, (Removal(name) for name in names))


def saving_of(run: Run, removals: Iterable[Removal]) -> Saving:
    """Return the potential saving without several causes at once, each on all ranks or on some of them.

    Raises InputError for an unknown name. Where one of the causes has no answer, neither have all together.
    """
    by_name: dict[str, Removal] = {}
    for removal in removals:
        name = causes.find(removal.cause).name
        by_name[name] = replace(removal, cause=name).union(by_name.get(name))
    combined = tuple(by_name[name] for name in in_order(by_name))
    cache = _SAVINGS.setdefault(run, {})
    if combined not in cache:
        cache[combined] = _saving(run, combined)
    return cache[combined]


def stall_saving(run: Run, stalls: Removal) -> Saving:
    """Return the potential saving without the single stalls of hosts or collectives of one finding."""
    return _saving(run, (stalls,))


@memoize
def replayed_steps(run: Run) -> pl.DataFrame:
    """Return the recorded steps of a run and their replay without changes: columns of `steps.COLUMNS`."""
    tables = [steps.durations(graph, graph.replayed) for graph in graphs_of(run)]
    return pl.concat([pl.DataFrame(schema=steps.COLUMNS), *tables])


@memoize
def graphs_of(run: Run) -> list[Graph]:
    """Return the graphs of a run, one per window, built once: of all its ranks, or of representative ones of many."""
    return dependency_graph.graphs(representative_ranks.run_of(run))


def by_rank(savings: Iterable[Saving]) -> pl.DataFrame:
    """Return the step time of each rank without each cause: columns cause, and those of `steps.by_rank`.

    One row per saving and rank; none for a saving without an answer.
    """
    tables = [
        steps.by_rank(saving.steps).select(pl.lit(saving.cause, pl.String).alias("cause"), pl.all())
        for saving in savings
    ]
    return pl.concat(tables) if tables else pl.DataFrame(schema=BY_RANK_COLUMNS)


def waiting_ns(run: Run, removals: Iterable[Removal] = ()) -> int:
    """Time that all ranks wait for others in collectives, in a replay without some causes, in ns."""
    total_ns, together = 0, tuple(removals)
    for graph in graphs_of(run):
        played = _without(graph, together)[1] if together else graph.replayed
        parts = np.flatnonzero(graph.join_of >= 0)
        total_ns += int((played.start_ns[graph.join_of[parts]] - played.start_ns[parts]).sum())
    return total_ns


@memoize
def host_time(run: Run, cause: str) -> pl.DataFrame:
    """Host time of each rank that a cause takes: columns rank, removed_ns; one row per rank.

    That is the time of its nodes and between them that the replay removes, without waits.
    """
    parts = []
    for graph in graphs_of(run):
        changed = TRANSFORMS[cause](graph)
        before_ns = np.maximum(graph.chain_ns - changed.chain_ns, graph.launch_ns - changed.launch_ns)
        removed_ns = graph.own_ns - changed.own_ns + before_ns
        parts.append(graph.frame.select("rank", pl.Series("removed_ns", removed_ns[: graph.count], pl.Int64)))
    return pl.concat(parts).group_by("rank").agg(pl.col("removed_ns").sum()).sort("rank")


def infers_waits(run: Run) -> bool:
    """Return whether event waits of streams are inferred, because the traces do not record them."""
    return any(bool((graph.edges.inferred & (graph.edges.kind == _EVENT)).any()) for graph in graphs_of(run))


_SAVINGS: WeakKeyDictionary[Run, dict[tuple[Removal, ...], Saving]] = WeakKeyDictionary()
_EVENT = "event"
_STRAGGLER, _CHECKPOINT = "straggler", "checkpoint"
_INFERRED = 0.8
_GUESSED = 0.5
_UNSEEN = "preparation would overlap compute, which this recording never shows: the saving is smaller if that slows it"
_KEY = ["window", "rank", "step", "device"]


def _saving(run: Run, removals: tuple[Removal, ...]) -> Saving:
    names = tuple(removal.cause for removal in removals)
    cause = AND.join(names)
    before = replayed_steps(run)
    if before.is_empty():
        return _unknown(cause, "no step of the run has work that can be replayed")
    try:
        played = [(graph, *_without(graph, removals)) for graph in graphs_of(run)]
    except InsufficientDataError as error:
        return _unknown(cause, str(error))
    without = pl.concat(
        [_durations(graph, changed, then, from_before=BEFORE_WINDOW in names) for graph, changed, then in played]
    )
    table = (
        before.join(without, on=_KEY, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col("duration_ns", "replayed_ns") + pl.col("before_ns"))
        .with_columns((pl.col("replayed_ns") - pl.col("without_ns")).alias("saved_ns"))
    )
    for late in (removal for removal in removals if removal.cause == _STRAGGLER):
        for graph in graphs_of(run):
            table = slow_ranks.with_late_ranks(table, late.ranks or graph.late_ranks)
    per = table.select("window", "step").n_unique()
    recorded_ns, replayed_ns = (steps.total_ns(table, name) for name in ("duration_ns", "replayed_ns"))
    saved_ns = _of_recorded(replayed_ns - steps.total_ns(table, "without_ns"), recorded_ns, replayed_ns) // per
    before_steps_ns = (replayed_ns - steps.total_ns(before, "replayed_ns")) // per
    step_ns = recorded_ns // per
    unseen = any(contention_update.extrapolates(graph, then) for graph, _, then in played)
    confidence = min(causes.find(name).confidence for name in names)
    sure = confidence * _confidence(run, table) * (_GUESSED if unseen else 1.0)
    ratio = saved_ns / step_ns if step_ns else 0.0
    notes = [_UNSEEN if unseen else "", _rare_saves(run, table) if _CHECKPOINT in names and saved_ns else ""]
    note = "; ".join(text for text in notes if text)
    by_step = table.select(*STEP_COLUMNS)
    return Saving(
        cause, saved_ns, ratio, step_ns, round(sure, 2), by_step, caveat=note, before_steps_ns=before_steps_ns
    )


def _of_recorded(saved_ns: int, recorded_ns: int, replayed_ns: int) -> int:
    """Cost of a cause in recorded time: what a replay adds to the recording cannot be saved.

    >>> _of_recorded(90, recorded_ns=50, replayed_ns=100), _of_recorded(20, recorded_ns=100, replayed_ns=101)
    (45, 20)
    """
    adds = replayed_ns > (1 + MAX_ERROR_RATIO) * recorded_ns
    return round(saved_ns * recorded_ns / replayed_ns) if adds else saved_ns


def _durations(graph: Graph, changed: Graph, then: Replay, *, from_before: bool) -> pl.DataFrame:
    """Return the steps of a changed replay: columns window, rank, step, device, without_ns, before_ns.

    `before_ns` is how much sooner the first step begins than in the unchanged replay; 0 unless `from_before`.
    """
    changed_steps = steps.durations(changed, then)
    from_unchanged = steps.durations(changed, then, unchanged=graph.replayed) if from_before else changed_steps
    return changed_steps.select(
        *_KEY,
        pl.col("replayed_ns").alias("without_ns"),
        (pl.col("replayed_ns") - from_unchanged["replayed_ns"]).alias("before_ns"),
    )


def _rare_saves(run: Run, table: pl.DataFrame) -> str:
    """Return why saves cost less over all steps than in a window shorter than their interval; "" in a longer one."""
    interval = run.table(saves.by_save)["interval_steps"].max()
    count = table.group_by("window").agg(pl.col("step").n_unique())["step"].max()
    if not isinstance(interval, float) or not isinstance(count, int) or count >= interval:
        return ""
    return f"the run saves every {interval:.0f} steps, and a window has {count}; CKPT001 has the cost over all steps"


def _confidence(run: Run, table: pl.DataFrame) -> float:
    """Return the confidence in the replay: lower where waits are inferred, and where it differs from the recording."""
    off = abs(steps.total_ns(table, "replayed_ns") / max(1, steps.total_ns(table, "duration_ns")) - 1)
    return max(0.1, 1 - 2 * off) * (_INFERRED if infers_waits(run) else 1.0)


def _without(graph: Graph, removals: tuple[Removal, ...]) -> tuple[Graph, Replay]:
    names = tuple(removal.cause for removal in removals)
    changed = graph
    for removal in removals:
        try:
            changed = _remove_cause(changed, removal)
        except InsufficientDataError as error:
            raise InsufficientDataError(f"{removal.cause}: {error}" if len(names) > 1 else str(error)) from error
    if CONTENTION_TRANSFORMS.issuperset(names):
        return changed, changed.replayed
    crawling = not {"preparation", "give-way"} & set(names)
    return contention_update.apply_contention(
        graph, changed, slow_preparation=crawling, slow_compute="slowed-compute" not in names
    )


def _remove_cause(graph: Graph, removal: Removal) -> Graph:
    if removal.cause == causes.SINGLE_STALL.name:
        return without_stalls(graph, removal.stalls)
    if removal.cause == causes.STALLED_COLLECTIVE.name:
        return without_excess(graph, removal.stalls)
    transform = TRANSFORMS[removal.cause]
    if removal.ranks and removal.cause == _STRAGGLER:
        graph = replace(graph, late_ranks=removal.ranks)
    elif removal.ranks:
        transform = partial(on_ranks, ranks=removal.ranks, transform=transform)
    return outside_stalls(graph, removal.stalls, transform) if removal.stalls else transform(graph)


def _unknown(cause: str, why_not: str) -> Saving:
    return Saving(cause, 0, 0.0, 0, 0.0, pl.DataFrame(schema=STEP_COLUMNS), why_not)
