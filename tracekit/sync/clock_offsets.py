"""Match one rank's calls of a group to the collective instances known so far, and find its clock offset.

All ranks leave a collective together. With the right offset between two clocks, the ends of the same collectives
coincide; with a wrong offset, even by one step, they scatter.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model.sweep_line import distinct

_Ints = npt.NDArray[np.int64]
UNKNOWN = -1
MIN_PAIRS = 3
"""With fewer shared collectives the offset of two clocks is unknown."""

_SCALES_NS = (20_000, 200_000, 2_000_000, 20_000_000)
_FAR_NS = 20_000_000
_NEAR_NS = 1_000
_MAX_PAIRS = 2_000_000
_CANDIDATES = 4
_MIN_LEAD = 3.0
_SLACK_NS = 50_000
_MIN_EXPLAINED = 0.9
"""Share of the calls that both sides recorded; where the ends of fewer coincide, the order of all calls decides."""
_MAX_SHIFTS, _FEW = 4096, 64
_NEVER_NS = 1 << 62


@dataclass(frozen=True)
class _Calls:
    start: _Ints
    end: _Ints
    kind: _Ints
    op: _Ints
    bytes: _Ints
    seq: _Ints
    step: _Ints
    synchronizing: npt.NDArray[np.bool_]


_FIELDS = {"start": "start_ns", "end": "end_ns", "kind": "token", "op": "op_code"} | {
    name: name for name in ("bytes", "seq", "step", "row")
}
"""The column of each integer field of a call."""


@dataclass(frozen=True)
class RankCalls(_Calls):
    """The calls of one rank in one group, by their ends."""

    row: _Ints

    @classmethod
    def by_rank(cls, rows: pl.DataFrame) -> "dict[int, RankCalls]":
        """Return the calls of each rank in `rows`, which has a column rank and one for each field."""
        ordered = rows.select("rank", "together", pl.col(_FIELDS.values()).fill_null(UNKNOWN).cast(pl.Int64)).sort(
            "rank", "end_ns", "start_ns", maintain_order=True
        )
        fields = {name: ordered[column].to_numpy() for name, column in _FIELDS.items()}
        fields["synchronizing"] = ordered["together"].to_numpy()
        ranks, firsts = np.unique(ordered["rank"].to_numpy(), return_index=True)
        ends = [*firsts[1:].tolist(), ordered.height]
        return {
            rank: cls(**{name: values[first:end] for name, values in fields.items()})
            for rank, first, end in zip(ranks.tolist(), firsts.tolist(), ends, strict=True)
        }


@dataclass(frozen=True)
class Instances(_Calls):
    """Collective instances, by the end that the first rank recorded. All ranks were inside from `start` to `end`."""

    instance: _Ints
    end_time: _Ints

    @classmethod
    def of(cls, calls: RankCalls, offset_ns: int, instance: _Ints | None = None) -> "Instances":
        """Return the calls of one rank as instances, one instance per call, by default numbered from 0."""
        end = calls.end + offset_ns
        numbers = np.arange(len(end), dtype=np.int64) if instance is None else instance
        facts = (calls.kind, calls.op, calls.bytes, calls.seq, calls.step, calls.synchronizing)
        return cls(calls.start + offset_ns, end, *facts, numbers, end)

    def with_rank(self, calls: RankCalls, fit: "RankMatch") -> "Instances":
        """Return the instances with a rank's calls: matched calls narrow an instance, others become new instances."""
        is_new = fit.instance_rows < 0
        rank_calls, rows = Instances.of(calls, fit.offset_ns, fit.instance), fit.instance_rows[~is_new]
        start, end = self.start.copy(), self.end.copy()
        start[rows] = np.maximum(start[rows], rank_calls.start[~is_new])
        end[rows] = np.minimum(end[rows], rank_calls.end[~is_new])
        fields = vars(self) | {"start": start, "end": end}
        merged = {name: np.concatenate((fields[name], values[is_new])) for name, values in vars(rank_calls).items()}
        by_time = np.argsort(merged["end_time"], kind="stable")
        return Instances(**{name: values[by_time] for name, values in merged.items()})


