"""Levels of detail of the slices of rows: at level k, slices shorter than 2**k / 2 are merged where they lie close.

Slices of a row that follow each other are merged at level k if all of them are that short and begin in one bin of the
grid of 2**k ns. What is merged at one level stays so at the next, so the merged runs make a forest over the slices:
each run is made at one level and merged into a longer one at a later level. It is stored once, with both levels; level
k consists of the runs made by then and not yet merged. All levels together have at most twice as many rows as slices.
"""

from dataclasses import dataclass

import numpy as np

from tracekit.model.nesting import Flags, Ints

NO_LEVEL = 64
"""The last level of runs that are never merged into a longer one."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Merged runs. `first` and `last` are the slices at their ends, `count` how many slices they hold.

    `busy_ns` is the time of their slices, `name` the name with most of that time (of equal ones the least), `made` and
    `ends` the levels between which the run stands for its slices: made <= level < ends.
    """

    first: Ints
    last: Ints
    count: Ints
    busy_ns: Ints
    name: Ints
    made: Ints
    ends: Ints


def bit_length(values: Ints) -> Ints:
    """Number of bits of each number, none of them negative; beyond 2**53 it may be one more.

    >>> bit_length(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def group_starts(*columns: Ints) -> Flags:
    """Flag the first row of each group of consecutive rows that are equal in all columns."""
    starts = np.ones(len(columns[0]), bool)
    starts[1:] = np.logical_or.reduce([values[1:] != values[:-1] for values in columns])
    return starts


def links(row: Ints, start_ns: Ints, dur_ns: Ints) -> Ints:
    """Return the level at which each slice is merged with the next; NO_LEVEL for the last of a row. Shape (n,).

    Slices are sorted by row and start; no start is negative.
    """
    levels = np.full(len(row), NO_LEVEL, np.int64)
    if len(row) > 1:
        short = bit_length(dur_ns) + 1
        together = bit_length(start_ns[1:] ^ start_ns[:-1])
        level = np.maximum(np.maximum(short[1:], short[:-1]), together)
        levels[:-1] = np.where(row[1:] == row[:-1], level, NO_LEVEL)
    return levels


def merge_levels(row: Ints, start_ns: Ints, dur_ns: Ints, name: Ints) -> tuple[Ints, Runs]:
    """Return the level at which each slice ends in a run, and the runs; slices are sorted by row and start."""
    count = len(row)
    forest = _Forest(
        first=np.arange(count),
        last=np.arange(count),
        count=np.ones(count, np.int64),
        busy_ns=dur_ns.copy(),
        name=name.copy(),
        made=np.zeros(count, np.int64),
        link=links(row, start_ns, dur_ns),
        shares=_Shares(np.arange(count), name.copy(), dur_ns.copy(), int(name.max(initial=0)) + 1),
    )
    ends = np.full(count, NO_LEVEL, np.int64)
    parts = []
    for level in np.unique(forest.link).tolist():
        if level >= NO_LEVEL:
            break
        dying = forest.dying(level)
        is_slice = forest.made[dying] == 0
        ends[forest.first[dying[is_slice]]] = level
        parts.append(forest.runs(dying[~is_slice], level))
        forest = forest.merge(level)
    parts.append(forest.runs(np.flatnonzero(forest.made > 0), NO_LEVEL))
    return ends, Runs(*(np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class _Shares:
    """How much of a node's time goes by which name."""

    node: Ints
    name: Ints
    busy_ns: Ints
    names: int

    def merge(self, into: Ints, sizes: Ints) -> tuple["_Shares", Ints, Ints]:
        """Return the shares of merged nodes; and those nodes that are new, with the name that has most time."""
        node = into[self.node]
        touched = sizes[node] > 1
        key = node[touched] * self.names + self.name[touched]
        order = np.argsort(key, kind="stable")
        key, busy_ns = key[order], self.busy_ns[touched][order]
        heads = np.flatnonzero(group_starts(key))
        sums, key = np.add.reduceat(busy_ns, heads), key[heads]
        new, new_names = key // self.names, key % self.names
        first = np.flatnonzero(group_starts(new))
        longest_ns = np.maximum.reduceat(sums, first)
        top = np.flatnonzero(sums == np.repeat(longest_ns, np.diff(np.append(first, len(new)))))
        top = top[group_starts(new[top])]
        unchanged = ~touched
        shares = _Shares(
            np.concatenate((node[unchanged], new)),
            np.concatenate((self.name[unchanged], new_names)),
            np.concatenate((self.busy_ns[unchanged], sums)),
            self.names,
        )
        return shares, new[top], new_names[top]


@dataclass(frozen=True, eq=False)
class _Forest:
    """What stands for the slices at one level, in their order: slices (made 0) and runs."""

    first: Ints
    last: Ints
    count: Ints
    busy_ns: Ints
    name: Ints
    made: Ints
    link: Ints
    shares: _Shares

    def dying(self, level: int) -> Ints:
        """Return the nodes that are merged at `level`."""
        joins = self.link == level
        joins[1:] |= joins[:-1].copy()
        return np.flatnonzero(joins)

    def runs(self, nodes: Ints, ends: int) -> Runs:
        names = ("first", "last", "count", "busy_ns", "name", "made")
        columns = {name: getattr(self, name)[nodes] for name in names}
        return Runs(**columns, ends=np.full(len(nodes), ends, np.int64))

    def merge(self, level: int) -> "_Forest":
        """Return the forest at `level`, at which some nodes are merged."""
        begins = np.concatenate(([True], self.link[:-1] != level))
        heads = np.flatnonzero(begins)
        sizes = np.diff(np.append(heads, len(begins)))
        shares, new, new_names = self.shares.merge(np.cumsum(begins) - 1, sizes)
        tails = heads + sizes - 1
        name = self.name[heads]
        name[new] = new_names
        return _Forest(
            first=self.first[heads],
            last=self.last[tails],
            count=np.add.reduceat(self.count, heads),
            busy_ns=np.add.reduceat(self.busy_ns, heads),
            name=name,
            made=np.where(sizes > 1, level, self.made[heads]),
            link=self.link[tails],
            shares=shares,
        )
