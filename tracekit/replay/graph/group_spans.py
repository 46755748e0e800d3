"""How process groups lie on nodes of consecutive ranks: which links their messages cross, and who shares these."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """How the groups of an axis lie on nodes: the most ranks of a group on one node, and whether that is all of it."""

    ranks_per_node: int
    is_inside: bool


def recorded_span(groups: Sequence[Sequence[int]], node_of: Mapping[int, object]) -> Span:
    """Span of groups of these ranks.

    >>> recorded_span([[0, 2], [1, 3]], {0: "a", 1: "a", 2: "b", 3: "b"})
    Span(ranks_per_node=1, is_inside=False)
    """
    counts = [Counter(node_of.get(rank) for rank in ranks) for ranks in groups]
    return Span(max(max(count.values()) for count in counts), all(len(count) == 1 for count in counts))


def span_at_stride(size: int, stride: int, node_ranks: int) -> Span:
    """Span of groups of `size` ranks, each `stride` after the one before, on nodes of `node_ranks` consecutive ranks.

    >>> span_at_stride(8, 2, 8), span_at_stride(2, 16, 8)
    (Span(ranks_per_node=4, is_inside=False), Span(ranks_per_node=1, is_inside=False))
    """
    ranks_per_node = min(size, max(1, node_ranks // stride))
    return Span(ranks_per_node, ranks_per_node == size)


def stride(ranks: Sequence[int]) -> int:
    """Distance of a group's ranks; the least one where they differ.

    >>> stride([1, 3, 5])
    2
    """
    ordered = sorted(set(ranks))
    return min((after - before for before, after in itertools.pairwise(ordered)), default=1)
