"""Potential savings: the time saved without a cause, which rules report as the cost of their findings."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph import causes, dependency_graph, representative_ranks
from tracekit.replay.graph.causes import contention, device_time
from tracekit.replay.graph.causes.cause import Cause, Contention, Pricing
from tracekit.replay.graph.causes.host import CHECKPOINT
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError, Replay
from tracekit.replay.graph.nodes import NodeTable

REPLAY_COLUMNS = schema.columns("window rank step device duration_ns replayed_ns")

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


def step_durations(graph: Graph, played: Replay, *, unchanged: Replay | None = None) -> pl.DataFrame:
    """Return each step's recorded and replayed device window: from its first node's start to the next step's.

    Columns window, rank, step, device, duration_ns, replayed_ns; one row per rank, step and device. The last step ends
    with its last activity, or its mark (STEP_END). The first begins as in the `unchanged` replay, if given: what
    happens sooner after the recording began saves time too.
    """
    steps = _steps(graph)
    return steps.frame.hstack([steps.replayed_ns(graph.done, played, unchanged=unchanged)])


@dataclass(frozen=True, eq=False)
class _Steps:
    """Steps of a graph by rank and device, in order of time, and the nodes that begin and end them.

    `frame` has columns window, rank, step, device, duration_ns. By row: the `first_node` of the step, whether the step
    `is_first` of its rank and device, whether another one follows, and the number of its work in `number`, or -1.
    """

    frame: pl.DataFrame
    first_node: Ints
    is_first: Flags
    is_followed: Flags
    work_number: Ints
    work: Ints
    number: Ints

    def replayed_ns(self, done: Ints, played: Replay, *, unchanged: Replay | None = None) -> pl.Series:
        """Duration of each step in a replay, in ns; null where the step is the last one and has no work."""
        begin_ns = played.start_ns[self.first_node]
        if unchanged is not None:
            begin_ns = np.where(self.is_first, unchanged.start_ns[self.first_node], begin_ns)
        end_ns = np.where(self.is_followed, np.roll(begin_ns, -1), self._work_end_ns(done, played))
        replayed_ns = pl.Series("replayed_ns", end_ns - begin_ns, pl.Int64)
        has_no_end = ~self.is_followed & (self.work_number < 0)
        return replayed_ns.set(pl.Series(has_no_end), None) if has_no_end.any() else replayed_ns

    def usual_lost_before_ns(self, done: Ints, changed: Replay, graph: Graph) -> pl.Series:
        """What `changed` saves between the work of two steps, the median of a rank and device; 0 where none follow."""
        pauses_ns = []
        for played, played_done in ((graph.replay, graph.done), (changed, done)):
            pause_ns = played.start_ns[self.first_node] - np.roll(self._work_end_ns(played_done, played), 1)
            pauses_ns.append(np.maximum(pause_ns, 0))
        is_between = ~self.is_first & (np.roll(self.work_number, 1) >= 0)
        lost_ns = pl.Series("lost_ns", np.maximum(pauses_ns[0] - pauses_ns[1], 0), pl.Int64)
        rows = self.frame.select("rank", "device", lost_ns.set(pl.Series(~is_between), None))
        usual_ns = pl.col("lost_ns").quantile(0.5, "lower").over("rank", "device")
        return rows.select(usual_ns.fill_null(0).cast(pl.Int64)).to_series()

    def _work_end_ns(self, done: Ints, played: Replay) -> Ints:
        """End of the work of each step; the smallest integer for steps without work."""
        # One place more, for steps without work.
        end_ns = np.full(self.number.max(initial=-1) + 2, np.iinfo(np.int64).min)
        np.maximum.at(end_ns, self.number, played.end_ns[done[self.work]])
        return end_ns[self.work_number]


@memoize
def _steps(graph: Graph) -> _Steps:
    place = ["rank", "device"]
    windows = graph.windows.sort(*place, "start_ns")
    work, number, places = _places_of_work(graph.frame)
    rows = windows.select(
        "step",
        *place,
        "first",
        window=pl.lit(graph.window, pl.Int64),
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
        is_first=pl.col("start_ns") == pl.col("start_ns").min().over(place),
        is_followed=pl.col("start_ns").shift(-1).over(place).is_not_null(),
    ).join(places.with_row_index("number"), on=[*place, "step"], how="left", nulls_equal=True, maintain_order="left")
    return _Steps(
        schema.select(rows, {name: dtype for name, dtype in REPLAY_COLUMNS.items() if name != "replayed_ns"}),
        rows["first"].to_numpy(),
        rows["is_first"].to_numpy(),
        rows["is_followed"].to_numpy(),
        rows["number"].cast(pl.Int64).fill_null(-1).to_numpy(),
        work,
        number,
    )


def step_times_by_rank(table: pl.DataFrame) -> pl.DataFrame:
    """Return the step time of each rank: the mean over its steps, of its slowest device.

    `table` has the columns of `STEP_COLUMNS`. Columns rank, duration_ns, replayed_ns, without_ns, saved_ns; one
    row per rank.
    """
    times = pl.col("duration_ns", "replayed_ns", "without_ns")
    per = table.select("window", "rank", "step").unique().group_by("rank").agg(pl.len().alias("per"))
    per_device = table.group_by("window", "rank", "device").agg(times.sum())
    sums = per_device.group_by("window", "rank").agg(times.max()).group_by("rank").agg(times.sum())
    means = sums.join(per, on="rank").with_columns((pl.col("replayed_ns") - pl.col("without_ns")).alias("saved_ns"))
    return means.sort("rank").select(
        "rank", pl.col("duration_ns", "replayed_ns", "without_ns", "saved_ns") // pl.col("per")
    )


def worst_error_ratio(table: pl.DataFrame) -> float:
    """Return the largest relative difference of a replayed step from its recording, over all ranks."""
    recorded = table.filter(pl.col("duration_ns") > 0)
    off = (recorded["replayed_ns"] / recorded["duration_ns"] - 1).abs().to_numpy()
    return float(off.max(initial=0.0))


@memoize
def _places_of_work(frame: NodeTable) -> tuple[Ints, Ints, pl.DataFrame]:
    """Return the nodes that are work, the number of each one's rank, device and step, and these places by number."""
    nodes = frame.select("rank", "device", "step", "kind")
    rows = np.flatnonzero(nodes["kind"].is_not_null().to_numpy())
    of_work = nodes[rows].drop("kind")
    ranks = of_work.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
    _, first, number = np.unique(ranks, return_index=True, return_inverse=True)
    return rows, number, of_work[first]


