"""Why metrics regressed: which work grew, as opposed to a machine on which everything takes longer.

Work by name (`step_charges.work`) of the run is compared with that of the baseline. A busy machine stretches all of it
alike, so what counts is how much more a name grew than the rest: its excess over the factor that half of the work, by
time, stays below. Counters (bytes sent, bytes allocated) do not depend on the machine and take precedence over times.
"""

import re
from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.compute import step_charges
from tracekit.model import units
from tracekit.regression.baseline import Recording
from tracekit.regression.metrics import COMPUTE_TIME, STEP_TIME, all_metrics, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.thresholds import Change, Verdict

COMPUTE, COMMUNICATION, CHECKPOINTING, MEMORY, HOST = "compute", "communication", "checkpointing", "memory", "host"
UNEXPLAINED = "unexplained"
# Ops and kernels that make, fill or copy memory and compute nothing.
_MOVES = re.compile(
    r"(?i)(^aten::(empty|zeros|ones|full|new_|clone|copy_?$|zero_?$|fill_?|contiguous|cat$|stack$|to$|_to_copy|resize|"
    r"repeat|pad|detach|constant_pad)|memset|memcpy|fillfunctor|copy_kernel|direct_copy|catarray)"
)
_PLACE = ["kind", "phase", "name"]
_COMPUTES = ("compute", "memset", "memcpy")
_FLOPS, _SENT, _EXPOSED = "flops", "sent_bytes", "exposed_transfer_ns"
_LEAST_SHARE = 0.2
"""A cause is reported where it explains at least this share of what grew: who removes one of five gains something."""
_EVEN_SHARE = 0.5
"""Work grew on some ranks where the mean over ranks grew by less than this share of what the slowest rank's did."""
_LEAST_GROWTH = 0.005


@dataclass(frozen=True)
class Cause:
    """What made the run worse than the baseline: where the additional time, or memory, goes to."""

    name: str
    """compute, communication, checkpointing, memory or host; unexplained: what no cause explains of a longer step."""
    message: str
    metrics: tuple[str, ...]
    """The changes that show it."""

    @property
    def label(self) -> str:
        """Return the name with how sure it is, for a person."""
        return self.name if self.name == UNEXPLAINED else f"likely cause, {self.name}"


@dataclass(frozen=True)
class _Candidate:
    """A possible cause, how much of a longer step it explains, and whether a counter shows it."""

    cause: Cause
    explained_ns: float
    is_counted: bool = False


@dataclass(frozen=True)
class _Grown:
    """A piece of work that grew, by how much more than the rest of its kind."""

    phase: str | None
    name: str
    before: float
    after: float
    excess: float

    @property
    def place(self) -> str:
        """Return its name and phase in words: "aten::mm in forward"."""
        where = f"in {self.phase}" if self.phase else "between phases"
        return f"{self.name} {where}" if self.name and self.phase else self.name or where


def causes(
    regressions: Sequence[Change],
    changes: Mapping[str, Change],
    reference: Sequence[Recording],
    candidate: Sequence[Recording],
) -> tuple[Cause, ...]:
    """Return why the metrics in `regressions` got worse, the likeliest cause first; none where none did.

    `changes` are those of all metrics, by name.
    """
    if not regressions:
        return ()
    failed = {change.metric for change in regressions}
    before, after = _mean_work(reference), _mean_work(candidate)
    saving = _of_cause(CHECKPOINTING, failed)
    ranked = [_checkpointing(saving, changes, before, after)] if saving else []
    if failed - set(saving):
        unit = _slower_unit(reference, candidate)
        ranked += _of_steps(failed, changes, before, after, unit=unit)
    return tuple(ranked)


