"""What differs between two runs besides their speed: device, software, size of the job, and the work itself."""

from collections.abc import Mapping

import polars as pl

from tracekit.analysis.compute import flops
from tracekit.analysis.quality import trace_quality
from tracekit.model.environment import DEVICE
from tracekit.model.run import Run
from tracekit.model.trace import Fact

FACTS: tuple[Fact, ...] = (trace_quality.versions, flops.products)
WORK_DIFFERS = "The work differs"
_SAME_WORK_RATIO = 0.5
_LABELS = {DEVICE: "device", "world_size": "world size"}


def environment(run: Run) -> dict[str, str]:
    """Return what the headers of a run's traces state of device, software and size of the job: by name, by most ranks.

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


def shared_work_ratio(reference: Run, candidate: Run) -> float | None:
    """Return the share of floating-point operations that both runs spend on products of the same op and shapes.

    Fewer repetitions of the same products, such as without recomputation, keep it high; another model or batch size
    makes it small. None where a run recorded no shapes.
    """
    both = [_shares(run) for run in (reference, candidate)]
    if any(shares.is_empty() for shares in both):
        return None
    shared = both[0].join(both[1], on=["name", "shapes"])
    return float(shared.select(pl.min_horizontal("share", "share_right").sum()).item())


def work_difference(reference: Run | None, candidate: Run | None) -> str | None:
    """Return in words that two runs do different work; None if they do the same, or if it is not known."""
    ratio = None if reference is None or candidate is None else shared_work_ratio(reference, candidate)
    if ratio is None or ratio >= _SAME_WORK_RATIO:
        return None
    return (
        f"{WORK_DIFFERS}: {ratio:.0%} of the floating-point operations are in products of the same shapes, so fewer "
        "operations or a shorter step are no improvement by themselves"
    )


def _shares(run: Run) -> pl.DataFrame:
    sums = run.table(flops.products).group_by("name", "shapes").agg(pl.col("flops").sum())
    return sums.filter(pl.col("flops") > 0).with_columns((pl.col("flops") / pl.col("flops").sum()).alias("share"))
