"""The change of the step time as contributions that add up to it exactly: waiting for data, compute by operator.

One rank shows what the step consists of: the one whose work, waiting for other ranks left out, changed most in the
direction of the step. A straggler's longer compute is the cause, and the waiting of all other ranks its consequence.
What that rank's steps differ from the job's, whose time is that of the slowest rank, is the rest.

The step time that is compared is a median, and medians do not add up. Weighted means do: the middle half of the steps
counts, with the most equal weights for which the mean is that median (`step_weights`).

Whether a contribution is certain is decided by the shared test (`significance`) on its samples, one per step. On a CPU,
what other programs can have taken (`disturbance`) extends its interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.analysis.host import step_parts
from tracekit.regression import significance
from tracekit.regression.disturbance import Disturbance
from tracekit.regression.metric_sources import FASTEST_PREFIX, FASTEST_SPREAD_PREFIX, PART_PREFIX
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values, job_series
from tracekit.regression.step_weights import median_weights, tilted_weights
from tracekit.regression.thresholds import Change, Thresholds, Verdict

REST = "rest"
OTHERS = "others"
"""What a step on shared processors takes beyond its calls where each is fastest."""
LABELS: Mapping[str, str] = {
    step_parts.DATA: "waiting for data",
    step_parts.COMMUNICATION: "exposed communication",
    step_parts.WAIT: "waiting for ranks",
    step_parts.COMPUTE: "compute",
    step_parts.LAUNCH: "launch gaps",
    step_parts.ALLOCATOR: "allocator calls",
    step_parts.COMPILE: "compilation",
    step_parts.GARBAGE_COLLECTION: "garbage collection",
    step_parts.SAVE: "saves",
    step_parts.COPY: "exposed copies",
    step_parts.IDLE: "other idle time",
    REST: "the rest",
    OTHERS: "other programs, waits for ranks",
}
PartPlaces = Mapping[tuple[int, str], str]
"""Line of the program by rank and part, such as (1, "data/")."""

_PREPOSITIONS = {
    step_parts.COMMUNICATION: "in",
    step_parts.COMPUTE: "of",
    step_parts.LAUNCH: "before",
    step_parts.COPY: "of",
}
# By how much recordings of one training differ at least, as the metrics that a kind of part belongs to.
_METRICS = {
    step_parts.COMPUTE: "compute_ns",
    step_parts.COMMUNICATION: "exposed_communication_ns",
    step_parts.WAIT: "exposed_communication_ns",
    step_parts.COPY: "exposed_communication_ns",
    REST: STEP_TIME,
}
_IDLE_METRIC = "idle_ns"
_METRIC_PARTS = {
    "compute_ns": step_parts.COMPUTE,
    "exposed_communication_ns": step_parts.COMMUNICATION,
    _IDLE_METRIC: step_parts.IDLE,
    "data_wait_ns": step_parts.DATA,
}
MIN_STEP_RATIO = 0.001
"""A change of less of the reference's step is never better or worse."""
_IN_STEP_RATIO = 0.5
"""A step shows a contribution whose time there changed by this share of it."""
_FASTEST_SPREAD_RATIOS = {step_parts.COMPUTE: 0.2, step_parts.LAUNCH: 0.2, step_parts.COMMUNICATION: 0.6}
_OTHER_FASTEST_SPREAD_RATIO = 0.3
_FASTEST_OPERATOR_SPREAD_RATIO = 0.5
"""By how much the fastest calls of a part, or of one operator, differ between recordings of one training beside other
programs, which share the caches and the units of a core (docs/lab/compare_verdicts.md)."""
_FASTEST_CONVERGENCE_RATIO = 0.25
"""With more steps the fastest calls would be faster by up to this share of what half of the steps make them slower."""
_MIN_FASTEST_RATIO = 0.025
"""Less of the step's fastest calls is never certain to be better or worse."""
_OTHER_RANKS_RATIO = 0.3
"""A rank is named where the median of the others changed by less than this share of what it changed by."""


