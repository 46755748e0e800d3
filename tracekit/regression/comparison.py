"""Recordings on two sides, one question: did it get better or worse, or is the difference inconclusive?"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.host.step_parts import fastest_calls
from tracekit.errors import NotComparableError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import baseline, contributions, metrics, numbers, step_separation
from tracekit.regression import call_changes as changes_of_calls
from tracekit.regression.baseline import Baseline, flat, shown
from tracekit.regression.call_changes import CallChanges
from tracekit.regression.contributions import Contribution, PartPlaces
from tracekit.regression.disturbance import Disturbance
from tracekit.regression.metric_sources import part_places
from tracekit.regression.metrics import BYTES, COUNT, FLOP, STEP_TIME, Metric, Scope
from tracekit.regression.numbers import Agreement
from tracekit.regression.samples import Values, job_samples, job_series, places_of_parts, run_samples, samples
from tracekit.regression.significance import MIN_PAIRED_STEPS, MetricSides, compare_metrics
from tracekit.regression.thresholds import CONFIDENCE, Change, Thresholds, Verdict

FACTS: tuple[TraceFact, ...] = (
    samples, part_places, fastest_calls, numbers.logged_numbers, *baseline.COMPARED_FACTS,
)  # fmt: skip
"""Facts that `RunSamples.of` needs, to be measured in one pass."""
_MUST_AGREE = ("model", "world_size", "device", "device_name")
_NOTED = ("arguments", "versions", "mesh", "simulated")
_SeriesByMetric: TypeAlias = Mapping[str, Sequence[tuple[pl.Series, Values]]]
"""Steps and samples of each recording, by metric."""
_WORK_UNITS = (FLOP, BYTES, COUNT)
_MOSTLY_RATIO = 0.5
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
    places: PartPlaces = dataclasses.field(default_factory=dict)
    """Lines of the program by rank and part, as `samples.places_of_parts` has them."""

    @classmethod
    def of(cls, run: Run, name: str = "") -> "RunSamples":
        """Return the samples of a run, under its own name or another."""
        table, environment = run_samples(run), baseline.environment(run)
        work = baseline.work_shares(run)
        return cls(
            name or run.name, run.manifest, table, environment=environment, work=work, places=places_of_parts(run)
        )

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
    contributions: tuple[Contribution, ...] = ()
    """What the change of the step time consists of; empty where no step time is compared."""
    disturbance: Disturbance = dataclasses.field(default_factory=Disturbance)
    """What other programs can have taken of times on CPUs."""
    call_changes: CallChanges | None = None
    """What the calls of a step changed by; None without the traces of both sides."""
    numbers: Agreement | None = None
    """How far loss and gradient norm agree; None where the sides are no two runs that logged them."""
    is_same_work: bool = True
    """False where the steps compute something else, as of another model or batch: no shorter step is an improvement."""

    @property
    def fastest_ns(self) -> tuple[int, int] | None:
        """What the calls of each side's step take where each is fastest; None where no other programs disturb them."""
        *named, rest = self.contributions or [None]
        if rest is None or rest.kind != contributions.OTHERS:
            return None
        return sum(part.before_ns for part in named if part), sum(part.after_ns for part in named if part)

    @property
    def explained_ns(self) -> tuple[float, float]:
        """What other programs can have added to the step of each side."""
        if self.fastest_ns is not None:
            return self.contributions[-1].before_ns, self.contributions[-1].after_ns
        pairs = [self.disturbance.explained_ns(part.kind, part.before_ns, part.after_ns) for part in self.contributions]
        return sum(before for before, _ in pairs), sum(after for _, after in pairs)

    @property
    def explained_ratios(self) -> tuple[float, float]:
        """The share of each side's step that other programs can explain."""
        step = self.step
        if step is None or not self.contributions or min(step.reference, step.candidate) <= 0:
            return self.disturbance.reference_ratio, self.disturbance.candidate_ratio
        before_ns, after_ns = self.explained_ns
        return min(1.0, before_ns / step.reference), min(1.0, after_ns / step.candidate)

    @property
    def is_mostly_explained(self) -> bool:
        """Whether other programs can explain most of the change of the step, or that it is in the other direction."""
        step = self.step
        if step is None or not self.disturbance.is_disturbed:
            return False
        explained_ns = self.explained_ns[1 if step.is_slower else 0]
        is_reversed = step.is_slower is not (step.difference > 0)
        return is_reversed or explained_ns > _MOSTLY_RATIO * abs(step.difference)

    @property
    def step(self) -> Change | None:
        """The change of the step time, where both sides mark steps."""
        return next((change for change in self.changes if change.metric == STEP_TIME), None)


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
        places=(reference.places, candidate.places),
    )
    changes = compared.changes if work is None else tuple(_without_less_work(compared.changes))
    models = [flat({"model": side.manifest.get("model")}) for side in (reference, candidate)]
    is_same_work = work is None and not baseline.differing_model_fields(*models)
    return replace(compared, changes=changes, differences=tuple(notes), is_same_work=is_same_work)


