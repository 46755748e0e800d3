"""What changed the step time: the change of each operator, kernel or module; together they are that of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_matching, kernels, step_charges
from tracekit.analysis.time import breakdown
from tracekit.errors import NotComparableError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import comparison, contributions, significance, step_separation, step_weights
from tracekit.regression.comparison import Comparison, RunSamples
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.step_weights import WEIGHT_KEY
from tracekit.regression.thresholds import Change, Thresholds, Verdict

KEYS = ("operator", "kernel", "module", "path", "shapes")
FACTS: tuple[TraceFact, ...] = (*comparison.FACTS, step_charges.step_charges, breakdown.by_step)
NEW, GONE, SLOWER, FASTER, SAME = STATUSES = ("new", "gone", "slower", "faster", "same")
ROW_COLUMNS = schema.columns(
    "name part status verdict change_ns contribution_ratio low_ns high_ns before_ns after_ns calls_change_ns "
    "before_count after_count new_count gone_count before_work_ns after_work_ns path shapes",
    **dict.fromkeys(("name", "part", "status", "verdict", "path", "shapes"), pl.String),
    **{
        f"{name}_{unit}": pl.Float64
        for name, unit in [
            *((side, unit) for side in ("before", "after") for unit in ("ns", "count", "work_ns")),
            *((name, "ns") for name in ("change", "low", "high", "calls_change")),
            ("new", "count"), ("gone", "count"),
        ]
    },
)  # fmt: skip
OUTSIDE_MODULES = "(outside modules)"
# Copies share links, too.
_METRICS = ("compute_ns", "exposed_communication_ns", "exposed_communication_ns", "idle_ns")
_PART_METRICS = dict(zip(step_charges.PARTS, _METRICS, strict=True))
_SIDES = ("before", "after")
_MEASURES = ("ns", "count", "work_ns")
_MIN_CHANGE_NS = 1e-3
_DECIMALS = 3


@dataclass(frozen=True, eq=False)
class StepChange:
    """The change of the step time between two runs, and the contribution of each operator, kernel or module to it."""

    compared: Comparison
    """All metrics of both runs, and what to know when reading them."""
    step: Change
    """That of the metric step_time_ns."""
    rows: pl.DataFrame
    """Columns ROW_COLUMNS, and those of `by` after the first; the largest change first."""
    by: tuple[str, ...]

    @property
    def status_counts(self) -> Mapping[str, int]:
        """Return the number of rows by each of STATUSES."""
        counts = dict(self.rows.group_by("status").len().iter_rows())
        return {status: int(counts.get(status, 0)) for status in STATUSES}


@dataclass(frozen=True, eq=False)
class RunSteps:
    """One side of a comparison: what a run measured, and what its steps consist of."""

    samples: RunSamples
    steps: pl.DataFrame
    """`breakdown.by_step` of all ranks."""
    charges: pl.DataFrame
    """`step_charges.step_charges` of all ranks."""

    @classmethod
    def of(cls, run: Run, name: str = "") -> "RunSteps":
        """Return the steps of a run, under its own name or another."""
        return cls(RunSamples.of(run, name), run.table(breakdown.by_step), run.table(step_charges.step_charges))

    @property
    def ranks(self) -> set[int]:
        """Return the ranks that have steps."""
        return set(self.steps["rank"].unique().to_list())


def step_change(
    reference: RunSteps,
    candidate: RunSteps,
    by: Sequence[str] = ("operator",),
    *,
    allow_different: bool = False,
    thresholds: Thresholds | None = None,
) -> StepChange:
    """Compare the typical steps of two runs by some of KEYS; the changes of all rows sum to that of the step time.

    The rows of `StepChange.rows` have the first of `by` as name, and the part of the breakdown. Idle time is named by
    its cause. before_ns and after_ns are the time of the step that is charged to it, counts and work_ns those of the
    calls and of all their activities, hidden ones included; calls_change_ns is what the change of counts accounts for.
    low_ns to high_ns is the interval of the change, null with fewer than three steps; path and shapes are those of the
    calls that changed most. Raises NotComparableError as `compare` does, and ConfigError on an unknown key.
    """
    kernels.require_known("--by", by, KEYS)
    keys, limits = tuple(dict.fromkeys(by)), thresholds or Thresholds()
    compared = comparison.compare(
        reference.samples, candidate.samples, allow_different=allow_different, thresholds=limits
    )
    step = next((change for change in compared.changes if change.metric == STEP_TIME), None)
    if step is None:
        names = f"{compared.reference} and {compared.candidate}"
        raise NotComparableError(f"{names} have no step time in common: nothing to explain")
    common = reference.ranks & candidate.ranks
    a = _Side.of(reference, common or reference.ranks, step.reference)
    b = _Side.of(candidate, common or candidate.ranks, step.candidate)
    return StepChange(compared, step, _rows(a, b, keys, step, limits), keys)


def with_weights(cells: pl.DataFrame, step_ns: float) -> pl.DataFrame:
    """Return cells (columns WEIGHT_KEY and duration_ns) with weight and rank_weight.

    The weights sum to 1, and the weighted times to `step_ns`, which lies between the times of the middle steps.
    rank_weight is what each rank of a step counts in a sample of that step: it sums to 1 within each step.
    """
    middle = middle_steps(cells)
    is_middle = cells.select(pl.struct("window", "step").is_in(middle.implode()))["window"].to_numpy()
    times = cells["duration_ns"].to_numpy().astype(np.float64)
    weights = np.zeros(len(times))
    weights[is_middle] = step_weights.tilted_weights(times[is_middle], step_ns)
    of_rank = pl.col("of_rank")
    of_step = of_rank.sum().over("window", "step")
    # A step that only ranks have which no middle step has: all of them count alike.
    rank_weight = pl.when(of_step > 0).then(of_rank / of_step).otherwise(1 / pl.len().over("window", "step"))
    with_weight = cells.with_columns(pl.Series("weight", weights))
    with_rank = with_weight.with_columns(pl.col("weight").sum().over("rank").alias("of_rank"))
    return with_rank.with_columns(rank_weight.alias("rank_weight")).drop("of_rank")


def middle_steps(cells: pl.DataFrame) -> pl.Series:
    """Return the middle half of the steps by the time of the slowest rank, as structs of window and step."""
    slowest = cells.group_by("window", "step").agg(pl.col("duration_ns").max()).sort("duration_ns", "window", "step")
    cut = slowest.height // 4
    return slowest.slice(cut, slowest.height - 2 * cut).select(pl.struct("window", "step")).to_series()


@dataclass(frozen=True, eq=False)
class _Side:
    """What the steps of one run consist of."""

    charges: pl.DataFrame
    """Columns of `step_charges`, window, rank, weight, rank_weight, on the slowest device of each rank and step."""
    steps: pl.DataFrame
    """Columns window and step, in order."""

    @classmethod
    def of(cls, run: RunSteps, ranks: set[int], step_ns: float) -> "_Side":
        steps = run.steps.filter(pl.col("rank").is_in(ranks))
        cells = with_weights(step_weights.slowest_devices(steps), step_ns).drop("duration_ns")
        charges = run.charges.join(cells, on=[*WEIGHT_KEY, "device"], nulls_equal=True, maintain_order="left")
        names = [
            pl.when(pl.col("part") == step_charges.IDLE).then(_idle_name()).otherwise(name).alias(name)
            for name in ("operator", "kernel")
        ]
        module = pl.col("module").fill_null(OUTSIDE_MODULES)
        chain = pl.when(pl.col("part") != step_charges.IDLE).then("chain")
        return cls(
            charges.with_columns(*names, module, chain), cells.select("window", "step").unique().sort("window", "step")
        )

    def sites(self, site: Sequence[str]) -> pl.DataFrame:
        """Return the call sites: columns site, order_ns, chain, and ns, count and work_ns of the typical step."""
        weight = pl.col("weight")
        return self.charges.group_by(site, maintain_order=True).agg(
            pl.col("order_ns").median(),
            pl.col("chain").drop_nulls().first(),
            (pl.col("dur_ns") * weight).sum().alias("ns"),
            (pl.col("count") * weight).sum().round(_DECIMALS).alias("count"),
            (pl.col("work_ns") * weight).sum().alias("work_ns"),
        )

    def samples(self, site: Sequence[str], groups: pl.DataFrame, count: int) -> Values:
        """Return the time of each group in each step, shape (steps, count); `groups` has the group of each site."""
        rows = self.charges.join(groups, on=site, nulls_equal=True)
        sums = rows.group_by("window", "step", "group").agg(ns=(pl.col("dur_ns") * pl.col("rank_weight")).sum())
        cells = sums.join(self.steps.with_row_index("row"), on=["window", "step"], nulls_equal=True)
        times_ns = np.zeros((self.steps.height, count))
        times_ns[cells["row"].to_numpy(), cells["group"].to_numpy()] = cells["ns"].to_numpy()
        return times_ns


def _idle_name() -> pl.Expr:
    """Return the name of idle time by its cause: "idle (host: python)"."""
    detail = pl.when(pl.col("detail").is_not_null()).then(pl.concat_str(pl.lit(": "), "detail")).otherwise(pl.lit(""))
    cause = pl.col("cause").fill_null("unknown").str.replace("_", " ", literal=True)
    return pl.concat_str(pl.lit("idle ("), cause, detail.str.replace("_", " ", literal=True), pl.lit(")"))


def _rows(a: _Side, b: _Side, by: Sequence[str], step: Change, limits: Thresholds) -> pl.DataFrame:
    place: tuple[str, ...] = ("path", "shapes")
    identity = tuple(dict.fromkeys(("part", "operator", *(key for key in by if key not in place))))
    if by[0] == "kernel":  # a kernel may be launched by another operator now
        identity, place = tuple(name for name in identity if name != "operator"), ("operator", *place)
    site = (*identity, *place)
    matched = call_matching.match_calls(a.sites(site), b.sites(site), identity, place)
    calls = _calls(*matched, identity=identity, place=place)
    group = ["part", *by]
    grouped = _sum_calls(calls, group)
    call_groups = calls.join(grouped.select(*group, "group"), on=group, nulls_equal=True).select("call", "group")
    of_site = [side.select(*site, "call").join(call_groups, on="call").drop("call") for side in matched]
    series = [side.samples(site, groups, grouped.height) for side, groups in zip((a, b), of_site, strict=True)]
    # By how much the time of each row usually differs between recordings: as the metric of its part.
    spreads = {part: metric_of(metric).usual_spread for part, metric in _PART_METRICS.items()}
    usual = grouped["part"].replace_strict(spreads, return_dtype=pl.Float64).to_numpy()
    margins = None  # by how much the interval of each group's change reaches to either side, in ns
    if min(map(len, series)) >= step_separation.MIN_STEPS:
        observed = significance.observations(series[:1], series[1:], is_paired=a.steps.equals(b.steps))
        largest_ns = np.maximum(observed[0].mean, observed[1].mean)
        margins = significance.Spread.of(*observed, usual * largest_ns).margin(limits.confidence)
    rows = _judge(grouped, margins, step, limits).rename({by[0]: "name"})
    extra = {name: pl.String for name in by[1:] if name not in ROW_COLUMNS}
    return schema.select(rows, ROW_COLUMNS | extra)


def _calls(a: pl.DataFrame, b: pl.DataFrame, *, identity: Sequence[str], place: Sequence[str]) -> pl.DataFrame:
    """Return the calls of both sides: columns call, identity, place, and before_ and after_ each of _MEASURES."""
    sides = [
        side.select(
            "call",
            call_matching.LABEL,
            *identity,
            *place,
            *(pl.col(name).alias(f"{prefix}_{name}") for name in _MEASURES),
        )
        for prefix, side in zip(_SIDES, (a, b), strict=True)
    ]
    joined = sides[0].join(sides[1], on="call", how="full", coalesce=True, suffix="_b")
    values = [f"{side}_{name}" for side in _SIDES for name in _MEASURES]
    label = pl.coalesce(call_matching.LABEL, f"{call_matching.LABEL}_b")
    by_name = {name: pl.coalesce(name, f"{name}_b") for name in identity}
    if call_matching.OPERATOR in by_name:
        by_name[call_matching.OPERATOR] = pl.coalesce(label, by_name[call_matching.OPERATOR])
    return joined.with_columns(
        *(expression.alias(name) for name, expression in by_name.items()),
        *(call_matching.both(name, f"{name}_b").alias(name) for name in place),
        *(pl.col(name).fill_null(0.0) for name in values),
    ).select("call", *identity, *place, *values)


def _sum_calls(calls: pl.DataFrame, group: Sequence[str]) -> pl.DataFrame:
    """Return the calls summed by the columns of `group`, with a number `group`, and of which calls changed most."""
    before, after = pl.col("before_count"), pl.col("after_count")
    each_ns = pl.col("before_ns") / before
    by_count = (
        pl.when(before == 0)
        .then("after_ns")
        .when(after == 0)
        .then(-pl.col("before_ns"))
        .otherwise((after - before) * each_ns)
    )
    changed = calls.with_columns(
        pl.when((before > 0) | (after > 0)).then(by_count).otherwise(0.0).alias("calls_change_ns"),
        (after - before).clip(0).alias("new_count"),
        (before - after).clip(0).alias("gone_count"),
        (pl.col("after_ns") - pl.col("before_ns")).alias("change_ns"),
    )
    values = [name for name in changed.columns if name.endswith(("_ns", "_count"))]
    largest = pl.col("change_ns").abs().arg_max()
    examples = [pl.col(name).get(largest) for name in ("path", "shapes") if name not in group]
    summed = changed.group_by(group, maintain_order=True).agg(*examples, *(pl.col(name).sum() for name in values))
    return summed.with_row_index("group")


def _judge(grouped: pl.DataFrame, margins: Values | None, step: Change, limits: Thresholds) -> pl.DataFrame:
    change, before = pl.col("change_ns"), pl.col("before_ns")
    margin = pl.Series("margin", [None] * grouped.height if margins is None else margins, pl.Float64)
    min_ns = contributions.MIN_STEP_RATIO * step.reference
    effect = pl.max_horizontal(limits.min_change_ratio * before, pl.lit(min_ns))
    same = pl.max_horizontal(
        significance.SAME_WITHIN * before, pl.lit(significance.MIN_CONTAINER_SHARE * step.reference)
    )
    total = step.candidate - step.reference
    with_interval = grouped.with_columns(margin).with_columns(
        (change - pl.col("margin")).alias("low_ns"),
        (change + pl.col("margin")).alias("high_ns"),
        (change / total if abs(total) >= _MIN_CHANGE_NS else pl.lit(None, pl.Float64)).alias("contribution_ratio"),
    )
    low, high = pl.col("low_ns"), pl.col("high_ns")
    verdict = (
        pl.when((low > 0) & (change >= effect)).then(pl.lit(Verdict.WORSE.value))
        .when((high < 0) & (change <= -effect)).then(pl.lit(Verdict.BETTER.value))
        .when(pl.max_horizontal(low.abs(), high.abs()) <= same).then(pl.lit(Verdict.SAME.value))
        .otherwise(pl.lit(Verdict.INCONCLUSIVE.value))
    )  # fmt: skip
    is_absent = {side: (pl.col(f"{side}_count") == 0) & (pl.col(f"{side}_ns") == 0) for side in _SIDES}
    status = (
        pl.when(is_absent["before"]).then(pl.lit(NEW))
        .when(is_absent["after"]).then(pl.lit(GONE))
        .when(verdict == Verdict.SAME.value).then(pl.lit(SAME))
        .when(change >= effect).then(pl.lit(SLOWER))
        .when(change <= -effect).then(pl.lit(FASTER))
        .otherwise(pl.lit(SAME))
    )  # fmt: skip
    with_verdict = with_interval.with_columns(verdict.alias("verdict"), status.alias("status"))
    present = with_verdict.filter(~(is_absent["before"] & is_absent["after"]))
    return present.sort(change.abs(), "part", descending=[True, False], maintain_order=True)