@dataclass(frozen=True)
class RankMatch:
    """A rank's clock offset, and per call the matching row in `Instances` (-1: none) and the instance id."""

    offset_ns: int
    instance_rows: _Ints
    instance: _Ints
    links_clocks: bool


def match_rank(
    calls: RankCalls, instances: Instances, *, offset_ns: int | None, error_ns: int = 0, pairs: _Ints | None
) -> RankMatch | None:
    """Match the calls of a rank to the instances; None where too few calls match.

    `offset_ns` is the rank's clock offset if known, within `error_ns`, `pairs` the matches if sequence numbers
    determine them.
    """
    if pairs is not None:
        agreed = _median_offset(calls, instances, pairs) if offset_ns is None else offset_ns
        return RankMatch(agreed or 0, pairs, _instance_ids(instances, pairs), links_clocks=agreed is not None)
    agreed = offset_ns
    if offset_ns is None or error_ns:
        voted = _offset_by_voting(calls, instances)
        is_possible = offset_ns is None or voted is None or abs(voted - offset_ns) <= error_ns
        agreed = voted if is_possible and voted is not None else offset_ns
    pairs = _match_by_time(calls, instances, agreed) if agreed is not None else np.full(len(calls.end), UNKNOWN)
    # Count the calls that both sides recorded, judged by their ends.
    ends = calls.end + (agreed or 0)
    low, high = max(ends[0], instances.end_time[0]) - _FAR_NS, min(ends[-1], instances.end_time[-1]) + _FAR_NS
    call_count = ((ends >= low) & (ends <= high)).sum()
    common = int(min(call_count, ((instances.end_time >= low) & (instances.end_time <= high)).sum()))
    if (pairs >= 0).sum() < _MIN_EXPLAINED * common and (aligned := _align_sequences(calls, instances, offset_ns)):
        agreed, pairs = aligned
    elif agreed is None or (pairs >= 0).sum() < max(MIN_PAIRS, common // 3):
        return None
    return RankMatch(agreed, pairs, _instance_ids(instances, pairs), links_clocks=True)


def _instance_ids(instances: Instances, pairs: _Ints) -> _Ints:
    instance = np.where(pairs >= 0, instances.instance[pairs], 0)
    instance[pairs < 0] = instances.instance.max(initial=-1) + 1 + np.arange((pairs < 0).sum())
    return instance


def match_by_sequence_number(calls: RankCalls, instances: Instances) -> _Ints:
    """Return for each call the instance row with the same op and sequence number, -1 if there is none."""
    order = np.lexsort((instances.op, instances.seq))
    keys = (instances.seq * 64 + instances.op)[order]  # fewer than 64 kinds of collectives
    call_keys = calls.seq * 64 + calls.op
    index = np.minimum(np.searchsorted(keys, call_keys), len(keys) - 1)
    rows = order[index]
    return np.where((keys[index] == call_keys) & _compatible(calls.bytes, instances.bytes[rows]), rows, UNKNOWN)


def _compatible(a: _Ints, b: _Ints) -> npt.NDArray[np.bool_]:
    return np.asarray((a == b) | (a == UNKNOWN) | (b == UNKNOWN))


def _median_offset(calls: RankCalls, instances: Instances, pairs: _Ints) -> int | None:
    sync = (pairs >= 0) & calls.synchronizing
    return _median_ns(instances.end_time[pairs[sync]] - calls.end[sync]) if sync.sum() >= MIN_PAIRS else None


def _median_ns(times_ns: _Ints) -> int:
    """Median of times to the ns: float64 has only 256 ns between clocks that are decades apart."""
    first_ns = int(times_ns[0])
    return first_ns + int(np.median(times_ns - first_ns))


# Without sequence numbers: by the ends of calls ---------------------------------------------------------------------


def _offset_by_voting(calls: RankCalls, instances: Instances) -> int | None:
    """Return the offset at which the ends of equal calls coincide best; None if there is none."""
    differences = _differences(calls, instances)
    if len(differences) < MIN_PAIRS:
        return None
    best: tuple[float, int] | None = None
    tried: set[int] = set()
    # Find the densest sorted differences, at several scales: precise (NCCL) to imprecise (busy host).
    peaks = []
    for scale in _SCALES_NS:
        past = np.searchsorted(differences, differences + scale, side="right")
        counts = past - np.arange(len(differences))
        for _ in range(_CANDIDATES):
            i = int(np.argmax(counts))
            if counts[i] < MIN_PAIRS:
                break
            peaks.append(_median_ns(differences[i : past[i]]))
            near = slice(np.searchsorted(differences, differences[i] - scale), past[i])
            counts[near] = 0
    for candidate in sorted(peaks, key=abs):
        if candidate // _SCALES_NS[0] in tried:
            continue
        tried.add(candidate // _SCALES_NS[0])
        # Score how well an offset explains the ends, and refine the offset by the resulting pairs.
        pairs = _nearest(calls, instances, candidate, _FAR_NS)
        has_enough = ((pairs >= 0) & calls.synchronizing).sum() >= MIN_PAIRS
        score, refined = _precision(calls, instances, pairs) if has_enough else (0.0, candidate)
        if best is None or score > best[0] * 1.001:  # among equal scores, the smallest offset
            best = (score, refined)
    return best[1] if best and best[0] > 0 else None


def _differences(calls: RankCalls, instances: Instances) -> _Ints:
    """Return instance end minus call end of pairs of the same kind, sorted: at most _MAX_PAIRS, rare kinds first."""
    calls_at, instances_at = np.flatnonzero(calls.synchronizing), np.flatnonzero(instances.synchronizing)
    kinds, call_counts = np.unique(calls.kind[calls_at], return_counts=True)
    instance_counts = np.array([(instances.kind[instances_at] == kind).sum() for kind in kinds], np.int64)
    parts, room = [], _MAX_PAIRS
    for i in np.argsort(call_counts * instance_counts, kind="stable"):
        a = calls.end[calls_at[calls.kind[calls_at] == kinds[i]]]
        b = instances.end_time[instances_at[instances.kind[instances_at] == kinds[i]]]
        if not len(b) or room <= 0:
            continue
        a = a[:: -(-len(a) * len(b) // room)]
        parts.append((b[None, :] - a[:, None]).ravel())
        room -= len(a) * len(b)
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _precision(calls: RankCalls, instances: Instances, pairs: _Ints) -> tuple[float, int]:
    """Score how precisely the ends of pairs coincide, and find the offset at which they do best.

    Each pair scores the logarithm of its precision; half of that if the step numbers differ.
    """
    sync = (pairs >= 0) & calls.synchronizing
    difference = instances.end_time[pairs[sync]] - calls.end[sync]
    refined = _median_ns(difference)
    weight = np.where(_compatible(calls.step[sync], instances.step[pairs[sync]]), 1.0, 0.5)
    sharpness = np.log(_FAR_NS / np.clip(np.abs(difference - refined), _NEAR_NS, _FAR_NS))
    return float((weight * sharpness).sum()), refined


def _match_by_time(calls: RankCalls, instances: Instances, offset_ns: int) -> _Ints:
    """Return for each call the instance row of the same collective, -1 if there is none.

    First synchronizing calls with unambiguous ends; between those, calls in order, first those that ranks leave apart
    (broadcasts); then the nearest ends; then, in order again, calls whose size or type one side does not record.
    """
    pairs = _nearest(calls, instances, offset_ns, _FAR_NS)
    sync = (pairs >= 0) & calls.synchronizing
    difference = np.abs(instances.end_time[pairs[sync]] - calls.end[sync] - offset_ns)
    tolerance_ns = int(np.clip(10 * np.median(difference), 50_000, _FAR_NS)) if len(difference) else 50_000
    pairs = _nearest(calls, instances, offset_ns, tolerance_ns, min_lead=_MIN_LEAD)
    pairs = _match_between(calls, instances, np.where(calls.synchronizing, pairs, UNKNOWN), otherwise=pairs)
    pairs = _match_by_order(calls, instances, offset_ns, pairs, calls.kind, instances.kind)
    near = _nearest(calls, instances, offset_ns, tolerance_ns)
    pairs = np.where((pairs < 0) & ~np.isin(near, pairs), near, pairs)
    return _match_by_order(calls, instances, offset_ns, pairs, calls.op, instances.op)


def _nearest(calls: RankCalls, instances: Instances, offset_ns: int, tolerance_ns: int, min_lead: float = 1.0) -> _Ints:
    """Return for each call the instance row of the same kind with the nearest end, if they are mutually nearest.

    The second nearest must be at least `min_lead` times as far away.
    """
    ends = calls.end + offset_ns
    low, high = min(ends.min(), instances.end_time.min()), max(ends.max(), instances.end_time.max())
    apart_ns = 2 * (int(high) - int(low) + tolerance_ns) + 1  # separates the kinds, so that one search covers all
    if (int(max(calls.kind.max(), instances.kind.max())) + 1) * apart_ns >= 1 << 62:
        return np.full(len(ends), UNKNOWN, np.int64)  # years apart
    a, b = calls.kind * apart_ns + ends - low, instances.kind * apart_ns + instances.end_time - low
    a_order, b_order = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    match, lead = _closest(b[b_order], a)
    match_back, lead_back = _closest(a[a_order], b)
    match = b_order[match]
    mutual = (a_order[match_back[match]] == np.arange(len(a))) & (np.abs(b[match] - a) <= tolerance_ns)
    mutual &= (lead >= min_lead) & (lead_back[match] >= min_lead)
    return np.where(mutual, match, UNKNOWN).astype(np.int64)


def _closest(among: _Ints, to: _Ints) -> tuple[_Ints, npt.NDArray[np.float64]]:
    """Return per time the index of the closest sorted time, and the relative distance of the second closest."""
    fenced = np.concatenate(([-_NEVER_NS], among, [_NEVER_NS]))
    right = np.searchsorted(among, to) + 1
    best = np.where(to - fenced[right - 1] <= fenced[right] - to, right - 1, right)
    distance = np.abs(fenced[best] - to)
    next_best = np.minimum(
        np.abs(fenced[np.maximum(best - 1, 0)] - to), np.abs(fenced[np.minimum(best + 1, len(among) + 1)] - to)
    )
    return best - 1, next_best / np.maximum(distance, 1)


def _match_by_order(
    calls: RankCalls, instances: Instances, offset_ns: int, pairs: _Ints, call_kind: _Ints, instance_kind: _Ints
) -> _Ints:
    """Match remaining calls of a kind between two matched pairs in order, if both sides have the same number.

    A rank can leave late if its host is busy. But no rank leaves before all have arrived, so both must have been inside
    at the same time.
    """
    if (pairs >= 0).all():
        return pairs
    mark = _in_order(pairs, call_kind)
    on_instances = np.zeros(len(instances.end_time), bool)
    on_instances[pairs[mark]] = True
    is_matched = np.isin(np.arange(len(instances.end_time)), pairs)
    both = _number_unmatched(call_kind, mark, pairs >= 0, "a").join(
        _number_unmatched(instance_kind, on_instances, is_matched, "b"), on=["kind", "gap", "i", "n"]
    )
    i, j = both["a"].to_numpy(), both["b"].to_numpy()
    start = np.maximum(calls.start[i] + offset_ns, instances.start[j])
    end = np.minimum(calls.end[i] + offset_ns, instances.end[j])
    fits = _compatible(calls.bytes[i], instances.bytes[j]) & ((start <= end + _SLACK_NS) | ~calls.synchronizing[i])
    filled = pairs.copy()
    filled[i[fits]] = j[fits]
    return filled


def _match_between(calls: RankCalls, instances: Instances, pairs: _Ints, *, otherwise: _Ints) -> _Ints:
    """Match calls that ranks leave apart, such as broadcasts, in the order of their starts between synchronizing pairs.

    A rank that sends leaves before those that receive, so the ends of equal calls, also from different roots, do not
    show which belong together. But a group runs its calls in one order. Where both sides have as many of a kind between
    two pairs, they are matched in order; other calls as in `otherwise`.
    """
    is_apart = ~calls.synchronizing
    if not is_apart.any():
        return otherwise
    mark = _in_order(pairs, np.zeros(len(pairs), np.int64))
    on_instances = np.zeros(len(instances.end_time), bool)
    on_instances[pairs[mark]] = True
    call_numbers = _number_between(calls.kind, calls.start, mark, is_apart, "a")
    instance_numbers = _number_between(instances.kind, instances.start, on_instances, ~instances.synchronizing, "b")
    both = call_numbers.join(instance_numbers, on=["kind", "gap", "i", "n"])
    matched, filled = both["a"].to_numpy(), np.where(is_apart, UNKNOWN, otherwise)
    filled[matched] = both["b"].to_numpy()
    is_unmatched = (filled < 0) & ~np.isin(otherwise, filled)
    return np.where(is_unmatched, otherwise, filled)


def _number_between(
    kind: _Ints, start: _Ints, mark: npt.NDArray[np.bool_], is_chosen: npt.NDArray[np.bool_], name: str
) -> pl.DataFrame:
    """Return the chosen calls, numbered by start within their kind and the gap between two marks, with their count.

    Before the first mark and after the last, numbers count from the mark, since one trace can begin or end earlier.
    """
    index, count = pl.int_range(pl.len()).over("kind", "gap"), pl.len().over("kind", "gap").cast(pl.Int64)
    return (
        pl.DataFrame({"kind": kind, "start": start, "mark": mark, "chosen": is_chosen})
        .with_row_index(name)
        .sort("start", name)
        .with_columns(gap=pl.col("mark").cum_sum())
        .filter("chosen")
        .select(name, "kind", "gap", index.alias("i"), count.alias("n"))
    )


def _in_order(pairs: _Ints, kind: _Ints) -> npt.NDArray[np.bool_]:
    """Mark the pairs that are in the same order on both sides, within their kind."""
    pair = pl.col("pair")
    is_in_order = (pair >= 0) & (pair >= pair.cum_max().over("kind"))
    return pl.DataFrame({"pair": pairs, "kind": kind}).select(is_in_order).to_series().to_numpy()


def _number_unmatched(
    kind: _Ints, mark: npt.NDArray[np.bool_], is_matched: npt.NDArray[np.bool_], name: str
) -> pl.DataFrame:
    """Return the unmatched calls, numbered within their kind and the gap between two marks of that kind.

    Before the first mark and after the last, where one trace can begin or end before the other, numbers count from the
    mark. In other gaps both sides must have the same number of calls, `n`.
    """
    first, last = pl.col("gap") == 0, pl.col("gap") == pl.col("mark").sum().over("kind")
    index, count = pl.int_range(pl.len()).over("kind", "gap"), pl.len().over("kind", "gap").cast(pl.Int64)
    return (
        pl.DataFrame({"kind": kind, "mark": mark, "is_matched": is_matched})
        .with_row_index(name)
        .with_columns(pl.col("mark").cum_sum().over("kind").alias("gap"))
        .with_columns((first & ~last).alias("is_before"), (last & ~first).alias("is_after"))
        .filter(~pl.col("is_matched"))
        .with_columns(index.alias("index"), count.alias("n"))
        .select(
            name,
            "kind",
            "gap",
            pl.when("is_before").then(pl.col("index") - pl.col("n")).otherwise("index").alias("i"),
            pl.when(pl.col("is_before") | pl.col("is_after")).then(0).otherwise("n").alias("n"),
        )
    )


# By the order of all calls ------------------------------------------------------------------------------------------


def _align_sequences(calls: RankCalls, instances: Instances, offset_ns: int | None) -> tuple[int, _Ints] | None:
    """Match two sequences of calls as wholes, shifted against each other; return offset and pairs, None if none fits.

    All ranks of a group call the same collectives in the same order, so where no call was lost, one shift pairs every
    call with one of the same op and size. It may be found where ends scatter by more than collectives take, as on GPUs
    that several processes share in turns. All ranks have to be inside together, with `offset_ns` if that is known.
    """
    order, other_order = np.lexsort((calls.end, calls.start)), np.lexsort((instances.end, instances.start))
    best: tuple[float, int, _Ints] | None = None
    for shift in _possible_shifts(calls.kind[order], instances.kind[other_order]):
        low, high = max(0, -shift), min(len(order), len(other_order) - shift)
        i, j = order[low:high], other_order[low + shift : high + shift]
        is_long = len(i) >= min(len(order), len(other_order)) // 2 and calls.synchronizing[i].sum() >= MIN_PAIRS
        if not is_long or not _are_same(calls, instances, i, j):
            continue
        pairs = np.full(len(order), UNKNOWN, np.int64)
        pairs[i] = j
        score, offset = _precision(calls, instances, pairs)
        offset = _possible_offset(calls, instances, pairs, offset) if offset_ns is None else offset_ns
        if _share_together(calls, instances, pairs, offset) >= _MIN_EXPLAINED and (best is None or score > best[0]):
            best = score, offset, pairs
    return best and best[1:]


def _possible_shifts(call_kind: _Ints, instance_kind: _Ints) -> list[int]:
    """Return the shifts, smallest first, that pair calls of the kind that gives fewest; none if those are too many."""
    kinds, counts = np.unique(call_kind, return_counts=True)
    instance_counts = np.array([(instance_kind == kind).sum() for kind in kinds], np.int64)
    shared = counts * instance_counts > 0
    if not shared.any():
        return []
    kind = kinds[shared][np.argmin((counts * instance_counts)[shared])]
    rows, other_rows = np.flatnonzero(call_kind == kind), np.flatnonzero(instance_kind == kind)
    if len(rows) * len(other_rows) > _MAX_PAIRS:
        return []
    shifts = distinct(other_rows[None, :] - rows[:, None])
    return sorted(shifts.tolist(), key=abs)[:_MAX_SHIFTS]


def _are_same(calls: RankCalls, instances: Instances, i: _Ints, j: _Ints) -> bool:
    for part in (slice(_FEW), slice(_FEW, None)):  # most shifts differ within the first few calls
        a, b = i[part], j[part]
        if not ((calls.op[a] == instances.op[b]) & _compatible(calls.bytes[a], instances.bytes[b])).all():
            return False
    return True


def _possible_offset(calls: RankCalls, instances: Instances, pairs: _Ints, offset_ns: int) -> int:
    """Return the offset nearest to `offset_ns` at which no rank leaves before all have arrived, if there is one.

    Ends scatter where ranks finish a collective at different times, as in an uneven all-to-all; this bound is exact.
    """
    i = np.flatnonzero((pairs >= 0) & calls.synchronizing)
    low_ns = int((instances.start[pairs[i]] - calls.end[i]).max())
    high_ns = int((instances.end[pairs[i]] - calls.start[i]).min())
    return min(max(offset_ns, low_ns), high_ns) if low_ns <= high_ns else offset_ns


def _share_together(calls: RankCalls, instances: Instances, pairs: _Ints, offset_ns: int) -> float:
    """Return the share of pairs in which all ranks were inside at the same time, as a collective needs."""
    i = np.flatnonzero((pairs >= 0) & calls.synchronizing)
    start = np.maximum(calls.start[i] + offset_ns, instances.start[pairs[i]])
    end = np.minimum(calls.end[i] + offset_ns, instances.end[pairs[i]])
    return float((start <= end + _SLACK_NS).mean()) if len(i) else 0.0