@dataclass(frozen=True)
class Contribution:
    """What one kind of time, or one operator of it, contributes to the change of the step."""

    kind: str
    """Of `step_parts.KINDS`, REST or OTHERS."""
    name: str
    """The operator; '' for all of the kind."""
    before_ns: int
    after_ns: int
    low_ns: int | None = None
    """The interval of the change; None with fewer than three steps on a side."""
    high_ns: int | None = None
    explained_ns: int = 0
    """How much of the change other programs on the processors can explain."""
    verdict: Verdict = Verdict.INCONCLUSIVE
    rank: int | None = None
    """The rank on which it changed, where it changed on no other rank alike."""
    place: str = ""
    """Line of the program, or the rank that is waited for."""
    step_count: int = 0
    """Steps of the candidate that show it, of `all_steps`."""
    all_steps: int = 0
    is_fastest: bool = False
    """Whether its times are those of its calls where each is fastest, whatever other programs take."""
    parts: tuple["Contribution", ...] = ()
    """Operators of the kind, the largest change first; they add up to it."""

    @property
    def change_ns(self) -> int:
        """Contribution to the change of the step time, in ns."""
        return self.after_ns - self.before_ns

    @property
    def is_rest(self) -> bool:
        """Whether it is what the named contributions leave of the change."""
        return self.kind in (REST, OTHERS)

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes no change."""
        return self.low_ns is not None and self.high_ns is not None and (self.low_ns > 0 or self.high_ns < 0)

    @property
    def has_certain_part(self) -> bool:
        """Whether it is certain, or one of its operators in the same direction is."""
        return self.is_certain or any(part.is_certain and part.change_ns * self.change_ns > 0 for part in self.parts)

    @property
    def certain_ns(self) -> int:
        """The part of the change that is certain: the end of the interval next to no change, 0 where it includes it."""
        if not self.is_certain or self.low_ns is None or self.high_ns is None:
            return 0
        return self.low_ns if self.low_ns > 0 else self.high_ns

    @property
    def label(self) -> str:
        """Its name in words: "compute of aten::mm"."""
        return noun(self.kind, self.name)


def noun(kind: str, name: str) -> str:
    """Return the name of a part in words.

    >>> noun("launch", "aten::mm")
    'launch gaps before aten::mm'
    """
    label = LABELS.get(kind, kind)
    return f"{label} {_PREPOSITIONS.get(kind, 'of')} {name}" if name else label


def contributions(
    reference: Sequence[pl.DataFrame],
    candidate: Sequence[pl.DataFrame],
    step: Change,
    *,
    ranks: Sequence[int] | None,
    limits: Thresholds,
    disturbance: Disturbance,
    places: tuple[PartPlaces, PartPlaces] = ({}, {}),
) -> tuple[Contribution, ...]:
    """Return the contributions to the change of the step time by kind, the largest first and the rest last.

    Their changes add up to that of the step, rounded to ns; those of each one's parts to its own. `ranks` are the ranks
    that are compared, None for all. Recordings without parts of steps are divided by their breakdown.
    """
    tables = [*reference, *candidate]
    split = _parts if all(_has_parts(table) for table in tables) else _parts_of_breakdown
    sides = [[split(table) for table in side] for side in (reference, candidate)]
    chosen = _changed_ranks(sides, step)
    keys = sorted(
        {key for side in sides for parts in side for key in parts.select("kind", "name").unique().iter_rows()}
    )
    a, b = (
        [
            _Recording.of(table, parts, ranks=ranks, rank=rank, keys=keys)
            for table, parts in zip(side_tables, side_parts, strict=True)
        ]
        for side_tables, side_parts, rank in zip((reference, candidate), sides, chosen, strict=True)
    )
    before, after = (_Side.of(side, center) for side, center in ((a, step.reference), (b, step.candidate)))
    of_part = _judge([*keys, (REST, "")], before, after, limits, disturbance)
    kinds = list(dict.fromkeys(kind for kind, _ in keys))
    groups = [np.array([kind == other for other, _ in keys] + [False]) for kind in kinds]
    groups.append(np.array([False] * len(keys) + [True]))
    of_kind = _judge(
        [(kind, "") for kind in (*kinds, REST)], before.sum_by(groups), after.sum_by(groups), limits, disturbance
    )
    totals = round(step.reference), round(step.candidate)
    by_rank = _changes_by_rank(*sides)
    located = [
        _with_parts(
            contribution,
            [part for part in of_part if part.kind == contribution.kind],
            chosen,
            places,
            rank=_only_rank(by_rank.get(contribution.kind, {}), chosen[1]),
        )
        for contribution in _exact(of_kind, totals)
        if contribution.kind != REST
    ]
    rest = _exact(of_kind, totals)[-1]
    present = [c for c in located if c.before_ns or c.after_ns]
    return (*sorted(present, key=lambda c: -abs(c.change_ns)), rest)


def contributions_of_fastest(
    reference: Sequence[pl.DataFrame],
    candidate: Sequence[pl.DataFrame],
    step: Change,
    places: tuple[PartPlaces, PartPlaces] = ({}, {}),
) -> tuple[Contribution, ...]:
    """Return the contributions where other programs disturb the step: what its calls take where each is fastest.

    Other programs stop a call in some steps and not in others, so that the least of many steps and ranks is close to
    what the call takes without them, whatever the load. The last contribution is all else that the step takes. Empty
    where a recording has no such times.
    """
    sides = [[_fastest(table) for table in side] for side in (reference, candidate)]
    if not all(recording for side in sides for recording in side):
        return ()
    keys = sorted({key for side in sides for recording in side for key in recording})
    names = {kind: [name for other, name in keys if other == kind] for kind, _ in keys}
    pieces = []
    for kind, operators in names.items():
        ratio = _FASTEST_SPREAD_RATIOS.get(kind, _OTHER_FASTEST_SPREAD_RATIO)
        parts = [
            _fastest_contribution(sides, kind, name, [name], _FASTEST_OPERATOR_SPREAD_RATIO, step) for name in operators
        ]
        whole = _fastest_contribution(sides, kind, "", operators, ratio, step)
        whole = replace(
            whole, before_ns=sum(part.before_ns for part in parts), after_ns=sum(part.after_ns for part in parts)
        )
        ranks = tuple(min((rank for rank, _ in side), default=None) for side in places)
        pieces.append(_with_parts(whole, parts, (ranks[0], ranks[1]), places, rank=None))
    rest = Contribution(
        OTHERS,
        "",
        round(step.reference) - sum(piece.before_ns for piece in pieces),
        round(step.candidate) - sum(piece.after_ns for piece in pieces),
    )
    present = [piece for piece in pieces if piece.before_ns or piece.after_ns]
    return (*sorted(present, key=lambda piece: -abs(piece.change_ns)), rest)


def changed_ranks(reference: pl.DataFrame, candidate: pl.DataFrame, step: Change) -> tuple[int, int] | None:
    """The rank of each recording that the contributions are of; None without parts of steps."""
    if not _has_parts(reference) or not _has_parts(candidate):
        return None
    before, after = _changed_ranks([[_parts(reference)], [_parts(candidate)]], step)
    return None if before is None or after is None else (before, after)


def decide(step: Change, parts: Sequence[Contribution], disturbance: Disturbance, limits: Thresholds) -> Change:
    """Return the change of the step time, decided by its contributions where the step times alone cannot tell.

    The certain part of all contributions together has to be in the direction of the step, and both at least a least
    change. Where other programs disturb the step, the change is that of its calls where each is fastest, relative to
    these.
    """
    if step.verdict is not Verdict.INCONCLUSIVE or step.change is None or step.reference <= 0 or not parts:
        return step
    is_fastest = parts[-1].kind == OTHERS
    reference_ns = sum(part.before_ns for part in parts[:-1]) if is_fastest else step.reference
    certain = [piece for part in parts if not part.is_rest for piece in _certain_pieces(part, disturbance)]
    center = sum(contribution.change_ns for contribution in certain) / max(1, reference_ns)
    bound = sum(contribution.certain_ns for contribution in certain) / max(1, reference_ns)
    if abs(center) < limits.min_change_ratio or center * bound <= 0:
        return step
    if is_fastest and abs(bound) < _MIN_FASTEST_RATIO:
        return step
    is_towards = step.change * bound > 0 and abs(step.change) >= limits.min_change_ratio
    # Where other programs explain the rest, the verdict concerns what they do not explain.
    is_explained = is_fastest or (disturbance.is_disturbed and all(piece.certain_ns * bound > 0 for piece in certain))
    if not is_towards and not is_explained:
        return step
    if is_towards and not is_fastest:  # the interval is that of the measured change, which it contains
        center, bound = step.change, min(bound, step.change, key=abs)
    low, high = sorted((bound, max(2 * center - bound, 2 * bound, key=abs)))
    verdict = Verdict.WORSE if bound > 0 else Verdict.BETTER
    return replace(step, low=low, high=high, is_certain=True, verdict=verdict, more_samples=0, more_recordings=0)


def _certain_pieces(part: Contribution, disturbance: Disturbance) -> Sequence[Contribution]:
    """Return a contribution if it is certain, else those of its operators that are.

    On shared processors a single operator may take several times as long in every step of a recording, for no fault of
    the training: where few recordings show such differences, only operators count that one side does not have.
    """
    if part.is_certain:
        return [part]
    return [
        piece
        for piece in part.parts
        if piece.is_certain
        and (piece.is_fastest or not disturbance.is_unknown or 0 in (piece.before_ns, piece.after_ns))
    ]


def _fastest(table: pl.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    """Time of the fastest calls by kind and name of the part, and what half of the steps add to it."""
    values = dict(table.filter(pl.col("metric").str.starts_with("fastest")).select("metric", "value").iter_rows())
    keys = [metric.removeprefix(FASTEST_PREFIX) for metric in values if metric.startswith(FASTEST_PREFIX)]
    return {
        (key.partition("/")[0], key.partition("/")[2]): (
            values[FASTEST_PREFIX + key],
            values.get(FASTEST_SPREAD_PREFIX + key, 0.0),
        )
        for key in keys
    }


def _fastest_contribution(
    sides: Sequence[Sequence[Mapping[tuple[str, str], tuple[float, float]]]],
    kind: str,
    name: str,
    operators: Sequence[str],
    spread_ratio: float,
    step: Change,
) -> Contribution:
    """Return what the fastest calls of some operators contribute, with the interval of what differs by chance."""
    (before, before_spread), (after, after_spread) = (
        [
            sum(recording.get((kind, operator), (0.0, 0.0))[part] for recording in side for operator in operators)
            / len(side)
            for part in (0, 1)
        ]
        for side in sides
    )
    least_before, least_after = (
        max(0.0, value - _FASTEST_CONVERGENCE_RATIO * spread) * (1 - spread_ratio)
        for value, spread in ((before, before_spread), (after, after_spread))
    )
    low, high = round(least_after - before), round(after - least_before)
    step_ns = sum(value for recording in sides[0] for value, _ in recording.values()) / len(sides[0])
    return Contribution(
        kind, name, round(before), round(after), low, high,
        verdict=_verdict(low, high, after - before, step_ns=step_ns),
        step_count=step.candidate_samples, all_steps=step.candidate_samples, is_fastest=True,
    )  # fmt: skip


def _has_parts(table: pl.DataFrame) -> bool:
    return bool(table["metric"].str.starts_with(PART_PREFIX).any())


def _parts(table: pl.DataFrame) -> pl.DataFrame:
    """Return the parts of each step. Columns rank, step (window and step), kind, name, value."""
    rows = table.filter(pl.col("metric").str.starts_with(PART_PREFIX))
    pieces = pl.col("metric").str.splitn("/", 4)
    return rows.select(
        "rank",
        pl.struct("window", "step").alias("step"),
        pieces.struct.field("field_2").alias("kind"),
        pieces.struct.field("field_3").fill_null("").alias("name"),
        "value",
    )


def _parts_of_breakdown(table: pl.DataFrame) -> pl.DataFrame:
    """Return the parts of each step by its breakdown, idle time without the wait for data. Columns as `_parts`."""
    kind = pl.col("metric").replace_strict(_METRIC_PARTS, default=None, return_dtype=pl.String).alias("kind")
    rows = table.select("window", "rank", "step", kind, "value").drop_nulls("kind")
    idle = rows.filter(kind=step_parts.IDLE)
    # The log of the waits has no windows.
    waits = rows.filter(kind=step_parts.DATA).group_by("rank", "step").agg(pl.col("value").first().alias("wait"))
    waited = idle.join(waits, on=["rank", "step"], how="left", nulls_equal=True).with_columns(
        pl.min_horizontal(pl.col("wait").fill_null(0.0), "value").alias("wait")
    )
    rest = waited.with_columns(pl.col("value") - pl.col("wait")).drop("wait")
    data = waited.with_columns(value="wait", kind=pl.lit(step_parts.DATA)).drop("wait")
    busy = rows.filter(~pl.col("kind").is_in([step_parts.IDLE, step_parts.DATA]))
    return pl.concat([busy, rest, data]).select(
        "rank", pl.struct("window", "step").alias("step"), "kind", pl.lit("").alias("name"), "value"
    )


def _changed_ranks(sides: Sequence[Sequence[pl.DataFrame]], step: Change) -> tuple[int | None, int | None]:
    """Return the rank of each side whose work changed most in the direction of the step: the same one if possible."""
    before, after = (_work_by_rank(side) for side in sides)
    common = before.keys() & after.keys()
    if common:
        sign = 1 if step.difference >= 0 else -1
        rank = max(sorted(common), key=lambda rank: sign * (after[rank] - before[rank]))
        return rank, rank
    first, second = (max(sorted(side), key=lambda rank: side[rank], default=None) for side in (before, after))
    return first, second


def _work_by_rank(recordings: Sequence[pl.DataFrame]) -> dict[int, float]:
    """Time of the median step of each rank in which it does not wait for others, the mean over recordings."""
    medians = [
        parts.filter(pl.col("kind") != step_parts.WAIT)
        .group_by("rank", "step")
        .agg(pl.col("value").sum())
        .group_by("rank")
        .agg(pl.col("value").median())
        for parts in recordings
    ]
    means = pl.concat(medians).group_by("rank").agg(pl.col("value").mean(), pl.len())
    return {rank: value for rank, value, count in means.iter_rows() if count == len(recordings)}


def _changes_by_rank(
    reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame]
) -> dict[str, dict[int, float]]:
    """Return the change of the mean step of each rank by kind of part."""
    before, after = (pl.concat(side) for side in (reference, candidate))
    means = [
        side.group_by("kind", "rank").agg(pl.col("value").sum()).join(
            side.group_by("rank").agg(pl.col("step").n_unique() * len(recordings)), on="rank"
        ).with_columns(pl.col("value") / pl.col("step"))
        for side, recordings in ((before, reference), (after, candidate))
    ]  # fmt: skip
    both = means[0].join(means[1], on=["kind", "rank"], how="full", coalesce=True, suffix="_after")
    changes = both.select("kind", "rank", pl.col("value_after").fill_null(0.0) - pl.col("value").fill_null(0.0))
    by_kind: dict[str, dict[int, float]] = {}
    for kind, rank, change_ns in changes.iter_rows():
        by_kind.setdefault(kind, {})[rank] = change_ns
    return by_kind


def _only_rank(changes: Mapping[int, float], rank: int | None) -> int | None:
    """Return the rank if a kind of part changed far more on it than on most others."""
    others = [change_ns for other, change_ns in changes.items() if other != rank]
    if rank is None or not others or rank not in changes:
        return None
    sign = 1 if changes[rank] >= 0 else -1
    return rank if sign * float(np.median(others)) < _OTHER_RANKS_RATIO * abs(changes[rank]) else None


@dataclass(frozen=True, eq=False)
class _Recording:
    """The parts of each step of one recording on one rank, and the job's step times."""

    steps: pl.Series
    step_times: Values
    parts: Values
    """Shape (steps, parts + 1); the last one is the rest: the rows sum to the step times."""

    @classmethod
    def of(
        cls,
        table: pl.DataFrame,
        parts: pl.DataFrame,
        *,
        ranks: Sequence[int] | None,
        rank: int | None,
        keys: Sequence[tuple[str, str]],
    ) -> "_Recording":
        steps, times = job_series(table.filter(pl.col("metric") == STEP_TIME), ranks)[STEP_TIME]
        columns = pl.DataFrame(keys, schema={"kind": pl.String, "name": pl.String}, orient="row")
        cells = (
            parts.filter(pl.col("rank").eq_missing(pl.lit(rank, pl.Int64)))
            .join(columns.with_row_index("column"), on=["kind", "name"])
            .join(pl.DataFrame({"step": steps}).with_row_index("row"), on="step", nulls_equal=True)
        )
        matrix = np.zeros((len(times), len(keys) + 1))
        matrix[cells["row"].to_numpy(), cells["column"].to_numpy()] = cells["value"].to_numpy()
        matrix[:, -1] = times - matrix.sum(axis=1)
        return cls(steps, times, matrix)


