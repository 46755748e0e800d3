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
from tracekit.regression.metrics import all_metrics, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.thresholds import Change

NAMES = ("compute", "communication", "checkpointing", "memory", "host")
COMPUTE, COMMUNICATION, CHECKPOINTING, MEMORY, HOST = NAMES
# Ops and kernels that make, fill or copy memory and compute nothing.
_MOVES = re.compile(
    r"(?i)(^aten::(empty|zeros|ones|full|new_|clone|copy_?$|zero_?$|fill_?|contiguous|cat$|stack$|to$|_to_copy|resize|"
    r"repeat|pad|detach|constant_pad)|memset|memcpy|fillfunctor|copy_kernel|direct_copy|catarray)"
)
_PLACE = ["kind", "phase", "name"]
_COMPUTES = ("compute", "memset", "memcpy")
_FLOPS, _SENT = "flops", "sent_bytes"
_LEAST_SHARE = 0.2
"""A further cause is reported where it has at least this share of what grew."""
_LEAST_GROWTH = 0.005


@dataclass(frozen=True)
class Cause:
    """What made the run worse than the baseline: where the additional time, or memory, goes to."""

    name: str
    """compute, communication, checkpointing, memory or host."""
    message: str
    metrics: tuple[str, ...]
    """The changes that show it."""


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
    communicating, remembering, computing, waiting = (
        _of_cause(name, failed) for name in (COMMUNICATION, MEMORY, COMPUTE, HOST)
    )
    computed = _grown(before, after, _COMPUTES)
    moving = [grown for grown in computed if _MOVES.search(grown.name)]
    other = [grown for grown in computed if not _MOVES.search(grown.name)]
    allocated, sent = _grown(before, after, (step_charges.ALLOCATED,)), _grown(before, after, (step_charges.SENT,))
    moving_ns, other_ns = (sum(grown.excess for grown in works) for works in (moving, other))
    counted = _grown(before, after, (step_charges.FLOPS,)) if _FLOPS in failed else []
    is_memory = bool(allocated and remembering)
    scored: list[tuple[bool, float, Cause]] = []
    if communicating:
        spent_ns = max(0.0, _difference(changes, "transfer_ns", "exposed_transfer_ns", "exposed_communication_ns"))
        cause = _communication(communicating, changes, sent, _grown(before, after, ("communication",)), unit=unit)
        scored.append((bool(sent), spent_ns, cause))
    if is_memory:
        cause = _memory(remembering, changes, allocated, moving)
        scored.append((not computing or moving_ns >= other_ns, moving_ns, cause))
    if computing:
        work = other if is_memory else computed
        spent_ns = other_ns if is_memory else moving_ns + other_ns
        scored.append((bool(counted), spent_ns, _compute(computing, changes, counted, work)))
    idle_ns = max(0.0, _difference(changes, "data_wait_ns", "idle_ns"))
    if waiting or (computing and idle_ns > moving_ns + other_ns):
        scored.append((False, idle_ns, _host(changes)))
    scored.sort(key=lambda candidate: candidate[:2], reverse=True)
    total_ns = sum(score for _, score, _ in scored)
    return [
        cause
        for number, (is_counted, score, cause) in enumerate(scored)
        if number == 0 or is_counted or score >= _LEAST_SHARE * total_ns
    ]


def _checkpointing(
    failed: Sequence[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame
) -> Cause:
    parts = [_change_text(changes[metric]) for metric in failed]
    stages = [grown for grown in _grown(before, after, (step_charges.SAVE,)) if grown.name != "wait"]
    if stages:
        parts.append(f"most of the additional time is in {stages[0].place} (+{units.duration(stages[0].excess)})")
    return Cause(CHECKPOINTING, _sentence(parts), tuple(failed))


def _communication(
    failed: Sequence[str],
    changes: Mapping[str, Change],
    sent: Sequence[_Grown],
    spent: Sequence[_Grown],
    *,
    unit: str,
) -> Cause:
    parts = []
    if sent and _SENT in changes:
        parts.append(f"{_change_text(changes[_SENT])}, most of it by {sent[0].place}")
    parts += [f"{_change_text(changes[metric])} per step" for metric in failed if metric != _SENT]
    if not sent and spent:
        parts.append(f"most in {spent[0].place} (+{units.duration(spent[0].excess)})")
    if not sent and unit:
        parts.append(unit)
    return Cause(COMMUNICATION, _sentence(parts), tuple(failed))


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
    failed: Sequence[str], changes: Mapping[str, Change], counted: Sequence[_Grown], work: Sequence[_Grown]
) -> Cause:
    parts = []
    if counted:
        first = counted[0]
        share = units.share(first.excess / (first.before or first.after))
        parts.append(f"{_change_text(changes[_FLOPS])}, most of it in {first.place} (+{share})")
    timed = [metric for metric in failed if metric != _FLOPS]
    parts += [_change_text(changes[metric]) for metric in timed[:1]]
    if work and not counted:
        first = work[0]
        parts.append(
            f"{first.place} takes {units.duration(first.after)}, {units.duration(first.excess)} more than expected "
            "from the rest of the work"
        )
    elif not counted:
        parts.append("all work grew alike, so check the machine, its clocks and what else runs there")
    return Cause(COMPUTE, _sentence(parts), tuple(failed))


def _host(changes: Mapping[str, Change]) -> Cause:
    longer = [metric for metric in _of_cause(HOST, changes) if changes[metric].difference > 0]
    parts = [f"{_change_text(changes[metric])} per step" for metric in longer]
    return Cause(HOST, _sentence(parts or ["steps wait for the host"]), tuple(longer))


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


def _difference(changes: Mapping[str, Change], *metrics: str) -> float:
    return next((changes[metric].difference for metric in metrics if metric in changes), 0.0)


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
