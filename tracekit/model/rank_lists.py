"""Lists of ranks as short text: a group of thousands of ranks, in a row for each of them, would take gigabytes."""

from collections.abc import Iterator, Sequence

import polars as pl


def to_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, in their order; three or more at equal distances are FIRST:LAST:DISTANCE.

    >>> to_text([0, 1, 2, 3]), to_text([0, 8, 16]), to_text([5, 2])
    ('0:3:1', '0:16:8', '5,2')
    """
    return ",".join(_parts(ranks))


def from_text(text: str) -> list[int]:
    """Return the ranks of `to_text`.

    >>> from_text("0:3:1,9,7")
    [0, 1, 2, 3, 9, 7]
    """
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        first, *rest = map(int, part.split(":"))
        ranks += range(first, rest[0] + 1, rest[1]) if rest else (first,)
    return ranks


def texts(lists: pl.Series) -> pl.Series:
    """Return the text of each list of ranks; null for null."""
    return pl.Series(lists.name, [None if ranks is None else to_text(ranks) for ranks in lists.to_list()], pl.String)


def lists(texts: pl.Series) -> pl.Series:
    """Return the list of ranks of each text; null for null."""
    ranks = {text: from_text(text) for text in texts.drop_nulls().unique()}
    return pl.Series(texts.name, [None if text is None else ranks[text] for text in texts], pl.List(pl.Int64()))


def _parts(ranks: Sequence[int]) -> Iterator[str]:
    first = 0
    while first < len(ranks):
        last = min(first + 1, len(ranks) - 1)
        distance = ranks[last] - ranks[first]
        while distance > 0 and last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == distance:
            last += 1
        if last < first + 2:
            last = first
        yield str(ranks[first]) if last == first else f"{ranks[first]}:{ranks[last]}:{distance}"
        first = last + 1