@dataclass(frozen=True, eq=False)
class _Side:
    """The parts of one side: those of the compared step, and of each step of each recording."""

    center: Values
    recordings: tuple[Values, ...]
    steps: tuple[pl.Series, ...]
    step_scatter: float

    @classmethod
    def of(
        cls,
        recordings: Sequence[_Recording],
        step_ns: float,
    ) -> "_Side":
        medians = np.array([np.median(recording.step_times) for recording in recordings])
        means = np.stack([median_weights(recording.step_times) @ recording.parts for recording in recordings])
        center = tilted_weights(medians, step_ns) @ means
        positive = [r.step_times for r in recordings if r.step_times.min() > 0]
        scatter = max((float(significance.scatter(np.log(times))) for times in positive), default=0.0)
        return cls(center, tuple(r.parts for r in recordings), tuple(r.steps for r in recordings), scatter)

    def sum_by(self, groups: Sequence[Values]) -> "_Side":
        """Return the sums of the parts of each group."""
        matrix = np.stack(groups, axis=1).astype(np.float64)
        return replace(self, center=self.center @ matrix, recordings=tuple(r @ matrix for r in self.recordings))


def _judge(
    keys: Sequence[tuple[str, str]], before: _Side, after: _Side, limits: Thresholds, disturbance: Disturbance
) -> list[Contribution]:
    """Return each part with its interval and in how many steps it shows."""
    change = after.center - before.center
    sides = zip(keys, before.center.tolist(), after.center.tolist(), strict=True)
    explained = np.array([disturbance.explained_ns(kind, was_ns, is_ns) for (kind, _), was_ns, is_ns in sides])
    margins = _margins(keys, before, after, limits, is_on_host=disturbance.is_on_host)
    shown = np.concatenate(after.recordings) - before.center
    in_steps = (shown * np.sign(change) >= _IN_STEP_RATIO * np.abs(change)).sum(axis=0)
    rows = []
    for index, (kind, name) in enumerate(keys):
        low = high = None
        if margins is not None:
            low = round(change[index] - margins[index] - explained[index, 1])
            high = round(change[index] + margins[index] + explained[index, 0])
        rows.append(
            Contribution(
                kind, name, round(before.center[index]), round(after.center[index]), low, high,
                explained_ns=round(explained[index, 1 if change[index] >= 0 else 0]),
                step_count=int(in_steps[index]), all_steps=len(shown),
                verdict=_verdict(low, high, change[index], step_ns=float(before.center.sum())),
            )
        )  # fmt: skip
    return rows


