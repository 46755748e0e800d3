"""What a run would gain without one cause: the number that rules quote as the cost of their findings."""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import polars as pl

from tracekit.model.run import Run
from tracekit.replay.graph import causes, contention_update, dependency_graph, steps
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError, Replay
from tracekit.replay.graph.transforms import CONTENTION_TRANSFORMS, TRANSFORMS, in_order

STEP_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, "step": pl.Int64, "device": pl.Int64, "duration_ns": pl.Int64,
    "replayed_ns": pl.Int64, "without_ns": pl.Int64, "saved_ns": pl.Int64,
}  # fmt: skip
BY_RANK_COLUMNS = {
    "cause": pl.String, "rank": pl.Int64, "duration_ns": pl.Int64, "replayed_ns": pl.Int64, "without_ns": pl.Int64,
    "saved_ns": pl.Int64,
}  # fmt: skip
AND = " and "
"""Between the names of causes that are taken away together."""
MAX_ERROR_RATIO = 0.02
"""How far the replay of the unchanged steps may be off the recorded ones, if it is to price anything."""


@dataclass(frozen=True, eq=False)
class Saving:
    """What the steps of a run would take without one cause.

    `saved_ns` is per step, the mean over steps of the rank that takes longest; `saved_ratio` its share of the recorded
    step, `step_ns` that step. `confidence` runs from 0 to 1. `steps` has columns window, rank, step, device,
    duration_ns (recorded), replayed_ns (the replay unmodified), without_ns (the replay without the cause) and saved_ns
    (their difference); one row per window, rank, step and device. Where the run cannot tell all is 0, `steps` empty,
    and `why_not` says why. `note` says what makes the answer doubtful.
    """

    cause: str
    saved_ns: int
    saved_ratio: float
    step_ns: int
    confidence: float
    steps: pl.DataFrame
    unavailable_reason: str = ""
    caveat: str = ""


def saving(run: Run, cause: str) -> Saving:
    """Return what a run would gain without a cause, by replaying its dependency graph with that cause taken away.

    `cause` is a name in `tracekit.replay.graph.causes.CAUSES`: late-launch (HOST001), blocking-sync, rate-limiter
    (HOST002), data-loading (HOST003), allocator (MEM001), checkpoint (CKPT001), preparation (COMM004), give-way (STREAM001),
    slowed-compute (STREAM003), slowed-collectives (STREAM004), shared-queue, shared-communicator (STREAM002), straggler
    (RANK001), slow-link (RANK002), communication, late-gathers (COMM001), small-collectives (COMM002),
    micro-batch-reductions (COMM003), recomputation (MEM002). The graph of a run is built once and kept as long as the
    run; a replay takes some hundredths of a second. Raises InputError for any other name.
    """
    return combined_saving(run, (cause,))


def combined_saving(run: Run, names: Iterable[str]) -> Saving:
    """Return what a run would gain without several causes at once. Raises InputError for a name that is none.

    Where one of them cannot be told, neither can all together.
    """
    wanted = in_order(causes.find(name).name for name in names)
    known = _SAVINGS.setdefault(run, {})
    if wanted not in known:
        known[wanted] = _saving(run, wanted)
    return known[wanted]


def replayed_steps(run: Run) -> pl.DataFrame:
    """Return the steps of a run beside their replay with nothing changed: columns of `steps.COLUMNS`."""
    if run not in _BASELINES:
        tables = [steps.durations(each, each.replayed) for each in graphs_of(run)]
        _BASELINES[run] = pl.concat([pl.DataFrame(schema=steps.COLUMNS), *tables])
    return _BASELINES[run]


def graphs_of(run: Run) -> list[Graph]:
    """Return the graphs of a run, one for each window, built once."""
    if run not in _GRAPHS:
        _GRAPHS[run] = dependency_graph.graphs(run)
    return _GRAPHS[run]