def total_ns(table: pl.DataFrame, column: str) -> int:
    """Return the total duration of all windows, each on its slowest rank."""
    per_rank = table.group_by("window", "rank", "device").agg(pl.col(column).sum())
    longest = per_rank.group_by("window").agg(pl.col(column).max())[column]
    return int(np.sum(longest.to_numpy())) if longest.len() else 0


def saving(run: Run, cause: str) -> Saving:
    """Potential saving of a run without a cause, from a replay of its dependency graph.

    `cause` is the name of one of `causes.all_causes`. The graph of a run is built once and cached with the run; a
    replay takes some hundredths of a second. Raises InputError for any other name.
    """
    return combined_saving(run, (cause,))


def combined_saving(run: Run, names: Iterable[str]) -> Saving:
    """Return the potential saving without several causes at once. Raises InputError for an unknown name.

    Where one of them has no answer, neither have all together.
    """
    return saving_of(run, (Removal(causes.find(name)) for name in names))


def saving_of(run: Run, removals: Iterable[Removal]) -> Saving:
    """Return the potential saving without several causes at once, each on all ranks or on some of them.

    Where one of the causes has no answer, neither have all together.
    """
    by_cause: dict[Cause, Removal] = {}
    for removal in removals:
        by_cause[removal.cause] = removal.union(by_cause.get(removal.cause))
    return _saving(run, tuple(by_cause[cause] for cause in causes.in_order(by_cause)))