def _of_steps(
    failed: AbstractSet[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame, *, unit: str
) -> list[Cause]:
    computed = _grown(before, after, _COMPUTES)
    moving = [grown for grown in computed if _MOVES.search(grown.name)]
    allocated = _grown(before, after, (step_charges.ALLOCATED,))
    remembering, computing = _of_cause(MEMORY, failed), _of_cause(COMPUTE, failed)
    is_memory = bool(allocated and remembering)
    moving_ns = sum(grown.excess for grown in moving) if is_memory else 0.0
    mean_ns = _work_ns(after) - _work_ns(before)
    computed_ns = max(0.0, _growths(changes, COMPUTE_TIME, default=mean_ns) - moving_ns)
    candidates = []
    if communicating := _of_cause(COMMUNICATION, failed) or (_longer(changes, _EXPOSED) if computing else []):
        candidates.append(_communication(communicating, changes, before, after, unit=unit))
    if is_memory:
        cause = _memory(remembering, changes, allocated, moving)
        candidates.append(_Candidate(cause, moving_ns, is_counted=not computing or moving_ns >= computed_ns))
    if computing:
        counted = _grown(before, after, (step_charges.FLOPS,)) if _FLOPS in failed else []
        work = [grown for grown in computed if not (is_memory and grown in moving)]
        cause = _compute(computing, changes, counted, work, mean_ns=mean_ns)
        candidates.append(_Candidate(cause, computed_ns, is_counted=bool(counted)))
    failed_waits = _of_cause(HOST, failed)
    waiting = _of_cause(HOST, {*failed_waits, *_longer(changes, *_of_cause(HOST, changes))})
    if failed_waits or (computing and waiting):
        parts = [f"{_change_text(changes[metric])} per step" for metric in waiting]
        idle_ns = max(0.0, *(changes[metric].difference for metric in waiting))
        candidates.append(_Candidate(Cause(HOST, _sentence(parts), tuple(waiting)), idle_ns))
    return _likely(candidates, changes[STEP_TIME].difference if STEP_TIME in failed else None)


def _likely(candidates: Sequence[_Candidate], step_ns: float | None) -> list[Cause]:
    """Return the causes that explain a share of what grew, and what of the longer step no cause explains.

    `step_ns` is by how much a step takes longer; None where it does not, and the causes share what they explain.
    """
    ranked = sorted(candidates, key=lambda candidate: (candidate.is_counted, candidate.explained_ns), reverse=True)
    growth_ns = sum(candidate.explained_ns for candidate in ranked) if step_ns is None else step_ns
    least_ns = _LEAST_SHARE * growth_ns
    likely = [candidate for candidate in ranked if candidate.is_counted or candidate.explained_ns >= least_ns]
    causes = [candidate.cause for candidate in likely]
    unexplained_ns = growth_ns - sum(candidate.explained_ns for candidate in likely)
    if step_ns is not None and unexplained_ns >= _LEAST_SHARE * step_ns:
        part = "" if unexplained_ns == step_ns else f"{units.duration(unexplained_ns)} of "
        text = f"No cause explains {part}the {units.duration(step_ns)} by which a step takes longer."
        causes.append(Cause(UNEXPLAINED, text, (STEP_TIME,)))
    return causes


def _communication(
    metrics: Sequence[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame, *, unit: str
) -> _Candidate:
    sent, spent = (_grown(before, after, (kind,)) for kind in (step_charges.SENT, "communication"))
    parts = []
    if sent and _SENT in changes:
        parts.append(f"{_change_text(changes[_SENT])}, most of it by {sent[0].place}")
    parts += [f"{_change_text(changes[metric])} per step" for metric in metrics if metric != _SENT]
    if not sent and spent:
        parts.append(f"most in {spent[0].place} (+{units.duration(spent[0].excess)})")
    if not sent and unit:
        parts.append(unit)
    # A step gets longer by what is exposed, and transfers explain no more of that than they got longer themselves.
    exposed_ns = max(0.0, _growths(changes, "transfer_ns", _EXPOSED))
    return _Candidate(Cause(COMMUNICATION, _sentence(parts), tuple(metrics)), exposed_ns, is_counted=bool(sent))


def _checkpointing(
    failed: Sequence[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame
) -> Cause:
    parts = [_change_text(changes[metric]) for metric in failed]
    stages = [grown for grown in _grown(before, after, (step_charges.SAVE,)) if grown.name != "wait"]
    if stages:
        parts.append(f"most of the additional time is in {stages[0].place} (+{units.duration(stages[0].excess)})")
    return Cause(CHECKPOINTING, _sentence(parts), tuple(failed))


def _memory(
    failed: Sequence[str], changes: Mapping[str, Change], allocated: Sequence[_Grown], moving: Sequence[_Grown]
) -> Cause:
    parts = [_change_text(changes[metric]) for metric in failed]
    first = allocated[0]
    parts.append(f"most of it {'for ' if first.name else ''}{first.place} (+{units.size(first.excess)} per step)")
    if moving:
        parts.append(f"{moving[0].place} takes {units.duration(moving[0].excess)} more per step")
    return Cause(MEMORY, _sentence(parts), tuple(failed))


def _compute(
    failed: Sequence[str],
    changes: Mapping[str, Change],
    counted: Sequence[_Grown],
    work: Sequence[_Grown],
    *,
    mean_ns: float,
) -> Cause:
    """Return the cause compute; `mean_ns` is by how much its work grew, over ranks the mean."""
    parts = []
    if counted:
        first = counted[0]
        share = units.share(first.excess / (first.before or first.after))
        parts.append(f"{_change_text(changes[_FLOPS])}, most of it in {first.place} (+{share})")
    timed = [metric for metric in failed if metric != _FLOPS]
    parts += [_change_text(changes[metric]) for metric in timed[:1]]
    slowest_ns = _growths(changes, COMPUTE_TIME, default=0.0)
    if slowest_ns > 0 and mean_ns < _EVEN_SHARE * slowest_ns and not counted:
        parts.append(f"{_change_text(changes[COMPUTE_TIME])} on the slowest rank, and others' grew less")
    elif work and not counted:
        first = work[0]
        parts.append(
            f"{first.place} takes {units.duration(first.after)}, {units.duration(first.excess)} more than expected "
            "from the rest of the work"
        )
    elif not counted:
        parts.append("all work grew alike, so check the machine, its clocks and what else runs there")
    return Cause(COMPUTE, _sentence(parts), tuple(failed))


def _of_cause(cause: str, keys: Container[str]) -> list[str]:
    """Return those of some metrics that a cause explains, counters first, then CPU time, then times by the clock."""
    metrics = [metric for metric in all_metrics().values() if metric.cause == cause and metric.key in keys]
    return [metric.key for metric in sorted(metrics, key=lambda m: (m.usual_spread > 0, not m.is_cpu_time))]


def _change_text(change: Change) -> str:
    """Return a change in words: "a step takes 412 ms, 36 ms more"."""
    metric = metric_of(change.metric)
    more = "more" if change.difference > 0 else "less"
    return (
        f"{metric.phrase or metric.label} {metric.text(change.candidate)}, {metric.text(abs(change.difference))} {more}"
    )


def _slower_unit(reference: Sequence[Recording], candidate: Sequence[Recording]) -> str:
    """Return in words in which unit exposed communication grew most; '' where in none."""
    before, after = (_exposed_by_unit(side) for side in (reference, candidate))
    both = before.join(after, on="unit", how="full", coalesce=True).fill_null(0.0)
    grown = both.with_columns(grown=pl.col("value_right") - pl.col("value")).sort("grown", "unit").tail(1)
    if grown.is_empty() or grown["grown"][0] <= 0:
        return ""
    return f"of the units, most in {grown['unit'][0] or 'the root'} (+{units.duration(grown['grown'][0])})"


def _exposed_by_unit(recordings: Sequence[Recording]) -> pl.DataFrame:
    """Return the exposed communication of each unit in the median step of its slowest rank. Columns unit, value."""
    per_recording = [
        recording.units.filter(pl.col("metric") == "exposed_communication_ns")
        .group_by("unit", "step")
        .agg(pl.col("value").max())
        .group_by("unit")
        .agg(pl.col("value").median())
        for recording in recordings
    ]
    return pl.concat(per_recording).group_by("unit").agg(pl.col("value").median()).sort("unit")


def _mean_work(recordings: Sequence[Recording]) -> pl.DataFrame:
    """Return the work of several recordings: of each name the median over them, 0 where one has none."""
    both = pl.concat([recording.work for recording in recordings])
    lists = both.group_by(_PLACE, maintain_order=True).agg("amount")
    count = len(recordings)
    medians = [float(np.median([*amounts, *[0.0] * (count - len(amounts))])) for amounts in lists["amount"].to_list()]
    return lists.with_columns(pl.Series("amount", medians, pl.Float64))


def _grown(before: pl.DataFrame, after: pl.DataFrame, kinds: Sequence[str]) -> list[_Grown]:
    """Return the work of some kinds that grew more than the rest of it, most first."""
    of_kinds = pl.col("kind").is_in(kinds)
    both = before.filter(of_kinds).join(after.filter(of_kinds), on=_PLACE, how="full", coalesce=True, nulls_equal=True)
    table = both.with_columns(pl.col("amount", "amount_right").fill_null(0.0))
    factor = _common_factor(table["amount"].to_numpy(), table["amount_right"].to_numpy(), kinds)
    rows = [
        _Grown(phase, name, was, now, now - factor * was)
        for phase, name, was, now in table.select("phase", "name", "amount", "amount_right").iter_rows()
    ]
    min_excess = _LEAST_GROWTH * sum(grown.before for grown in rows)
    return sorted((grown for grown in rows if grown.excess > min_excess), key=lambda grown: -grown.excess)


def _common_factor(before: Values, after: Values, kinds: Sequence[str]) -> float:
    """Return by what the work that is on both sides grew: the median of its growth, weighed by its time."""
    if not set(kinds) & {*_COMPUTES}:
        return 1.0  # bytes do not depend on a machine's load; saves and collectives are too few
    both = (before > 0) & (after > 0)
    if not both.any():
        return 1.0
    growth, weight = after[both] / before[both], before[both]
    order = np.argsort(growth)
    reached = np.cumsum(weight[order])
    return float(max(1.0, growth[order][np.searchsorted(reached, reached[-1] / 2)]))


def _longer(changes: Mapping[str, Change], *metrics: str) -> list[str]:
    """Return those of some times that got longer, by more than what is no change."""
    times = [metric for metric in metrics if metric in changes and changes[metric].difference > 0]
    return [metric for metric in times if changes[metric].verdict is not Verdict.SAME]


def _growths(changes: Mapping[str, Change], *metrics: str, default: float = 0.0) -> float:
    """Return the least growth of those metrics that both runs have, or the default where they have none."""
    return min((changes[metric].difference for metric in metrics if metric in changes), default=default)


def _work_ns(work: pl.DataFrame) -> float:
    """Return the time that work takes which computes."""
    return float(work.filter(pl.col("kind").is_in(_COMPUTES))["amount"].sum())


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