def _verdict(low: int | None, high: int | None, change_ns: float, *, step_ns: float) -> Verdict:
    if low is None or high is None:
        return Verdict.INCONCLUSIVE
    if (low > 0 or high < 0) and abs(change_ns) >= MIN_STEP_RATIO * step_ns:
        return Verdict.WORSE if low > 0 else Verdict.BETTER
    is_same = max(abs(low), abs(high)) <= significance.MIN_CONTAINER_SHARE * step_ns
    return Verdict.SAME if is_same else Verdict.INCONCLUSIVE


def _margins(
    keys: Sequence[tuple[str, str]], before: _Side, after: _Side, limits: Thresholds, *, is_on_host: bool
) -> Values | None:
    """Return how far the interval of each part reaches to either side; None where a recording has too few steps."""
    recordings = (*before.recordings, *after.recordings)
    if min(map(len, recordings)) < significance.MIN_PAIRED_STEPS:
        return None
    all_steps = (*before.steps, *after.steps)
    is_paired = all(steps.equals(all_steps[0]) for steps in all_steps)
    a, b = significance.observations(before.recordings, after.recordings, is_paired=is_paired)
    spreads = np.array([metric_of(_METRICS.get(kind, _IDLE_METRIC)).usual_spread for kind, _ in keys])
    if is_on_host:
        # A CPU is shared, so that parts differ between recordings as steps differ within them.
        spreads = np.hypot(spreads, significance.SCATTER_SHARE * max(before.step_scatter, after.step_scatter))
    usual_ns = spreads * np.maximum(np.abs(a.mean), np.abs(b.mean))
    return significance.Spread.of(a, b, usual_ns).margin(limits.confidence)


