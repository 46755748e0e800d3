"""Why some steps of some ranks take longer than others: extra calls, larger shapes, slower calls, or a late host."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import communication_gap_causes as gap_causes
from tracekit.analysis.compute import call_matching, step_charges
from tracekit.analysis.time import breakdown
from tracekit.model import schema

EXTRA, LARGER, SLOWER, LONGER, LATE = KINDS = ("extra", "larger", "slower", "longer", "late")
"""Calls that the others do not have; the same calls with larger shapes; the same calls, slower on the device; calls
that take longer where nothing shows whether they are larger or slower; the same calls, later (launch gaps, waits)."""

COLUMNS = schema.columns(
    "kind part operator kernel module path line cause detail excess_ns count count_change is_new size_ratio time_ratio",
    **dict.fromkeys(("count", "count_change"), pl.Float64),
    **dict.fromkeys(("kind", "part", "operator", "kernel", "module", "path", "line", "cause", "detail"), pl.String),
)
_EXACT_COLUMNS = COLUMNS | {"excess_ns": pl.Float64}
CELL = ("window", "rank", "step", "device")
_IDENTITY = ("part", "operator")
_PLACE = ("module", "chain")
"""The chain of dispatcher calls and not the path: annotations can have names that differ by rank, such as hashes."""
_NUMBERED_KERNEL = r"^(triton_\w+?)_\d+$"
"""Kernels of the compiler have their place in the graph as a number, which another graph of the same model shifts."""
_SITE = (*_IDENTITY, *_PLACE)
_WAITS = (gap_causes.COLLECTIVE, gap_causes.PEER)
_KERNEL, _GAP = ("call", "kernel", "size"), ("call", "cause", "detail")
_MEASURES = ("calls", "count", "work_ns", "dur_ns")
_NUMBER = re.compile(r"\d+")
_MIN_SLOWDOWN = 1.03
"""Less is within how much the same kernels vary between devices of one kind (ClockDrop uses the same)."""
_UNIFORM_RATIO = 0.75
"""Share of the time that is in kernels which are slower by a third of the slowdown, where a lower clock is the cause:
kernels that are bound by memory slow down less."""
_UNIFORM_KERNELS = 5
_SAME_SIZE = 1e-3


@dataclass(frozen=True, eq=False)
class ExcessTime:
    """What the steps of some ranks take longer for than others, per step."""

    total_ns: int
    """Mean time of the late steps without waiting, less that of the others; the rows sum to it exactly."""
    rows: pl.DataFrame
    """Columns COLUMNS, the largest excess first: one row per kind, operator, kernel, module and path that differs.

    count is the number of activities of a late step that it concerns (those of the others, where they alone have them),
    count_change the number of calls that a step of the late ranks has more, is_new whether the others have none;
    line is a frame of the user's code, as recorded; size_ratio how many times as large the inputs are, time_ratio how
    many times as long a call of the same size takes.
    """
    steps: int
    """Number of late steps that were compared."""
    slowdown: float
    """How many times as long calls of the same size take, over all of them; 1 where no size is the same."""
    is_uniform: bool
    """Whether all kernels are slower alike, as on a device with a lower clock."""

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Excess of each of KINDS in ns, the largest first; they sum to total_ns."""
        sums = dict(self.rows.group_by("kind").agg(pl.col("excess_ns").sum()).iter_rows())
        return dict(sorted(((kind, int(sums.get(kind, 0))) for kind in KINDS), key=lambda item: -item[1]))

    @property
    def largest(self) -> str:
        """The kind with most of the excess."""
        return next(iter(self.kinds))

    @property
    def size_ratio(self) -> float | None:
        """How many times as large the inputs of larger calls are, the median by their excess; None without any."""
        larger = self.rows.filter(pl.col("excess_ns") > 0, kind=LARGER).drop_nulls("size_ratio").sort("size_ratio")
        if larger.is_empty():
            return None
        reached = larger["excess_ns"].cum_sum()
        return float(larger["size_ratio"][int((reached * 2 < reached[-1]).sum())])