def by_rank(savings: Iterable[Saving]) -> pl.DataFrame:
    """Return what a step would take on each rank: columns cause, and those of `steps.by_rank`.

    One row per saving and rank; where the run cannot tell, none.
    """
    tables = [
        steps.by_rank(each.steps).select(pl.lit(each.cause, pl.String).alias("cause"), pl.all()) for each in savings
    ]
    return pl.concat(tables) if tables else pl.DataFrame(schema=BY_RANK_COLUMNS)


def infers_waits(run: Run) -> bool:
    """Return whether waits of streams are inferred, since the traces do not tell them."""
    return any(bool((each.edges.inferred & (each.edges.kind == _EVENT)).any()) for each in graphs_of(run))


_GRAPHS: WeakKeyDictionary[Run, list[Graph]] = WeakKeyDictionary()
_BASELINES: WeakKeyDictionary[Run, pl.DataFrame] = WeakKeyDictionary()
_SAVINGS: WeakKeyDictionary[Run, dict[tuple[str, ...], Saving]] = WeakKeyDictionary()
_EVENT = "event"
_INFERRED = 0.8
_GUESSED = 0.5
_UNSEEN = "preparation would run beside compute, which this recording never shows: less is saved if it crawls there"
_KEY = ["window", "rank", "step", "device"]


def _saving(run: Run, names: tuple[str, ...]) -> Saving:
    cause = AND.join(names)
    before = replayed_steps(run)
    if before.is_empty():
        return _unknown(cause, "no step of the run has work that a replay can be made of")
    try:
        played = [(each, *_without(each, names)) for each in graphs_of(run)]
    except InsufficientDataError as error:
        return _unknown(cause, str(error))
    without = pl.concat(steps.durations(changed, then) for _, changed, then in played).select(
        *_KEY, pl.col("replayed_ns").alias("without_ns")
    )
    table = before.join(without, on=_KEY, how="left", nulls_equal=True, maintain_order="left").with_columns(
        (pl.col("replayed_ns") - pl.col("without_ns")).alias("saved_ns")
    )
    per = table.select("window", "step").n_unique()
    saved_ns = (steps.total_ns(table, "replayed_ns") - steps.total_ns(table, "without_ns")) // per
    step_ns = steps.total_ns(table, "duration_ns") // per
    note = _UNSEEN if any(contention_update.extrapolates(each, then) for each, _, then in played) else ""
    least = min(causes.find(name).confidence for name in names)
    sure = least * _confidence(run, table) * (_GUESSED if note else 1.0)
    ratio = saved_ns / step_ns if step_ns else 0.0
    return Saving(cause, saved_ns, ratio, step_ns, round(sure, 2), table.select(*STEP_COLUMNS), caveat=note)


def _confidence(run: Run, table: pl.DataFrame) -> float:
    """Return how far the replay can be trusted: less where waits are inferred, and where it is off."""
    off = abs(steps.total_ns(table, "replayed_ns") / max(1, steps.total_ns(table, "duration_ns")) - 1)
    return max(0.1, 1 - 2 * off) * (_INFERRED if infers_waits(run) else 1.0)


def _without(whole: Graph, names: tuple[str, ...]) -> tuple[Graph, Replay]:
    changed = whole
    for name in names:
        try:
            changed = TRANSFORMS[name](changed)
        except InsufficientDataError as error:
            raise InsufficientDataError(f"{name}: {error}" if len(names) > 1 else str(error)) from error
    if CONTENTION_TRANSFORMS.issuperset(names):
        return changed, changed.replayed
    crawling = not {"preparation", "give-way"} & set(names)
    return contention_update.apply_contention(
        whole, changed, slow_preparation=crawling, slow_compute="slowed-compute" not in names
    )


def _unknown(cause: str, why_not: str) -> Saving:
    return Saving(cause, 0, 0.0, 0, 0.0, pl.DataFrame(schema=STEP_COLUMNS), why_not)