def compare_runs(
    reference: Run | RunSamples, candidate: Run | RunSamples, *, allow_different: bool = False
) -> Comparison:
    """Compare as `compare` does, with what the calls of the step changed by, where both sides are runs."""
    a, b = (side if isinstance(side, RunSamples) else RunSamples.of(side) for side in (reference, candidate))
    compared = compare(a, b, allow_different=allow_different)
    if isinstance(reference, Run) and isinstance(candidate, Run):
        compared = replace(compared, numbers=numbers.agreement(*map(numbers.run_numbers, (reference, candidate))))
    step = compared.step
    chosen = None if step is None else contributions.changed_ranks(a.samples, b.samples, step)
    if not isinstance(reference, Run) or not isinstance(candidate, Run) or step is None or chosen is None:
        return compared
    change_ns = round(step.candidate) - round(step.reference)
    ranks, _ = _common_ranks(a.name, a.recordings, b.name, b.recordings)
    split = changes_of_calls.call_changes(
        (reference, candidate), (a.samples, b.samples), chosen, ranks=ranks, change_ns=change_ns
    )
    return replace(compared, call_changes=split)


def compare_groups(
    reference: Mapping[str, Sequence[pl.DataFrame]],
    candidate: Mapping[str, Sequence[pl.DataFrame]],
    *,
    notes: Sequence[str] = (),
    on_host: bool,
    thresholds: Thresholds | None = None,
    places: tuple[PartPlaces, PartPlaces] = ({}, {}),
) -> Comparison:
    """Compare the recordings of two sides, each by its name, and each recording by its samples.

    `on_host` is whether training ran on CPUs: then what other programs can explain extends the intervals of times.
    `places` are the lines of the program by rank and part, of both sides.
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
    disturbance = Disturbance.of(a_tables, b_tables, thresholds) if on_host else Disturbance()
    step = next((change for change in changes if change.metric == STEP_TIME), None)
    parts: tuple[Contribution, ...] = ()
    if step is not None:
        parts = contributions.contributions(
            a_tables, b_tables, step, ranks=ranks, limits=thresholds, disturbance=disturbance, places=places
        )
    compared = Comparison(a_name, b_name, changes, (), contributions=parts, disturbance=disturbance)
    changes = tuple(disturbance.apply(change, compared.explained_ratios) for change in changes)
    changes, separated = step_separation.decide(changes, a_tables, b_tables, ranks, thresholds)
    undecided = replace(compared, changes=changes)
    compared = _decide_step_time(undecided, parts, thresholds)
    if step is not None and disturbance.is_unknown and _is_doubtful(compared):
        fastest = contributions.contributions_of_fastest(a_tables, b_tables, step, places)
        compared = _decide_step_time(undecided, fastest, thresholds) if fastest else compared
    changes = compared.changes
    remarks = (*notes, *rank_notes, *_clock_notes(changes, (a_name, b_name)), *separated)
    return replace(
        compared, changes=changes, notes=remarks, confidence=thresholds.confidence, rank_notes=tuple(rank_notes)
    )


def _decide_step_time(compared: Comparison, parts: tuple[Contribution, ...], limits: Thresholds) -> Comparison:
    """Return the comparison with these contributions, by which the step time is decided where it cannot tell."""
    changes = tuple(
        contributions.decide(change, parts, compared.disturbance, limits) if change.metric == STEP_TIME else change
        for change in compared.changes
    )
    return replace(compared, changes=changes, contributions=parts)


def _is_doubtful(compared: Comparison) -> bool:
    """Whether other programs disturb the step and it is not decided, or they can explain most of its change."""
    is_decided = compared.step is not None and compared.step.verdict is not Verdict.INCONCLUSIVE
    return compared.disturbance.is_disturbed and (not is_decided or compared.is_mostly_explained)


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
        advice = f"{'; '.join(refused)}; pass --allow-different to compare anyway"
        raise NotComparableError(f"{advice}{_scaling_sentence(reference, candidate)}")
    return refused + notes


def _scaling_sentence(reference: RunSamples, candidate: RunSamples) -> str:
    """What the sides, such as saved reports, say about runs on another number of ranks; "" where that is the same.

    They have the tokens of steps, but not what each rank does in them, which `scaling.compare_sizes` needs.
    """
    sizes = [side.manifest.get("world_size") for side in (reference, candidate)]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[0] == sizes[1]:
        return ""
    rates = [job_samples(side.samples).get(conventions.TOKENS_METRIC) for side in (reference, candidate)]
    medians = [float(np.median(values)) for values in rates if values is not None and len(values)]
    known = ""
    if len(medians) == len(sizes) and medians[0] > 0:
        ratio = medians[1] / medians[0]
        efficiency = ratio * float(str(sizes[0])) / float(str(sizes[1]))
        known = f". {candidate.name} processes {ratio:.2f} times as many tokens a second as {reference.name} on "
        known += f"{sizes[1]} ranks instead of {sizes[0]}: its efficiency is {units.share(efficiency)}"
    return f"{known}. What grew is known only from the recordings: tracekit compare with the folders of both runs"


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
