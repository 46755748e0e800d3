"""Two runs, one question: did it get better or worse, or can these steps not tell?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.errors import NotComparableError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.regression.change import Change, Values, compare_samples
from tracekit.regression.samples import LOWER_IS_BETTER, samples

_MUST_AGREE = ("model", "world_size", "device", "device_name")
_TOLD = ("arguments", "versions", "mesh", "simulated")
_EXPECTED_TO_DIFFER = ("arguments.strategy", "arguments.out")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, eq=False)
class RunSamples:
    """One side of a comparison. `samples` has columns rank, step, metric, value, as `analysis.samples` gives them."""

    name: str
    manifest: Mapping[str, object]
    samples: pl.DataFrame

    @classmethod
    def of(cls, run: Run) -> "RunSamples":
        """Return a run as a side."""
        return cls(run.name, run.manifest, run.table(samples))


@dataclass(frozen=True)
class Comparison:
    """All metrics that both sides have, in the order of `LOWER_IS_BETTER`, and what to know when reading them."""

    reference: str
    candidate: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    confidence: float = 0.95
    """Of the intervals."""


def compare(reference: RunSamples, candidate: RunSamples, *, allow_different: bool = False) -> Comparison:
    """Compare two runs. Raises NotComparableError where model, world size or device differ, unless allowed.

    The strategy may differ: it is what one compares. Only ranks that both sides have are compared.
    """
    notes = _differences(reference, candidate, allow_different=allow_different)
    ranks, rank_notes = _common_ranks(reference, candidate, allow_different=allow_different)
    a, b = (job_samples(side.samples, ranks) for side in (reference, candidate))
    step_ns = float(np.median(a["step_time_ns"])) if "step_time_ns" in a else None
    changes = [
        compare_samples(metric, a[metric], b[metric], step_ns=step_ns)
        for metric in LOWER_IS_BETTER
        if metric in a and metric in b
    ]
    if not changes:
        raise NotComparableError(
            f"{reference.name} and {candidate.name} have no metric in common: neither marks steps; "
            "call profiler.step() after each optimizer step when recording"
        )
    return Comparison(reference.name, candidate.name, tuple(changes), (*notes, *rank_notes))


def job_samples(table: pl.DataFrame, ranks: Sequence[int] | None = None) -> dict[str, Values]:
    """Return the samples of a job as a whole, by metric, one per step (for saves per step that is saved after).

    Of times, a step's sample is that of its worst rank, for all ranks wait for it; of shares, counts, sizes and the
    time of processors, which is paid for on each, it is the mean over ranks.
    """
    if ranks is not None:
        table = table.filter(pl.col("rank").is_in(ranks))
    worst = pl.col("metric").str.ends_with("_ns") & (pl.col("metric") != conventions.CPU_TIME_METRIC)
    per_step = (
        table.group_by("metric", "step")
        .agg(pl.when(worst.first()).then(pl.col("value").max()).otherwise(pl.col("value").mean()).alias("value"))
        .sort("metric", "step")
    )
    return {
        str(metric): rows["value"].to_numpy().astype(np.float64)
        for (metric,), rows in per_step.group_by("metric", maintain_order=True)
    }


def _differences(reference: RunSamples, candidate: RunSamples, *, allow_different: bool) -> list[str]:
    """Return notes on what differs between the manifests; raise where that makes speed incomparable."""
    a, b = (_flat({"simulated": False, **side.manifest}) for side in (reference, candidate))
    notes: list[str] = []
    refused: list[str] = []
    for field in sorted(a.keys() | b.keys()):
        root = field.partition(".")[0]
        if root not in (*_MUST_AGREE, *_TOLD) or field in _EXPECTED_TO_DIFFER or a.get(field) == b.get(field):
            continue
        text = f"{field} differs: {_shown(a, field)} in {reference.name}, {_shown(b, field)} in {candidate.name}"
        # What one side's manifest does not know is no difference, only less to be sure of.
        (refused if root in _MUST_AGREE and field in a and field in b else notes).append(text)
    if refused and not allow_different:
        raise NotComparableError(f"{'; '.join(refused)}; pass --allow-different to compare all the same")
    return refused + notes


def _flat(manifest: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return what a manifest knows by dotted name: {"model": {"layers": 2}} is {"model.layers": 2}. No nulls."""
    flat: dict[str, object] = {}
    for key, value in manifest.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _shown(manifest: Mapping[str, object], field: str) -> str:
    if field not in manifest:
        return "not known"
    text = str(manifest[field])
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _common_ranks(
    reference: RunSamples, candidate: RunSamples, *, allow_different: bool
) -> tuple[list[int] | None, list[str]]:
    """Return the ranks to compare (None for all of each side's) and notes on those left out."""
    a, b = (set(side.samples["rank"].unique().to_list()) for side in (reference, candidate))
    if a == b:
        return None, []
    told = f"{reference.name} has ranks {units.ranges(a)}, {candidate.name} {units.ranges(b)}"
    if a & b:
        return sorted(a & b), [f"{told}: only ranks {units.ranges(a & b)} are compared"]
    if not allow_different:
        raise NotComparableError(f"{told}: no rank in common; pass --allow-different to compare all the same")
    return None, [f"{told}: all of each are compared"]
