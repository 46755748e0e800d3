"""Recordings on two sides, one question: did it get better or worse, or is the difference inconclusive?"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.errors import NotComparableError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.regression import baseline, metrics, step_separation
from tracekit.regression.baseline import Baseline, flat, shown
from tracekit.regression.metrics import BYTES, COUNT, FLOP, NS, Metric, Scope, metric_of
from tracekit.regression.samples import Values, job_series, run_samples
from tracekit.regression.significance import MIN_PAIRED_STEPS, MetricSides, compare_metrics
from tracekit.regression.thresholds import CONFIDENCE, Change, Thresholds, Verdict

_COMPUTE = "compute_ns"

_MUST_AGREE = ("model", "world_size", "device", "device_name")
_NOTED = ("arguments", "versions", "mesh", "simulated")
_SeriesByMetric: TypeAlias = Mapping[str, Sequence[tuple[pl.Series, Values]]]
"""Steps and samples of each recording, by metric."""
_WORK_UNITS = (FLOP, BYTES, COUNT)
_EXPECTED_TO_DIFFER = ("arguments.strategy", "arguments.out")


@dataclass(frozen=True, eq=False)
class RunSamples:
    """One side of a comparison: a run, or the recordings of a baseline.

    `samples` has the columns of `samples.run_samples`; `repeats` are those of further recordings.
    """

    name: str
    manifest: Mapping[str, object]
    samples: pl.DataFrame
    repeats: tuple[pl.DataFrame, ...] = ()
    is_baseline: bool = False
    """Whether `manifest` is a baseline's fingerprint, which leaves out what may differ."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Device, software and size of the job, as the traces state them."""
    work: pl.DataFrame = dataclasses.field(default_factory=partial(pl.DataFrame, schema=baseline.WORK_COLUMNS))
    """What its steps compute, as `baseline.work_shares` has it."""

    @classmethod
    def of(cls, run: Run, name: str = "") -> "RunSamples":
        """Return the samples of a run, under its own name or another."""
        samples, environment = run_samples(run), baseline.environment(run)
        work = baseline.work_shares(run)
        return cls(name or run.name, run.manifest, samples, environment=environment, work=work)

    @classmethod
    def of_baseline(cls, baseline: Baseline) -> "RunSamples":
        """Return the samples of a baseline's recordings."""
        first, *repeats = (recording.samples for recording in baseline.recordings)
        work = baseline.recordings[0].shares
        return cls(baseline.name, baseline.fingerprint, first, tuple(repeats), is_baseline=True, work=work)

    @property
    def recordings(self) -> tuple[pl.DataFrame, ...]:
        """Return the samples of each recording."""
        return (self.samples, *self.repeats)


@dataclass(frozen=True)
class Comparison:
    """All metrics that both sides have, in the order of the registry, and what to know when reading them."""

    reference: str
    candidate: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE
    """Of the intervals."""
    differences: tuple[str, ...] = ()
    """Those of the notes that say how device, software, model or work differ: to be read before the numbers."""
    rank_notes: tuple[str, ...] = ()
    """Those of the notes that say which ranks are compared, where the sides do not have the same."""


def compare(
    reference: RunSamples, candidate: RunSamples, *, allow_different: bool = False, thresholds: Thresholds | None = None
) -> Comparison:
    """Compare two runs. Raises NotComparableError where model, world size or device differ, unless allowed.

    The strategy may differ: it is what one compares. Only ranks that both sides have are compared.
    """
    names = (reference.name, candidate.name)
    stated = _differences(reference, candidate, allow_different=allow_different)
    recorded = baseline.environment_differences(reference.environment, candidate.environment, names)
    work = baseline.work_difference(reference.work, candidate.work)
    notes = [*recorded, *([] if work is None else [work]), *stated]
    if not allow_different and not _ranks(reference.samples) & _ranks(candidate.samples):
        a, b = (units.ranges(_ranks(side.samples)) for side in (reference, candidate))
        if reference.samples.height and candidate.samples.height:
            raise NotComparableError(
                f"{reference.name} has ranks {a}, {candidate.name} {b}: no rank in common; "
                "pass --allow-different to compare anyway"
            )
    compared = compare_groups(
        {reference.name: reference.recordings},
        {candidate.name: candidate.recordings},
        notes=notes,
        on_host=(reference.manifest.get("device") or "cpu") == "cpu",
        thresholds=thresholds,
    )
    changes = compared.changes if work is None else tuple(_without_less_work(compared.changes))
    return replace(compared, changes=changes, differences=tuple(notes))


