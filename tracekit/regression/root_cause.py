"""Why metrics regressed: which work grew, told apart from a machine on which everything takes longer.

Work by name (`analysis.places.work`) of the run is held against that of the baseline. A busy machine draws out all of
it alike, so what counts is how much more a name grew than the rest: its excess over the factor that half of the work,
by time, stays below. Counters (bytes sent, bytes allocated) do not notice the machine and go before times.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.compute import unit_work
from tracekit.model import units
from tracekit.regression.baseline import Recording
from tracekit.regression.change import Change, Values
from tracekit.regression.gate import Cause

COMPUTE, COMMUNICATION, CHECKPOINTING, MEMORY, HOST = NAMES = (
    "compute",
    "communication",
    "checkpointing",
    "memory",
    "host",
)
_OF_CHECKPOINTS = {
    "checkpoint_blocked_ns": "a save blocks training for",
    "checkpoint_cpu_ns": "it keeps a processor for",
    "checkpoint_written_bytes": "a rank writes",
    "checkpoint_calls": "calls that write are",
}
_OF_COMMUNICATION = (
    "sent_bytes", "transfer_ns", "exposed_transfer_ns", "exposed_communication_ns", "communication_ns",
)  # fmt: skip
_OF_MEMORY = ("peak_reserved_bytes", "peak_allocated_bytes", "allocated_bytes")
_OF_COMPUTE = ("flops", "cpu_time_ns", "compute_ns", "step_time_ns", "tokens_per_second")
_FLOPS = "flops"
_OF_HOST = ("data_wait_ns", "idle_ns")
# Ops and kernels that make, fill or copy memory and compute nothing.
_MOVES = re.compile(
    r"(?i)(^aten::(empty|zeros|ones|full|new_|clone|copy_?$|zero_?$|fill_?|contiguous|cat$|stack$|to$|_to_copy|resize|"
    r"repeat|pad|detach|constant_pad)|memset|memcpy|fillfunctor|copy_kernel|direct_copy|catarray)"
)
_PLACE = ["kind", "phase", "name"]
_COMPUTES = ("compute", "memset", "memcpy")
_LEAST_SHARE = 0.2
"""A cause beside the first is told where it has at least this share of what grew."""


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
        """Return what it is in a few words: "aten::mm in forward"."""
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
    before, after = _mean(reference), _mean(candidate)
    found = []
    if failed & set(_OF_CHECKPOINTS):
        found.append(_checkpointing(failed, changes, before, after))
    if failed - set(_OF_CHECKPOINTS):
        unit = _slower_unit(reference, candidate)
        found += _of_steps(failed, changes, before, after, unit=unit)
    return tuple(found)


def _of_steps(
    failed: AbstractSet[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame, *, unit: str
) -> list[Cause]:
    computed = _grown(before, after, _COMPUTES)
    moving = [grown for grown in computed if _MOVES.search(grown.name)]
    other = [grown for grown in computed if not _MOVES.search(grown.name)]
    allocated, sent = _grown(before, after, (unit_work.ALLOCATED,)), _grown(before, after, (unit_work.SENT,))
    moving_ns, other_ns = (sum(grown.excess for grown in each) for each in (moving, other))
    slower = bool(failed & set(_OF_COMPUTE))
    counted = _grown(before, after, (unit_work.FLOPS,)) if _FLOPS in failed else []
    is_memory = bool(allocated) and bool(failed & set(_OF_MEMORY))
    scored: list[tuple[bool, float, Cause]] = []
    if failed & set(_OF_COMMUNICATION):
        spent_ns = max(0.0, _difference(changes, "transfer_ns", "exposed_transfer_ns", "exposed_communication_ns"))
        cause = _communication(failed, changes, sent, _grown(before, after, ("communication",)), unit=unit)
        scored.append((bool(sent), spent_ns, cause))
    if is_memory:
        cause = _memory(failed, changes, allocated, moving)
        scored.append((not slower or moving_ns >= other_ns, moving_ns, cause))
    if slower:
        work = other if is_memory else computed
        spent_ns = other_ns if is_memory else moving_ns + other_ns
        scored.append((bool(counted), spent_ns, _compute(failed, changes, counted, work)))
    idle_ns = max(0.0, _difference(changes, *_OF_HOST))
    if failed & set(_OF_HOST) or (slower and idle_ns > moving_ns + other_ns):
        scored.append((False, idle_ns, _host(changes)))
    scored.sort(key=lambda each: each[:2], reverse=True)
    whole_ns = sum(score for _, score, _ in scored)
    return [
        cause
        for number, (certain, score, cause) in enumerate(scored)
        if number == 0 or certain or score >= _LEAST_SHARE * whole_ns
    ]


def _checkpointing(
    failed: AbstractSet[str], changes: Mapping[str, Change], before: pl.DataFrame, after: pl.DataFrame
) -> Cause:
    told = _of(failed, tuple(_OF_CHECKPOINTS))
    parts = [f"{_OF_CHECKPOINTS[metric]} {_moved(changes[metric], _words(metric))}" for metric in told]
    stages = [grown for grown in _grown(before, after, (unit_work.SAVE,)) if grown.name != "wait"]
    if stages:
        parts.append(f"most time more is in {stages[0].place} (+{units.duration(stages[0].excess)})")
    return Cause(CHECKPOINTING, _sentence(parts), told)


def _communication(
    failed: AbstractSet[str],
    changes: Mapping[str, Change],
    sent: Sequence[_Grown],
    spent: Sequence[_Grown],
    *,
    unit: str,
) -> Cause:
    parts = []
    if sent and "sent_bytes" in changes:
        parts.append(f"a step sends {_moved(changes['sent_bytes'], units.size)}, most of it by {sent[0].place}")
    words = {
        "transfer_ns": "transfers take",
        "exposed_transfer_ns": "no compute hides",
        "exposed_communication_ns": "exposed are",
    }
    slower = _of(failed, tuple(words))
    parts += [f"{words[metric]} {_moved(changes[metric], units.duration)} a step" for metric in slower]
    if not sent and spent:
        parts.append(f"most in {spent[0].place} (+{units.duration(spent[0].excess)})")
    if not sent and unit:
        parts.append(unit)
    return Cause(COMMUNICATION, _sentence(parts), _of(failed, _OF_COMMUNICATION))


def _memory(
    failed: AbstractSet[str], changes: Mapping[str, Change], allocated: Sequence[_Grown], moving: Sequence[_Grown]
) -> Cause:
    words = {
        "peak_reserved_bytes": "the most reserved is",
        "peak_allocated_bytes": "the most held is",
        "allocated_bytes": "a step takes",
    }
    parts = [f"{words[metric]} {_moved(changes[metric], units.size)}" for metric in _of(failed, _OF_MEMORY)]
    first = allocated[0]
    parts.append(f"most of it {'for ' * bool(first.name)}{first.place} (+{units.size(first.excess)} a step)")
    if moving:
        parts.append(f"{moving[0].place} takes {units.duration(moving[0].excess)} more a step")
    return Cause(MEMORY, _sentence(parts), _of(failed, _OF_MEMORY))


def _compute(
    failed: AbstractSet[str], changes: Mapping[str, Change], counted: Sequence[_Grown], work: Sequence[_Grown]
) -> Cause:
    parts = []
    if counted:
        first = counted[0]
        share = units.share(first.excess / (first.before or first.after))
        parts.append(f"a step computes {_moved(changes[_FLOPS], _operations)}, most of it in {first.place} (+{share})")
    metric = next((metric for metric in _OF_COMPUTE if metric in failed and metric != _FLOPS), None)
    words = {"cpu_time_ns": "a step keeps processors for", "tokens_per_second": "tokens a second are"}
    if metric is not None:
        parts.append(f"{words.get(metric, 'a step takes')} {_moved(changes[metric], _words(metric))}")
    if work and not counted:
        first = work[0]
        parts.append(
            f"{first.place} takes {units.duration(first.after)}, {units.duration(first.excess)} more than the rest "
            "of the work lets expect"
        )
    elif not counted:
        parts.append("all work alike, so look at the machine, its clocks and what else runs there")
    return Cause(COMPUTE, _sentence(parts), _of(failed, _OF_COMPUTE))


def _operations(count: float) -> str:
    """Return a number of floating-point operations in words."""
    scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if abs(count) >= s), (1.0, ""))
    return f"{count / scale:.3g} {unit}FLOP"


def _host(changes: Mapping[str, Change]) -> Cause:
    told = [metric for metric in _OF_HOST if metric in changes and changes[metric].difference > 0]
    words = {"data_wait_ns": "waiting for data takes", "idle_ns": "nothing runs for"}
    parts = [f"{words[metric]} {_moved(changes[metric], units.duration)} a step" for metric in told]
    return Cause(HOST, _sentence(parts or ["steps wait for the host"]), tuple(told))


def _slower_unit(reference: Sequence[Recording], candidate: Sequence[Recording]) -> str:
    """Return in words in which unit exposed communication grew most; '' where in none."""
    before, after = (_exposed_by_unit(side) for side in (reference, candidate))
    both = before.join(after, on="unit", how="full", coalesce=True).fill_null(0.0)
    grown = both.with_columns(grown=pl.col("value_right") - pl.col("value")).sort("grown", "unit").tail(1)
    if grown.is_empty() or grown["grown"][0] <= 0:
        return ""
    return f"among units most in {grown['unit'][0] or 'the root'} (+{units.duration(grown['grown'][0])})"


def _exposed_by_unit(recordings: Sequence[Recording]) -> pl.DataFrame:
    """Return the exposed communication of each unit in a typical step of its slowest rank. Columns unit, value."""
    each = [
        recording.units.filter(pl.col("metric") == "exposed_communication_ns")
        .group_by("unit", "step")
        .agg(pl.col("value").max())
        .group_by("unit")
        .agg(pl.col("value").median())
        for recording in recordings
    ]
    return pl.concat(each).group_by("unit").agg(pl.col("value").median()).sort("unit")


def _mean(recordings: Sequence[Recording]) -> pl.DataFrame:
    """Return the typical work of several recordings: of each name the median over them, 0 where one has none."""
    both = pl.concat([recording.work for recording in recordings])
    lists = both.group_by(_PLACE, maintain_order=True).agg("amount")
    count = len(recordings)
    medians = [float(np.median([*amounts, *[0.0] * (count - len(amounts))])) for amounts in lists["amount"].to_list()]
    return lists.with_columns(pl.Series("amount", medians, pl.Float64))


def _grown(before: pl.DataFrame, after: pl.DataFrame, kinds: Sequence[str]) -> list[_Grown]:
    """Return the work of some kinds that grew more than the rest of it, most first."""
    mine = pl.col("kind").is_in(kinds)
    both = before.filter(mine).join(after.filter(mine), on=_PLACE, how="full", coalesce=True, nulls_equal=True)
    table = both.with_columns(pl.col("amount", "amount_right").fill_null(0.0))
    factor = _common_factor(table["amount"].to_numpy(), table["amount_right"].to_numpy(), kinds)
    found = [
        _Grown(phase, name, was, now, now - factor * was)
        for phase, name, was, now in table.select("phase", "name", "amount", "amount_right").iter_rows()
    ]
    least = _LEAST_GROWTH * sum(grown.before for grown in found)
    return sorted((grown for grown in found if grown.excess > least), key=lambda grown: -grown.excess)


_LEAST_GROWTH = 0.005


def _common_factor(before: Values, after: Values, kinds: Sequence[str]) -> float:
    """Return by what the work that is on both sides grew: the median of its growth, weighed by its time."""
    if not set(kinds) & {*_COMPUTES}:
        return 1.0  # bytes do not grow with a machine's load, and of saves and collectives there are too few to tell
    both = (before > 0) & (after > 0)
    if not both.any():
        return 1.0
    growth, weight = after[both] / before[both], before[both]
    order = np.argsort(growth)
    reached = np.cumsum(weight[order])
    return float(max(1.0, growth[order][np.searchsorted(reached, reached[-1] / 2)]))


def _difference(changes: Mapping[str, Change], *metrics: str) -> float:
    return next((changes[metric].difference for metric in metrics if metric in changes), 0.0)


def _of(failed: AbstractSet[str], metrics: Sequence[str]) -> tuple[str, ...]:
    return tuple(metric for metric in metrics if metric in failed)


def _moved(change: Change, words: Callable[[float], str]) -> str:
    """Return a change in words: "412 ms, 36 ms more"."""
    more = "more" if change.difference > 0 else "less"
    return f"{words(change.candidate)}, {words(abs(change.difference))} {more}"


def _words(metric: str) -> Callable[[float], str]:
    if metric.endswith("_ns"):
        return units.duration
    return units.size if metric.endswith("_bytes") else "{:,.0f}".format


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
