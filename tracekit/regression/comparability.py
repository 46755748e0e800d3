"""What differs between two runs other than their speed: device, software, size of the job, and the work itself."""

from collections.abc import Mapping

import polars as pl

from tracekit.analysis.compute import flops
from tracekit.analysis.quality import trace_quality
from tracekit.model import schema
from tracekit.model.environment import DEVICE
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact

WORK_FACTS: tuple[TraceFact, ...] = (flops.products, flops.operator_calls)
FACTS: tuple[TraceFact, ...] = (trace_quality.versions, *WORK_FACTS)
WORK_COLUMNS = {"kind": pl.String, "name": pl.String, "shapes": pl.String, "share": pl.Float64}
FLOPS, CALLS = "flops", "calls"
_KINDS = (
    (
        FLOPS,
        0.5,
        "The work differs: {ratio} of the floating-point operations are in products of the same shapes, so fewer "
        "operations or a shorter step are no improvement by themselves",
    ),
    (
        CALLS,
        0.7,
        "The work differs: {ratio} of the operator calls have the same names, as of another model or after "
        "compilation, so less work or a shorter step are no improvement by themselves",
    ),
)
_MOST_WORK = 60
_LABELS = {DEVICE: "device", "world_size": "world size"}


def environment(run: Run) -> dict[str, str]:
    """Return device, software and size of the job as the headers of most ranks' traces state them, by name.

    The device comes first.
    """
    counts = run.table(trace_quality.versions).group_by("name", "value").len()
    common = counts.sort("len", "value", descending=[True, False]).unique("name", keep="first", maintain_order=True)
    values: dict[str, str] = dict(common.select("name", "value").iter_rows())
    return {name: values[name] for name in sorted(values, key=lambda name: (name not in _LABELS, name))}


def environment_differences(
    reference: Mapping[str, str], candidate: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    """Return in words where both runs state a device or version and these differ, the device first."""
    shared = [name for name in reference if name in candidate and reference[name] != candidate[name]]
    return [
        f"{_LABELS.get(name, name)} differs: {reference[name]} in {names[0]}, {candidate[name]} in {names[1]}"
        for name in shared
    ]


def work_shares(run: Run) -> pl.DataFrame:
    """Return the work of a run's steps: shares of floating-point operations by product, of calls by operator.

    Columns WORK_COLUMNS; shapes are null for calls. One row per product of the same op and shapes, and per operator, of
    each kind the largest.
    """
    products = run.table(flops.products).group_by("name", "shapes").agg(pl.col("flops").sum().alias("amount"))
    calls = run.table(flops.operator_calls).group_by("name").agg(pl.col("calls").sum().alias("amount"))
    parts = [_largest(products, FLOPS), _largest(calls.with_columns(shapes=pl.lit(None, pl.String)), CALLS)]
    return pl.concat(parts)


def work_difference(reference: pl.DataFrame, candidate: pl.DataFrame) -> str | None:
    """Return in words that the work of two runs differs, by their `work_shares`; None if not, or if it is not known.

    Products of the same op and shapes decide, where both runs recorded shapes: fewer of the same ones, such as without
    recomputation, are the same work, and those of another model or batch size are not. Otherwise operators decide: runs
    of one model have 81% of their calls in common under different strategies, those of different models 14% to 63%.
    """
    for kind, least_ratio, what in _KINDS:
        both = [side.filter(pl.col("kind") == kind) for side in (reference, candidate)]
        if any(side.is_empty() for side in both):
            continue
        shared = both[0].join(both[1], on=["name", "shapes"], nulls_equal=True)
        ratio = float(shared.select(pl.min_horizontal("share", "share_right").sum()).item())
        return None if ratio >= least_ratio else what.format(ratio=f"{ratio:.0%}")
    return None


def no_work() -> pl.DataFrame:
    """Return the table of `work_shares` of a run of which nothing is known."""
    return pl.DataFrame(schema=WORK_COLUMNS)


def _largest(sums: pl.DataFrame, kind: str) -> pl.DataFrame:
    some = sums.filter(pl.col("amount") > 0).with_columns((pl.col("amount") / pl.col("amount").sum()).alias("share"))
    ordered = some.sort("share", "name", "shapes", descending=[True, False, False]).head(_MOST_WORK)
    return schema.select(ordered.with_columns(pl.lit(kind).alias("kind")), WORK_COLUMNS)