@memoize
def replayed_steps(run: Run) -> pl.DataFrame:
    """Return the recorded steps of a run and their replay without changes: columns of `REPLAY_COLUMNS`."""
    tables = [step_durations(graph, graph.replay) for graph in graphs_of(run)]
    return pl.concat([pl.DataFrame(schema=REPLAY_COLUMNS), *tables])


@memoize
def graphs_of(run: Run) -> list[Graph]:
    """Return the graphs of a run, one per window, built once: of all its ranks, or of representative ones of many."""
    return dependency_graph.graphs(representative_ranks.run_of(run))


def by_rank(savings: Iterable[Saving]) -> pl.DataFrame:
    """Return the step time of each rank without each cause: columns cause, and those of `step_times_by_rank`.

    One row per saving and rank; none for a saving without an answer.
    """
    tables = [
        step_times_by_rank(saving.steps).select(pl.lit(saving.cause, pl.String).alias("cause"), pl.all())
        for saving in savings
    ]
    return pl.concat(tables) if tables else pl.DataFrame(schema=BY_RANK_COLUMNS)


def waiting_ns(run: Run, removals: Iterable[Removal] = ()) -> int:
    """Time that all ranks wait for others in collectives, in a replay without some causes, in ns."""
    total_ns, together = 0, tuple(removals)
    for graph in graphs_of(run):
        played = _without(graph, together)[1] if together else graph.replay
        parts = np.flatnonzero(graph.join_of >= 0)
        total_ns += int((played.start_ns[graph.join_of[parts]] - played.start_ns[parts]).sum())
    return total_ns


@memoize
def host_time(run: Run, cause: Cause) -> pl.DataFrame:
    """Host time of each rank that a cause takes: columns rank, removed_ns; one row per rank.

    That is the time of its nodes and between them that the replay removes, without waits.
    """
    parts = []
    for graph in graphs_of(run):
        changed = cause.transform(graph)
        before_ns = np.maximum(graph.chain_ns - changed.chain_ns, graph.launch_ns - changed.launch_ns)
        removed_ns = graph.own_ns - changed.own_ns + before_ns
        parts.append(graph.frame.select("rank", pl.Series("removed_ns", removed_ns[: graph.count], pl.Int64)))
    return pl.concat(parts).group_by("rank").agg(pl.col("removed_ns").sum()).sort("rank")


@memoize
def idle_time(run: Run, cause: Cause) -> pl.DataFrame:
    """Time that each rank's device idles because of a cause whose host waits: columns rank, idle_ns.

    One row per rank; none for causes of which the host's own time is the loss.
    """
    parts = [pl.DataFrame(schema=schema.columns("rank idle_ns"))]
    if (idle_ns := cause.idle_ns) is not None:
        parts += [
            graph.frame.select("rank", pl.Series("idle_ns", idle_ns(graph), pl.Int64)) for graph in graphs_of(run)
        ]
    return pl.concat(parts).group_by("rank").agg(pl.col("idle_ns").sum()).sort("rank")


@memoize
def infers_waits(run: Run) -> bool:
    """Return whether event waits of streams are inferred, because the traces do not record them."""
    return any(bool((graph.edges.inferred & (graph.edges.kind == _EVENT)).any()) for graph in graphs_of(run))


_Played: TypeAlias = tuple[Graph, Graph, Replay]
"""The graph of a window, the graph without a cause, and its replay."""
_EVENT = "event"
_INFERRED = 0.8
_GUESSED = 0.5
_UNSEEN = "preparation would overlap compute, which this recording never shows: the saving is smaller if that slows it"