def compare_groups(
    reference: Mapping[str, Sequence[pl.DataFrame]],
    candidate: Mapping[str, Sequence[pl.DataFrame]],
    *,
    notes: Sequence[str] = (),
    on_host: bool,
    thresholds: Thresholds | None = None,
) -> Comparison:
    """Compare the recordings of two sides, each by its name, and each recording by its samples.

    `on_host` is whether training ran on CPUs: then times are compared with the CPU time that the training received.
    Raises NotComparableError where the sides have no metric in common.
    """
    thresholds = thresholds or Thresholds()
    ((a_name, a_tables),), ((b_name, b_tables),) = reference.items(), candidate.items()
    ranks, rank_notes = _common_ranks(a_name, a_tables, b_name, b_tables)
    a, b = (_by_metric(tables, ranks) for tables in (a_tables, b_tables))
    shared = [metric for metric in metrics.compared_metrics() if metric.key in a and metric.key in b]
    changes = tuple(compare_metrics([_sides(metric, a, b) for metric in shared], thresholds))
    if not changes:
        raise NotComparableError(
            f"{b_name} and {a_name} have no metric in common: one of them marks no steps; "
            "call profiler.step() after each optimizer step when recording"
        )
    changes, separated = step_separation.decide(changes, a_tables, b_tables, ranks, thresholds)
    starved: tuple[str, ...] = ()
    if on_host:
        changes, starved = without_starved(changes, a_tables, b_tables, thresholds)
    remarks = (*notes, *rank_notes, *_clock_notes(changes, (a_name, b_name)), *separated, *starved)
    return Comparison(a_name, b_name, changes, remarks, thresholds.confidence, rank_notes=tuple(rank_notes))


def stretch(samples: pl.DataFrame) -> float | None:
    """Return the time in which a step computes over its CPU time, the median over ranks and steps.

    Other threads of the process run too, so that it is mostly below 1. None where the recording does not have both.
    """
    metric, value = pl.col("metric"), pl.col("value")
    # The log of the CPU time has no windows.
    per_step = samples.lazy().filter(metric.is_in([_COMPUTE, conventions.CPU_TIME_METRIC])).group_by("rank", "step")
    compute, cpu = (value.filter(metric == name).median() for name in (_COMPUTE, conventions.CPU_TIME_METRIC))
    ratios = per_step.agg(compute.alias("compute"), cpu.alias("cpu")).filter(pl.col("cpu") > 0)
    median = ratios.select((pl.col("compute") / pl.col("cpu")).median()).collect().item()
    return None if median is None else float(median)