def own_time(charges: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `step_charges` in which a rank does not wait for others: no communication, no wait for it.

    What a rank takes longer for shortens its own waits by as much, since ranks end a step together.
    """
    return charges.filter(~is_wait())


def is_wait() -> pl.Expr:
    """Whether a row of `step_charges` is communication, or idle time in which a rank waits for it."""
    is_idle = pl.col("cause").is_in(_WAITS).fill_null(value=False)
    return (pl.col("part") == breakdown.EXPOSED_COMMUNICATION) | is_idle


def split(late: pl.DataFrame, others: pl.DataFrame) -> ExcessTime:
    """Split by how much the mean step of `late` is longer than that of `others`, exactly.

    Both have the columns of `step_charges.step_charges` and window and rank: of some ranks and steps, of one run or of
    two, without rows that are not to be compared (see `own_time`). Steps count alike.

    Calls are matched by operator, module and path (`call_matching`). Of a call that the late steps have more often,
    those of sizes that the others do not have are extra first; idle time before extra calls belongs to them. The
    same kernel at the same size is slower, or faster, by the difference of its times. Calls of other sizes that remain
    are larger: by the difference to what they take instead, without the slowdown of the same calls. The size is the
    shapes of the operator's inputs; where they were not recorded, the grid of the kernel; of a copy or collective its
    bytes. Where nothing shows a size, the kind is `longer`, or `slower` if all kernels are slower alike. Other idle
    time is late.
    """
    sides = [_Side.of(charges) for charges in (late, others)]
    matched = call_matching.match_calls(sides[0].sites(), sides[1].sites(), _IDENTITY, _PLACE)
    kernels = _join_sides([side.busy(sites) for side, sites in zip(sides, matched, strict=True)], _KERNEL)
    idle = _join_sides([side.idle(sites) for side, sites in zip(sides, matched, strict=True)], _GAP)
    slowdown, is_uniform = _slowdown(kernels)
    calls = _calls(kernels)
    kernels = kernels.join(calls, on="call", maintain_order="left")
    parts = (
        _extra_rows(kernels),
        _same_size_rows(kernels, is_uniform=is_uniform),
        *_other_size_rows(kernels, slowdown if is_uniform else 1.0),
        *_idle_rows(idle.join(calls, on="call", how="left", nulls_equal=True, maintain_order="left")),
    )
    rows = schema.concat([schema.conform(part, _EXACT_COLUMNS) for part in parts if part.height], _EXACT_COLUMNS)
    total_ns = round(sides[0].total_ns - sides[1].total_ns)
    excess_ns = apportion(rows["excess_ns"].to_numpy(), total_ns)
    whole = schema.select(rows.with_columns(pl.Series("excess_ns", excess_ns)), COLUMNS)
    differing = whole.filter(pl.col("excess_ns") != 0)
    order = pl.col("excess_ns"), pl.concat_str(pl.col("kind", "operator", "kernel").fill_null(""))
    return ExcessTime(total_ns, differing.sort(*order, descending=[True, False]), sides[0].cells, slowdown, is_uniform)


def apportion(amounts: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Round amounts to whole numbers that sum to `total`: those with the largest remainders are rounded up.

    >>> apportion(np.array([0.4, 0.4, 0.2]), 1).tolist()
    [1, 0, 0]
    """
    whole = np.floor(amounts).astype(np.int64)
    missing = total - int(whole.sum())
    order = np.argsort(whole - amounts, kind="stable")
    quotient, rest = divmod(missing, max(1, len(whole)))
    whole[order] += quotient
    whole[order[:rest]] += 1
    return whole


@dataclass(frozen=True, eq=False)
class _Side:
    """The charges of some steps as a mean step: the time of a row over the number of steps."""

    rows: pl.DataFrame
    """Columns of `step_charges`, size; calls, count, work_ns and dur_ns per step."""
    cells: int

    @classmethod
    def of(cls, charges: pl.DataFrame) -> "_Side":
        cells = max(1, charges.select(pl.struct(CELL).n_unique()).item())
        # The extent distinguishes calls of the same shapes too, such as attention over packed sequences.
        has_size = pl.col("shapes").is_not_null() | pl.col("extent").is_not_null()
        size = pl.concat_str(pl.col("shapes", "extent").fill_null(""), separator=" ")
        key = [*_SITE, "kernel", "size", "cause", "detail"]
        part = pl.when(pl.col("part") == step_charges.IDLE).then(pl.lit(breakdown.COMPUTE)).otherwise("part")
        rows = charges.with_columns(
            size=pl.when(has_size).then(size),
            is_idle=pl.col("part") == step_charges.IDLE,
            part=part,
            operator=pl.col("operator").str.replace(_NUMBERED_KERNEL, "${1}"),
        )
        sums = rows.group_by(*key, "is_idle", maintain_order=True).agg(
            pl.col("order_ns").median(),
            pl.col("path", "line", "shapes", "extent").first(),
            *((pl.col(name).sum() / cells).alias(name) for name in _MEASURES),
        )
        return cls(sums, cells)

    @property
    def total_ns(self) -> float:
        return float(self.rows["dur_ns"].sum())

    def sites(self) -> pl.DataFrame:
        """Return what is called: one row per operator, module and path, in the order of the step."""
        busy = self.rows.filter(~pl.col("is_idle"))
        return busy.group_by(_SITE, maintain_order=True).agg(pl.col("order_ns").min(), pl.col("shapes").first())

    def busy(self, sites: pl.DataFrame) -> pl.DataFrame:
        """Return the work by call, kernel and size; `sites` has the number of each call."""
        rows = self._with_call(self.rows.filter(~pl.col("is_idle")), sites)
        sums = (pl.col(name).sum() for name in _MEASURES)
        return rows.group_by(_KERNEL, maintain_order=True).agg(
            pl.col(*_SITE, "path", "line", "shapes", "extent").first(), *sums
        )

    def idle(self, sites: pl.DataFrame) -> pl.DataFrame:
        """Return the idle time by the call that ends it (null for none), its cause and detail."""
        rows = self._with_call(self.rows.filter("is_idle"), sites)
        of_call = pl.col(*_SITE, "path", "line", "kernel").first()
        return rows.group_by(_GAP, maintain_order=True).agg(of_call, pl.col("dur_ns").sum())

    def _with_call(self, rows: pl.DataFrame, sites: pl.DataFrame) -> pl.DataFrame:
        return rows.join(sites.select(*_SITE, "call"), on=_SITE, how="left", nulls_equal=True, maintain_order="left")


def _join_sides(sides: Sequence[pl.DataFrame], key: Sequence[str]) -> pl.DataFrame:
    """Return both sides in one table: what names a row of either, and a_… and b_… measures, 0 where there are none."""
    measures = [name for name in _MEASURES if name in sides[0].columns]
    named = [
        side.rename({name: f"{prefix}_{name}" for name in measures}) for prefix, side in zip("ab", sides, strict=True)
    ]
    joined = named[0].join(
        named[1], on=key, how="full", coalesce=True, nulls_equal=True, suffix="_b", maintain_order="left_right"
    )
    names = [name for name in joined.columns if f"{name}_b" in joined.columns]
    values = [f"{prefix}_{name}" for prefix in "ab" for name in measures]
    return joined.with_columns(
        *(pl.coalesce(name, f"{name}_b").alias(name) for name in names),
        *(pl.col(f"{prefix}_dur_ns").is_not_null().alias(f"{prefix}_is_there") for prefix in "ab"),
        *(pl.col(name).fill_null(0.0) for name in values),
    ).drop(f"{name}_b" for name in names)


def _slowdown(kernels: pl.DataFrame) -> tuple[float, bool]:
    """Ratio of the times of the same kernels at the same sizes, and whether they all are slower alike."""
    both = kernels.filter(pl.col("a_count") > 0, pl.col("b_count") > 0, pl.col("b_work_ns") > 0)
    common = pl.min_horizontal("a_count", "b_count")
    times = both.select(
        "kernel",
        is_sized=pl.col("size").is_not_null(),
        late_ns=pl.col("a_work_ns") / pl.col("a_count") * common,
        usual_ns=pl.col("b_work_ns") / pl.col("b_count") * common,
    )
    by_name = times.group_by("kernel").agg(pl.col("late_ns", "usual_ns").sum(), pl.col("is_sized").all())
    usual_ns = float(by_name["usual_ns"].sum())
    if not usual_ns:
        return 1.0, False
    slowdown = float(by_name["late_ns"].sum()) / usual_ns
    is_slower = pl.col("late_ns") >= (1 + (slowdown - 1) / 3) * pl.col("usual_ns")
    slower = by_name.filter(is_slower)
    # Of unknown sizes most kernels must be slower: those of an optimizer do not depend on the batch.
    is_of_most = bool(by_name["is_sized"].all()) or slower.height >= _UNIFORM_RATIO * by_name.height
    is_uniform = (
        slowdown >= _MIN_SLOWDOWN
        and by_name.height >= _UNIFORM_KERNELS
        and float(slower["usual_ns"].sum()) >= _UNIFORM_RATIO * usual_ns
        and is_of_most
    )
    return slowdown, is_uniform


def _calls(kernels: pl.DataFrame) -> pl.DataFrame:
    """Calls of either side: call, and of those beyond the calls that both sides have at the same sizes the shares.

    extra_ratio and missing_ratio: for which the other side has no call; extra_idle_ratio and missing_idle_ratio: the
    same as a share of all calls of a side. size_ratio is how many times as large the inputs are, null where not known.
    """
    ratios = []
    for side, other, name in (("a", "b", "extra"), ("b", "a", "missing")):
        count = pl.col(f"{side}_calls").sum()
        more = (count - pl.col(f"{other}_calls").sum()).clip(0)
        beyond = (_beyond(side) * pl.col(f"{side}_calls")).sum()
        is_alone = ~pl.col(f"{other}_is_there").any()
        of_beyond, of_all = (
            pl.when(whole > 0).then((more / whole).clip(0, 1)).otherwise(0.0) for whole in (beyond, count)
        )
        ratios.append(pl.when(is_alone).then(1.0).otherwise(of_beyond).alias(f"{name}_ratio"))
        ratios.append(pl.when(is_alone).then(1.0).otherwise(of_all).alias(f"{name}_idle_ratio"))
    counts = kernels.group_by("call", maintain_order=True).agg(*ratios)
    differing = kernels.filter((_beyond("a") > 0) | (_beyond("b") > 0)).select("call").unique()
    sized = kernels.join(differing, on="call", how="semi", maintain_order="left")
    sizes = [(number, _size_ratio(rows)) for (number,), rows in sized.group_by("call", maintain_order=True)]
    size_ratio = pl.DataFrame(sizes, {"call": counts.schema["call"], "size_ratio": pl.Float64}, orient="row")
    return counts.join(size_ratio, on="call", how="left", maintain_order="left")


def _beyond(side: str) -> pl.Expr:
    """Share of a row's work, of one side, that goes beyond the number of calls of the same size on the other."""
    other = "b" if side == "a" else "a"
    count, other_count = pl.col(f"{side}_count"), pl.col(f"{other}_count")
    shared = (
        pl.when(count > 0)
        .then(pl.min_horizontal(count, other_count) / count)
        .otherwise(pl.col(f"{other}_is_there").cast(pl.Float64))
    )
    return 1 - shared


def _size_ratio(rows: pl.DataFrame) -> float | None:
    """How many times as large the inputs of a call are on the late side: by its shapes, else by grids of its kernels.

    None where neither shows it. Of shapes, the dimensions that differ decide: [4, 1400, 512] is 1.4 times as large as
    [4, 1000, 512].
    """
    if rows["shapes"].null_count() == 0:
        return _mean_ratio(rows, "shapes")
    same = rows.group_by("kernel").agg(pl.col("a_count", "b_count").sum())
    if same.filter((pl.col("a_count") == 0) | (pl.col("b_count") == 0)).height:
        return None  # grids of other kernels are of other tiles
    return None if rows["extent"].null_count() else _mean_ratio(rows, "extent")


def _mean_ratio(rows: pl.DataFrame, column: str) -> float | None:
    sizes = [np.array([int(text) for text in _NUMBER.findall(value)], np.float64) for value in rows[column].to_list()]
    for measure in ("calls", "count"):
        weights = [rows[f"{side}_{measure}"].to_numpy() for side in "ab"]
        if all(weight.sum() > 0 for weight in weights):
            break
    else:
        return None
    if column == "extent" or len({len(size) for size in sizes}) > 1:
        sizes = [np.array([math.prod(size.tolist())]) for size in sizes]
    dimensions = np.stack(sizes)
    (late, late_weight), (usual, usual_weight) = ((dimensions[weight > 0], weight[weight > 0]) for weight in weights)
    # One operator may be called with several kinds of shapes, such as both products of a linear layer's backward pass:
    # each is compared with those that agree with it in most dimensions.
    agreeing = np.stack([(usual == size).sum(axis=1) for size in late])
    is_alike = agreeing == agreeing.max(axis=1, keepdims=True)
    ratios = []
    for size, alike in zip(late, is_alike, strict=True):
        alike_size = np.average(usual[alike], axis=0, weights=usual_weight[alike])
        by_dimension = size[alike_size > 0] / alike_size[alike_size > 0]
        differing = by_dimension[np.abs(by_dimension - 1) > _SAME_SIZE]
        ratios.append(float(np.median(differing)) if len(differing) else 1.0)
    return float(np.average(ratios, weights=late_weight))


def _extra_rows(kernels: pl.DataFrame) -> pl.DataFrame:
    """Rows of calls that one side does not have, by call and kernel."""
    extra, missing = _beyond("a") * pl.col("extra_ratio"), _beyond("b") * pl.col("missing_ratio")
    usual_names = kernels.filter("b_is_there")["kernel"].unique()
    rows = kernels.with_columns(
        kind=pl.lit(EXTRA),
        excess_ns=extra * pl.col("a_dur_ns") - missing * pl.col("b_dur_ns"),
        count=extra * pl.col("a_count") + missing * pl.col("b_count"),
        count_change=extra * pl.col("a_count") - missing * pl.col("b_count"),
        is_new=~pl.col("kernel").is_in(usual_names.implode()),
    )
    return _by_kernel(rows.filter((pl.col("excess_ns") != 0) | (pl.col("count_change") != 0)))


def _same_size_rows(kernels: pl.DataFrame, *, is_uniform: bool) -> pl.DataFrame:
    """Rows of the same kernels at the same sizes, that take longer or shorter, by call and kernel."""
    late_ns, usual_ns = ((1 - _beyond(side)) * pl.col(f"{side}_dur_ns") for side in "ab")
    is_known = pl.col("size").is_not_null() | pl.lit(is_uniform)
    rows = kernels.with_columns(
        kind=pl.when(is_known).then(pl.lit(SLOWER)).otherwise(pl.lit(LONGER)),
        excess_ns=late_ns - usual_ns,
        late_ns=late_ns,
        usual_ns=usual_ns,
        count=(1 - _beyond("a")) * pl.col("a_count"),
        count_change=pl.lit(0.0),
        is_new=pl.lit(value=False),
    )
    sums = _by_kernel(rows.filter((pl.col("late_ns") > 0) | (pl.col("usual_ns") > 0)))
    ratio = pl.when(pl.col("usual_ns") > 0).then(pl.col("late_ns") / pl.col("usual_ns"))
    return sums.with_columns(time_ratio=ratio)


def _by_kernel(rows: pl.DataFrame) -> pl.DataFrame:
    sums = [name for name in ("excess_ns", "count", "count_change", "late_ns", "usual_ns") if name in rows.columns]
    return rows.group_by("kind", "call", "kernel", maintain_order=True).agg(
        pl.col("part", "operator", "module", "path", "line", "is_new").first(), pl.col(sums).sum()
    )


def _other_size_rows(kernels: pl.DataFrame, slowdown: float) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of calls that both sides have, of different sizes, by call; what the slowdown explains is apart."""
    late_ns = _beyond("a") * (1 - pl.col("extra_ratio")) * pl.col("a_dur_ns")
    usual_ns = _beyond("b") * (1 - pl.col("missing_ratio")) * pl.col("b_dur_ns")
    count = _beyond("a") * (1 - pl.col("extra_ratio")) * pl.col("a_count")
    beyond = kernels.with_columns(late_ns=late_ns, usual_ns=usual_ns, count=count)
    sums = (
        beyond.sort("late_ns", descending=True, maintain_order=True)
        .group_by("call", maintain_order=True)
        .agg(
            pl.col("kernel", "part", "operator", "module", "path", "line", "size_ratio").first(),
            pl.col("late_ns", "usual_ns", "count").sum(),
        )
    )
    differing = sums.filter((pl.col("late_ns") > 0) | (pl.col("usual_ns") > 0))
    slower_ns = pl.col("late_ns") * (1 - 1 / slowdown)
    rest_ns = pl.col("late_ns") / slowdown - pl.col("usual_ns")
    # More time at a smaller size is no larger input, nor is less at a larger one.
    is_sized = ((pl.col("size_ratio") - 1) * rest_ns > 0) & ((pl.col("size_ratio") - 1).abs() > _SAME_SIZE)
    by_size = pl.when(is_sized).then(pl.lit(LARGER)).otherwise(pl.lit(SLOWER))
    kind = pl.when(pl.col("size_ratio").is_null()).then(pl.lit(LONGER)).otherwise(by_size)
    rows = differing.with_columns(count_change=pl.lit(0.0), is_new=pl.lit(value=False))
    by_slowdown = rows.with_columns(kind=pl.lit(SLOWER), excess_ns=slower_ns).drop("size_ratio")
    return rows.with_columns(kind=kind, excess_ns=rest_ns), by_slowdown


def _idle_rows(idle: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of idle time before calls: that before extra calls belongs to them, the rest is late."""
    extra_ns = pl.col("extra_idle_ratio").fill_null(0.0) * pl.col("a_dur_ns")
    missing_ns = pl.col("missing_idle_ratio").fill_null(0.0) * pl.col("b_dur_ns")
    idle_ns = pl.col("a_dur_ns") - pl.col("b_dur_ns")
    # A device that runs nothing although work is queued is slower, not its host.
    kind = pl.when(pl.col("cause") == gap_causes.DEVICE_STALL).then(pl.lit(SLOWER)).otherwise(pl.lit(LATE))
    named = idle.drop("size_ratio").with_columns(part=pl.lit(step_charges.IDLE), count_change=pl.lit(0.0))
    new = named.with_columns(is_new=~pl.col("b_is_there"), kind=pl.lit(EXTRA), excess_ns=extra_ns - missing_ns)
    rest = named.with_columns(is_new=pl.lit(value=False), kind=kind, excess_ns=idle_ns - (extra_ns - missing_ns))
    return new.filter(pl.col("excess_ns") != 0), rest