@memoize
def _saving(run: Run, removals: tuple[Removal, ...]) -> Saving:
    removed = [removal.cause for removal in removals]
    names = AND.join(cause.name for cause in removed)
    before = replayed_steps(run)
    if before.is_empty():
        return _unknown(names, "no step of the run has work that can be replayed")
    try:
        played = [(graph, *_without(graph, removals)) for graph in graphs_of(run)]
    except InsufficientDataError as error:
        return _unknown(names, str(error))
    if all(changed is graph for graph, changed, _ in played):
        steps = _unchanged_steps(run)
    else:
        steps = _changed_steps(run, removals, played)
    per = _step_groups(run).step_count
    recorded_ns, replayed_ns = steps.recorded_ns, steps.replayed_ns
    saved_ns = _of_recorded(replayed_ns - steps.without_ns, recorded_ns, replayed_ns) // per
    before_steps_ns = (replayed_ns - _unchanged_steps(run).replayed_ns) // per
    step_ns = recorded_ns // per
    unseen = any(contention.extrapolates(graph, then) for graph, _, then in played)
    confidence = min(cause.confidence for cause in removed)
    # Less where the replay differs from the recording, and where waits are inferred.
    off = abs(replayed_ns / max(1, recorded_ns) - 1)
    reliability = max(0.1, 1 - 2 * off) * (_INFERRED if infers_waits(run) else 1.0)
    sure = confidence * reliability * (_GUESSED if unseen else 1.0)
    ratio = saved_ns / step_ns if step_ns else 0.0
    notes = [_UNSEEN if unseen else "", _rare_saves(run, steps.table) if CHECKPOINT in removed and saved_ns else ""]
    note = "; ".join(text for text in notes if text)
    return Saving(
        names, saved_ns, ratio, step_ns, round(sure, 2), steps.table, caveat=note, before_steps_ns=before_steps_ns
    )


@dataclass(frozen=True, eq=False)
class _ReplayedSteps:
    """Steps replayed without a cause, with the columns of `STEP_COLUMNS`, and total durations of all windows in ns."""

    table: pl.DataFrame
    recorded_ns: int
    replayed_ns: int
    without_ns: int


@memoize
def _unchanged_steps(run: Run) -> _ReplayedSteps:
    """Steps without a cause that the recording does not show: most causes of most runs."""
    before = replayed_steps(run)
    without_ns = before["replayed_ns"]
    table = _with_savings(before, without_ns, pl.zeros(before.height, dtype=pl.Int64, eager=True))
    recorded_ns, replayed_ns = (_step_groups(run).total_ns(before[name]) for name in ("duration_ns", "replayed_ns"))
    return _ReplayedSteps(table, recorded_ns, replayed_ns, replayed_ns)


def _changed_steps(run: Run, removals: Iterable[Removal], played: Iterable[_Played]) -> _ReplayedSteps:
    """Steps in replays of the changed graphs of a run."""
    without_ns, before_ns = [], []
    before_window = [removal.cause for removal in removals if removal.cause.is_before_window]
    counts_all = not all(cause.is_usual_before_window for cause in before_window)
    for graph, changed, then in played:
        # Transforms change no step and no kind of work: those of the unchanged graph are found once.
        after_ns = _steps(graph).replayed_ns(changed.done, then)
        without_ns.append(after_ns)
        # On a CPU run, what the host does before the first op of a window is part of the first step.
        from_before = not graph.on_device or bool(before_window)
        # How much sooner the first step begins than in the unchanged replay.
        sooner_ns = _steps(graph).replayed_ns(changed.done, then, unchanged=graph.replay) if from_before else after_ns
        step_before_ns = after_ns - sooner_ns
        if graph.on_device and not counts_all:
            usual_ns = _steps(graph).usual_lost_before_ns(changed.done, then, graph)
            step_before_ns = pl.select(pl.min_horizontal(step_before_ns, usual_ns)).to_series()
        before_ns.append(step_before_ns)
    before = replayed_steps(run)
    table = _with_savings(before, pl.concat(without_ns), pl.concat(before_ns))
    total_ns = _step_groups(run).total_ns
    # One denominator for all causes, unless texts say how much of the step is before the first device work.
    run_ns = _unchanged_steps(run).recorded_ns
    if total_ns(table["duration_ns"]) - run_ns < MIN_BEFORE_RATIO * run_ns:
        table = table.with_columns(before["duration_ns"])
    for late in (removal for removal in removals if removal.cause.pricing is Pricing.LATE_RANKS):
        for graph in graphs_of(run):
            table = device_time.with_late_ranks(table, late.ranks or graph.late_ranks)
    return _ReplayedSteps(table, *(total_ns(table[name]) for name in ("duration_ns", "replayed_ns", "without_ns")))