def without_starved(
    changes: tuple[Change, ...],
    reference: Sequence[pl.DataFrame],
    candidate: Sequence[pl.DataFrame],
    thresholds: Thresholds,
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the changes, where times that grew no more than computing is stretched are inconclusive, and a note on it.

    The least stretched recording of the candidate is compared with the most stretched of the reference.
    """
    before, after = (_stretches(side) for side in (reference, candidate))
    if _is_unknown(len(reference), (*before, *after), thresholds):
        return _without_times(changes, thresholds)
    if not before or not after or not max(before) or min(after) <= thresholds.max_cpu_stretch * max(before):
        return changes, ()
    factor = min(after) / max(before)
    explained = {change.metric for change in changes if _is_explained(change, factor)}
    if not explained:
        return changes, ()
    note = (
        f"compute takes {factor:.1f} times as long by the clock for the same CPU time as in the reference: "
        "another program used the processors, or compute runs on fewer threads; times that grew by no more are "
        "inconclusive, so record again on a machine as free as the reference's"
    )
    revised = (replace(c, verdict=Verdict.INCONCLUSIVE) if c.metric in explained else c for c in changes)
    return tuple(revised), (note,)


def is_unknown(reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame], thresholds: Thresholds) -> bool:
    """Return whether a recording was starved, and too few of the reference show how much such recordings differ."""
    return _is_unknown(len(reference), _stretches((*reference, *candidate)), thresholds)


def _clock_notes(changes: Iterable[Change], names: tuple[str, str]) -> Iterator[str]:
    """Yield what a significant change of the GPUs' clock does to the step, where there is one."""
    for change in changes:
        if change.metric != metrics.SM_CLOCK or change.verdict not in (Verdict.BETTER, Verdict.WORSE):
            continue
        metric, (before, after) = metrics.metric_of(change.metric), names
        stated = f"{metric.text(change.reference)} in {before}, {metric.text(change.candidate)} in {after}"
        slower, faster = (after, before) if change.verdict is Verdict.WORSE else (before, after)
        low, high = sorted((change.reference, change.candidate))
        times = f"{high / low:.2f} times as long in {slower} as in {faster}" if low > 0 else f"longer in {slower}"
        yield (
            f"the SM clock of the slowest GPU differs: {stated}; kernels that it limits take {times}; "
            "the throttle reasons are in tracekit summary --by step"
        )


def _without_less_work(changes: Iterable[Change]) -> Iterator[Change]:
    """Return the changes without the verdict that less work is better: other work needs other amounts."""
    for change in changes:
        metric = metrics.metric_of(change.metric)
        is_less = metric.scope is Scope.STEP and metric.unit in _WORK_UNITS and change.verdict is Verdict.BETTER
        yield replace(change, verdict=Verdict.INCONCLUSIVE) if is_less else change


def _differences(reference: RunSamples, candidate: RunSamples, *, allow_different: bool) -> list[str]:
    """Return notes on what differs between the manifests; raise where that makes speed incomparable."""
    a, b = (flat({"simulated": False, **side.manifest}) for side in (reference, candidate))
    fields = a.keys() & b.keys() if reference.is_baseline or candidate.is_baseline else a.keys() | b.keys()
    unknown = {name: _unknown_groups(fields, side) for name, side in ((reference.name, a), (candidate.name, b))}
    notes = [f"{', '.join(sorted(groups))}: not known in {name}" for name, groups in unknown.items() if groups]
    in_one = frozenset().union(*unknown.values())
    refused: list[str] = []
    for field in sorted(fields):
        root = field.partition(".")[0]
        if root not in (*_MUST_AGREE, *_NOTED) or field in _EXPECTED_TO_DIFFER or a.get(field) == b.get(field):
            continue
        if root in in_one:
            continue
        text = f"{field} differs: {shown(a, field)} in {reference.name}, {shown(b, field)} in {candidate.name}"
        # What one manifest lacks is not a difference, only a lesser certainty.
        (refused if root in _MUST_AGREE and field in a and field in b else notes).append(text)
    if refused and not allow_different:
        raise NotComparableError(f"{'; '.join(refused)}; pass --allow-different to compare anyway")
    return refused + notes


def _unknown_groups(fields: Iterable[str], side: Mapping[str, object]) -> frozenset[str]:
    """Return the groups of fields, such as "arguments" of "arguments.batch", of which one side states none."""
    groups, stated = (frozenset(field.partition(".")[0] for field in names if "." in field) for names in (fields, side))
    return (groups - stated) & {*_MUST_AGREE, *_NOTED}


def _sides(metric: Metric, reference: _SeriesByMetric, candidate: _SeriesByMetric) -> MetricSides:
    containers = reference.get(metric.part_of or "")
    both = (*reference[metric.key], *candidate[metric.key])
    first, _ = both[0]
    return MetricSides(
        metric,
        reference=[values for _, values in reference[metric.key]],
        candidate=[values for _, values in candidate[metric.key]],
        total=float(np.mean([np.median(values) for _, values in containers])) if containers else None,
        is_paired=len(first) >= MIN_PAIRED_STEPS and all(steps.equals(first) for steps, _ in both),
    )


def _by_metric(tables: Sequence[pl.DataFrame], ranks: Sequence[int] | None) -> _SeriesByMetric:
    recordings: dict[str, list[tuple[pl.Series, Values]]] = {}
    for table in tables:
        for metric, series in job_series(table, ranks).items():
            recordings.setdefault(metric, []).append(series)
    return recordings


def _common_ranks(
    a_name: str, a_tables: Sequence[pl.DataFrame], b_name: str, b_tables: Sequence[pl.DataFrame]
) -> tuple[list[int] | None, list[str]]:
    """Return the ranks to compare (None for all of each side's) and notes on those left out."""
    a, b = ([_ranks(table) for table in tables] for tables in (a_tables, b_tables))
    common = set.intersection(*a, *b)
    if all(ranks == common for ranks in (*a, *b)):
        return None, []
    text = f"{a_name} has ranks {units.ranges(set.union(*a))}, {b_name} {units.ranges(set.union(*b))}"
    if not common:
        return None, [f"{text}: all of each are compared"]
    return sorted(common), [f"{text}: only ranks {units.ranges(common)} are compared"]


def _ranks(samples: pl.DataFrame) -> set[int]:
    return set(samples["rank"].unique().to_list())


def _is_unknown(references: int, stretches: Sequence[float], thresholds: Thresholds) -> bool:
    return references < thresholds.min_cpu_recordings and max(stretches, default=0.0) > thresholds.max_cpu_stretch


def _stretches(recordings: Sequence[pl.DataFrame]) -> list[float]:
    return [ratio for ratio in map(stretch, recordings) if ratio is not None]


def _without_times(changes: tuple[Change, ...], thresholds: Thresholds) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the changes, where times that are worse or better are inconclusive, and a note on it."""
    changed = [c.metric for c in changes if c.verdict in (Verdict.WORSE, Verdict.BETTER)]
    timed = {metric for metric in changed if metric_of(metric).unit.is_time}
    if not timed:
        return changes, ()
    note = (
        f"compute takes more than {thresholds.max_cpu_stretch:g} times its CPU time, so other programs used the "
        f"processors; fewer than {thresholds.min_cpu_recordings} recordings in the reference do not show how much "
        "times differ then, and those that are changed are inconclusive"
    )
    revised = (replace(c, verdict=Verdict.INCONCLUSIVE) if c.metric in timed else c for c in changes)
    return tuple(revised), (note,)


def _is_explained(change: Change, factor: float) -> bool:
    """Return whether a time is worse by the clock, but not significantly by more than a factor."""
    metric = metric_of(change.metric)
    is_timed = metric.unit.is_time and not metric.is_cpu_time
    if not is_timed or change.verdict is not Verdict.WORSE or change.low is None or change.high is None:
        return False
    return 1 + change.low <= factor if metric.unit is NS else (1 + change.high) * factor >= 1
