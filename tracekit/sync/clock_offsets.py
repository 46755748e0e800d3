"""One rank's calls of a group against the instances found so far: which is which, and how far apart the clocks are.

All ranks leave a collective together. So with the right offset between two clocks, the ends of the same collectives
coincide; with a wrong one, even one step off, they scatter.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

_Ints = npt.NDArray[np.int64]
UNKNOWN = -1
MIN_PAIRS = 3
"""Fewer collectives in common say nothing about two clocks."""

_SCALES_NS = (20_000, 200_000, 2_000_000, 20_000_000)
_FAR_NS = 20_000_000
_NEAR_NS = 1_000
_MAX_PAIRS = 2_000_000
_CANDIDATES = 4
_MIN_LEAD = 3.0
_SLACK_NS = 50_000
_NEVER_NS = 1 << 62


@dataclass(frozen=True)
class Calls:
    """The calls of one rank in one group, by their ends."""

    row: _Ints
    start: _Ints
    end: _Ints
    token: _Ints
    op: _Ints
    bytes: _Ints
    seq: _Ints
    step: _Ints
    together: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: pl.DataFrame) -> "Calls":
        """Return the calls in `rows`, which has a column for each field (start_ns, end_ns, op_code)."""
        rows = rows.sort("end_ns", "start_ns")
        names = ("row", "start_ns", "end_ns", "token", "op_code", "bytes", "seq", "step")
        row, start, end, token, op, size, seq, step = (
            rows[name].fill_null(UNKNOWN).to_numpy().astype(np.int64) for name in names
        )
        return cls(row, start, end, token, op, size, seq, step, rows["together"].to_numpy())


@dataclass(frozen=True)
class Line:
    """Instances by their ends, each as the first rank saw it; `start` and `end` narrow to the time all were inside."""

    instance: _Ints
    time: _Ints
    start: _Ints
    end: _Ints
    token: _Ints
    op: _Ints
    bytes: _Ints
    seq: _Ints
    step: _Ints
    together: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, first: Calls, offset_ns: int) -> "Line":
        """Return the line that the calls of a first rank make, each an instance."""
        end = first.end + offset_ns
        numbers = np.arange(len(end), dtype=np.int64)
        facts = (first.token, first.op, first.bytes, first.seq, first.step, first.together)
        return cls(numbers, end, first.start + offset_ns, end, *facts)

    def joined(self, mine: Calls, fit: "Fit") -> "Line":
        """Return the line with a rank's calls in it: those paired narrow an instance, the others are new ones."""
        start, end = self.start.copy(), self.end.copy()
        at = fit.paired >= 0
        start[fit.paired[at]] = np.maximum(start[fit.paired[at]], mine.start[at] + fit.offset_ns)
        end[fit.paired[at]] = np.minimum(end[fit.paired[at]], mine.end[at] + fit.offset_ns)
        new = ~at
        times = mine.end[new] + fit.offset_ns
        parts = (
            (self.instance, fit.instance[new]),
            (self.time, times),
            (start, mine.start[new] + fit.offset_ns),
            (end, times),
            (self.token, mine.token[new]),
            (self.op, mine.op[new]),
            (self.bytes, mine.bytes[new]),
            (self.seq, mine.seq[new]),
            (self.step, mine.step[new]),
            (self.together, mine.together[new]),
        )
        by_time = np.argsort(np.concatenate(parts[1]), kind="stable")
        return Line(*(np.concatenate(part)[by_time] for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fit:
    """How a rank fits a line: its offset, per call the line's row (-1: none) and the instance (a new one if none)."""

    offset_ns: int
    paired: _Ints
    instance: _Ints
    ties_clocks: bool


def fit(mine: Calls, line: Line, *, offset_ns: int | None, pairs: _Ints | None) -> Fit | None:
    """Return how the calls of a rank fit the line; None where too few do to say so.

    `offset_ns` is the rank's offset where it is known, `pairs` the pairs where sequence numbers tell them.
    """
    if pairs is not None:
        agreed = _offset(mine, line, pairs) if offset_ns is None else offset_ns
        return Fit(agreed or 0, pairs, _instances(line, pairs), ties_clocks=agreed is not None)
    agreed = _vote(mine, line) if offset_ns is None else offset_ns
    if agreed is None:
        return None
    pairs = _paired(mine, line, agreed)
    if not _is_enough(mine, line, agreed, pairs):
        return None
    return Fit(agreed, pairs, _instances(line, pairs), ties_clocks=True)


def _instances(line: Line, pairs: _Ints) -> _Ints:
    instance = np.where(pairs >= 0, line.instance[pairs], 0)
    instance[pairs < 0] = line.instance.max(initial=-1) + 1 + np.arange((pairs < 0).sum())
    return instance


def pairs_by_seq(mine: Calls, line: Line) -> _Ints:
    """Return for each call the line's row with the same op and sequence number, -1 where there is none."""
    order = np.lexsort((line.op, line.seq))
    return _looked_up(_keyed(line.seq, line.op)[order], order, _keyed(mine.seq, mine.op), mine, line)


def _keyed(number: _Ints, code: _Ints) -> _Ints:
    return number * 64 + code  # fewer than 64 kinds of collectives


def _looked_up(keys: _Ints, order: _Ints, wanted: _Ints, mine: Calls, line: Line) -> _Ints:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = order[at]
    return np.where((keys[at] == wanted) & _agree(mine.bytes, line.bytes[found]), found, UNKNOWN)


def _agree(a: _Ints, b: _Ints) -> npt.NDArray[np.bool_]:
    return np.asarray((a == b) | (a == UNKNOWN) | (b == UNKNOWN))


def _offset(mine: Calls, line: Line, pairs: _Ints) -> int | None:
    at = (pairs >= 0) & mine.together
    return int(np.median(line.time[pairs[at]] - mine.end[at])) if at.sum() >= MIN_PAIRS else None


# Without sequence numbers: let the ends vote -------------------------------------------------------------------------


def _vote(mine: Calls, line: Line) -> int | None:
    """Return the offset with which most ends of equal calls coincide best; None where there is none."""
    differences = _differences(mine, line)
    if len(differences) < MIN_PAIRS:
        return None
    best: tuple[float, int] | None = None
    tried: set[int] = set()
    for candidate in sorted(_peaks(differences), key=abs):
        if candidate // _SCALES_NS[0] in tried:
            continue
        tried.add(candidate // _SCALES_NS[0])
        score, refined = _score(mine, line, candidate)
        if best is None or score > best[0] * 1.001:  # of equals, the clocks that differ least
            best = (score, refined)
    return best[1] if best and best[0] > 0 else None


def _differences(mine: Calls, line: Line) -> _Ints:
    """Return line's end minus the rank's end for all pairs of equal calls, sorted; rare kinds first, within a bound."""
    at_mine, at_line = np.flatnonzero(mine.together), np.flatnonzero(line.together)
    kinds, mine_counts = np.unique(mine.token[at_mine], return_counts=True)
    line_counts = np.array([(line.token[at_line] == kind).sum() for kind in kinds], np.int64)
    parts, room = [], _MAX_PAIRS
    for i in np.argsort(mine_counts * line_counts, kind="stable"):
        a = mine.end[at_mine[mine.token[at_mine] == kinds[i]]]
        b = line.time[at_line[line.token[at_line] == kinds[i]]]
        if not len(b) or room <= 0:
            continue
        a = a[:: -(-len(a) * len(b) // room)]
        parts.append((b[None, :] - a[:, None]).ravel())
        room -= len(a) * len(b)
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _peaks(differences: _Ints) -> list[int]:
    """Return where sorted differences are densest, at several scales: as sharp as NCCL, as blunt as a busy host."""
    peaks = []
    for scale in _SCALES_NS:
        past = np.searchsorted(differences, differences + scale, side="right")
        counts = past - np.arange(len(differences))
        for _ in range(_CANDIDATES):
            i = int(np.argmax(counts))
            if counts[i] < MIN_PAIRS:
                break
            peaks.append(int(np.median(differences[i : past[i]])))
            near = slice(np.searchsorted(differences, differences[i] - scale), past[i])
            counts[near] = 0
    return peaks


def _score(mine: Calls, line: Line, offset_ns: int) -> tuple[float, int]:
    """Return how well an offset explains the ends, and the offset made better by its own pairs.

    Each pair counts by how sharply it coincides, in orders of magnitude; half where the steps' numbers differ.
    """
    pairs = _nearest(mine, line, offset_ns, _FAR_NS)
    at = (pairs >= 0) & mine.together
    if at.sum() < MIN_PAIRS:
        return 0.0, offset_ns
    apart = line.time[pairs[at]] - mine.end[at]
    refined = int(np.median(apart))
    weight = np.where(_agree(mine.step[at], line.step[pairs[at]]), 1.0, 0.5)
    sharpness = np.log(_FAR_NS / np.clip(np.abs(apart - refined), _NEAR_NS, _FAR_NS))
    return float((weight * sharpness).sum()), refined


def _tolerance(mine: Calls, line: Line, offset_ns: int) -> int:
    pairs = _nearest(mine, line, offset_ns, _FAR_NS)
    at = (pairs >= 0) & mine.together
    apart = np.abs(line.time[pairs[at]] - mine.end[at] - offset_ns)
    return int(np.clip(10 * np.median(apart), 50_000, _FAR_NS)) if len(apart) else 50_000


def _paired(mine: Calls, line: Line, offset_ns: int) -> _Ints:
    """Return for each call the line's row that is the same collective, -1 where there is none.

    First the calls whose ends leave no doubt; between those by order; then what ends nearest; then, by order again,
    calls of which one side does not tell size or type.
    """
    tolerance_ns = _tolerance(mine, line, offset_ns)
    pairs = _nearest(mine, line, offset_ns, tolerance_ns, min_lead=_MIN_LEAD)
    pairs = _by_order(mine, line, offset_ns, pairs, mine.token, line.token)
    pairs = _with_more(pairs, _nearest(mine, line, offset_ns, tolerance_ns))
    return _by_order(mine, line, offset_ns, pairs, mine.op, line.op)


def _with_more(pairs: _Ints, more: _Ints) -> _Ints:
    return np.where((pairs < 0) & ~np.isin(more, pairs), more, pairs)


def _nearest(mine: Calls, line: Line, offset_ns: int, tolerance_ns: int, min_lead: float = 1.0) -> _Ints:
    """Return for each call the line's row of the same kind that ends nearest, if each is the other's nearest.

    The next nearest must be `min_lead` times as far, or more.
    """
    ends = mine.end + offset_ns
    low, high = min(ends.min(), line.time.min()), max(ends.max(), line.time.max())
    apart_ns = 2 * (high - low + tolerance_ns) + 1  # between kinds, so that one search serves all of them
    a, b = mine.token * apart_ns + ends - low, line.token * apart_ns + line.time - low
    a_order, b_order = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    there, lead = _closest(b[b_order], a)
    back, lead_back = _closest(a[a_order], b)
    there = b_order[there]
    mutual = (a_order[back[there]] == np.arange(len(a))) & (np.abs(b[there] - a) <= tolerance_ns)
    mutual &= (lead >= min_lead) & (lead_back[there] >= min_lead)
    return np.where(mutual, there, UNKNOWN).astype(np.int64)


def _closest(among: _Ints, to: _Ints) -> tuple[_Ints, npt.NDArray[np.float64]]:
    """Return, for each time, the index of the closest among sorted times, and how many times as far the next one is."""
    fenced = np.concatenate(([-_NEVER_NS], among, [_NEVER_NS]))
    right = np.searchsorted(among, to) + 1
    best = np.where(to - fenced[right - 1] <= fenced[right] - to, right - 1, right)
    distance = np.abs(fenced[best] - to)
    next_best = np.minimum(
        np.abs(fenced[np.maximum(best - 1, 0)] - to), np.abs(fenced[np.minimum(best + 1, len(among) + 1)] - to)
    )
    return best - 1, next_best / np.maximum(distance, 1)


def _is_enough(mine: Calls, line: Line, offset_ns: int, pairs: _Ints) -> bool:
    """Whether at least three, and a third of the calls that both recorded, coincide."""
    ends = mine.end + offset_ns
    low, high = max(ends[0], line.time[0]) - _FAR_NS, min(ends[-1], line.time[-1]) + _FAR_NS
    common = min(((ends >= low) & (ends <= high)).sum(), ((line.time >= low) & (line.time <= high)).sum())
    return int((pairs >= 0).sum()) >= max(MIN_PAIRS, int(common) // 3)


def _by_order(mine: Calls, line: Line, offset_ns: int, pairs: _Ints, mine_kind: _Ints, line_kind: _Ints) -> _Ints:
    """Pair more calls: of those of one kind between two pairs, the i-th with the i-th, if both sides have as many.

    A rank can leave late, when its host is busy. But nobody leaves before everybody has come, so both must have been
    inside at one time.
    """
    mark = _marks(pairs, mine_kind)
    on_line = np.zeros(len(line.time), bool)
    on_line[pairs[mark]] = True
    taken = np.isin(np.arange(len(line.time)), pairs)
    both = _numbered(mine_kind, mark, pairs >= 0, "a").join(
        _numbered(line_kind, on_line, taken, "b"), on=["kind", "gap", "i", "n"]
    )
    i, j = both["a"].to_numpy(), both["b"].to_numpy()
    start = np.maximum(mine.start[i] + offset_ns, line.start[j])
    end = np.minimum(mine.end[i] + offset_ns, line.end[j])
    fits = _agree(mine.bytes[i], line.bytes[j]) & ((start <= end + _SLACK_NS) | ~mine.together[i])
    filled = pairs.copy()
    filled[i[fits]] = j[fits]
    return filled


def _marks(pairs: _Ints, kind: _Ints) -> npt.NDArray[np.bool_]:
    """Return which pairs are in one order on both sides, within their kind."""
    frame = pl.DataFrame({"pair": pairs, "kind": kind})
    return (
        frame.select((pl.col("pair") >= 0) & (pl.col("pair") >= pl.col("pair").cum_max().over("kind")))
        .to_series()
        .to_numpy()
    )


def _numbered(kind: _Ints, mark: npt.NDArray[np.bool_], taken: npt.NDArray[np.bool_], name: str) -> pl.DataFrame:
    """Return what is free, numbered within its kind and the gap between two marks of that kind.

    Before the first mark and after the last, where one trace can begin or end before another, numbers count from the
    mark; elsewhere both sides must have as many, `n`.
    """
    first, last = pl.col("gap") == 0, pl.col("gap") == pl.col("mark").sum().over("kind")
    index, count = pl.int_range(pl.len()).over("kind", "gap"), pl.len().over("kind", "gap").cast(pl.Int64)
    return (
        pl.DataFrame({"kind": kind, "mark": mark, "taken": taken})
        .with_row_index(name)
        .with_columns(pl.col("mark").cum_sum().over("kind").alias("gap"))
        .with_columns((first & ~last).alias("is_before"), (last & ~first).alias("is_after"))
        .filter(~pl.col("taken"))
        .with_columns(index.alias("index"), count.alias("n"))
        .select(
            name,
            "kind",
            "gap",
            pl.when("is_before").then(pl.col("index") - pl.col("n")).otherwise("index").alias("i"),
            pl.when(pl.col("is_before") | pl.col("is_after")).then(0).otherwise("n").alias("n"),
        )
    )