def _with_savings(before: pl.DataFrame, without_ns: pl.Series, before_ns: pl.Series) -> pl.DataFrame:
    """Return steps with the columns of `STEP_COLUMNS`; `before_ns` is what each begins sooner without the cause."""
    # By columns: one query of Polars costs more than all of it on a short run.
    duration_ns, replayed_ns = (before[name] + before_ns for name in ("duration_ns", "replayed_ns"))
    return before.with_columns(
        duration_ns.alias("duration_ns"),
        replayed_ns.alias("replayed_ns"),
        without_ns.alias("without_ns"),
        (replayed_ns - without_ns).alias("saved_ns"),
    )


@dataclass(frozen=True)
class _StepGroups:
    """Where the steps of each rank and device begin in `replayed_steps`, and the ranks of each window among those."""

    first_row: Ints
    first_group: Ints
    step_count: int

    def total_ns(self, duration_ns: pl.Series) -> int:
        """Total duration of all windows in ns, each on its slowest rank, as `total_ns` returns it."""
        known_ns = duration_ns.fill_null(0) if duration_ns.null_count() else duration_ns
        per_rank = np.add.reduceat(known_ns.to_numpy(), self.first_row)
        return int(np.maximum.reduceat(per_rank, self.first_group).sum())


@memoize
def _step_groups(run: Run) -> _StepGroups:
    """Groups of the steps of a run, which has at least one."""
    steps = replayed_steps(run)  # by window, rank and device
    group = steps.select(pl.struct("window", "rank", "device").rle_id().cast(pl.Int64)).to_series()
    first_row = _first_of_equals(group.to_numpy())
    first_group = _first_of_equals(steps["window"].to_numpy()[first_row])
    return _StepGroups(first_row, first_group, steps.select("window", "step").n_unique())


def _first_of_equals(values: Ints) -> Ints:
    """Return where each group of equal neighbours begins.

    >>> _first_of_equals(np.array([4, 4, 7, 4])).tolist()
    [0, 2, 3]
    """
    return np.flatnonzero(np.diff(values, prepend=values[0] - 1))


def _of_recorded(saved_ns: int, recorded_ns: int, replayed_ns: int) -> int:
    """Cost of a cause in recorded time: what a replay adds to the recording cannot be saved.

    >>> _of_recorded(90, recorded_ns=50, replayed_ns=100), _of_recorded(20, recorded_ns=100, replayed_ns=101)
    (45, 20)
    """
    adds = replayed_ns > (1 + MAX_ERROR_RATIO) * recorded_ns
    return round(saved_ns * recorded_ns / replayed_ns) if adds else saved_ns


def _rare_saves(run: Run, table: pl.DataFrame) -> str:
    """Return why saves cost less over all steps than in a window shorter than their interval; "" in a longer one."""
    interval = run.table(saves.by_save)["interval_steps"].max()
    count = table.group_by("window").agg(pl.col("step").n_unique())["step"].max()
    if not isinstance(interval, float) or not isinstance(count, int) or count >= interval:
        return ""
    return f"the run saves every {interval:.0f} steps, and a window has {count}; CKPT001 has the cost over all steps"


def _without(graph: Graph, removals: tuple[Removal, ...]) -> tuple[Graph, Replay]:
    changed = graph
    for removal in removals:
        try:
            changed = removal.apply(changed)
        except InsufficientDataError as error:
            where = f"{removal.cause.name}: " if len(removals) > 1 else ""
            raise InsufficientDataError(f"{where}{error}") from error
    if changed is graph:
        return graph, graph.replay
    removed = {removal.cause.removed_contention for removal in removals}
    if None not in removed:  # the transforms set contention themselves
        return changed, changed.replay
    return contention.apply_contention(
        graph,
        changed,
        slow_preparation=Contention.PREPARATION not in removed,
        slow_compute=Contention.COMPUTE not in removed,
    )


def _unknown(cause: str, why_not: str) -> Saving:
    return Saving(cause, 0, 0.0, 0, 0.0, pl.DataFrame(schema=STEP_COLUMNS), why_not)