def _exact(kinds: Sequence[Contribution], totals: tuple[int, int]) -> list[Contribution]:
    """Return contributions of which the last, the rest, takes what rounding leaves of both totals."""
    *named, rest = kinds
    before, after = (
        total - sum(values)
        for total, values in zip(totals, ([c.before_ns for c in named], [c.after_ns for c in named]), strict=True)
    )
    return [*named, replace(rest, before_ns=before, after_ns=after)]


def _with_parts(
    contribution: Contribution,
    parts: Sequence[Contribution],
    ranks: tuple[int | None, int | None],
    places: tuple[PartPlaces, PartPlaces],
    *,
    rank: int | None,
) -> Contribution:
    """Return a contribution with its parts, each with rank and place; the largest takes what rounding leaves."""
    present = sorted((part for part in parts if part.before_ns or part.after_ns), key=lambda part: -abs(part.change_ns))
    if present:
        first, *others = present
        before = contribution.before_ns - sum(part.before_ns for part in others)
        after = contribution.after_ns - sum(part.after_ns for part in others)
        present = [replace(first, before_ns=before, after_ns=after), *others]
    located = tuple(replace(part, rank=rank, place=_place(part, ranks, places)) for part in present)
    return replace(contribution, rank=rank, place=located[0].place if located else "", parts=located)


def _place(part: Contribution, ranks: tuple[int | None, int | None], places: tuple[PartPlaces, PartPlaces]) -> str:
    """Line of the program on the side where the part takes longer; the other side's where it has none."""
    key = f"{part.kind}/{part.name}"
    before, after = (
        side.get((rank, key), "") if rank is not None else "" for side, rank in zip(places, ranks, strict=True)
    )
    return (after or before) if part.change_ns >= 0 else (before or after)
