"""Which calls of one run are which calls of the other: by operator, call path, shapes and order in the step."""

from collections.abc import Sequence

import polars as pl

CALL = "call"
ARROW = " → "


def matched(
    reference: pl.DataFrame, candidate: pl.DataFrame, identity: Sequence[str], place: Sequence[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both tables of call sites with a number `call`, the same for sites that are the same calls.

    Sites that agree in `identity` and `place` (path and shapes) are the same. Of the rest, those that agree in the
    identity and all of the place but its last column are, in order (column order_ns), then in all but the one before,
    and so on: with another batch size the shapes differ, under another annotation the path. What is left is new or
    gone. Each table has one row per identity and place.
    """
    keys = [[*identity, *place], *([*identity, *(p for p in place if p != left)] for left in reversed(place))]
    rests = [side.with_row_index("_row") for side in (reference, candidate)]
    found: list[list[pl.DataFrame]] = [[], []]
    count = 0
    for key in dict.fromkeys(map(tuple, keys)):
        numbered = [_numbered(rest, key) for rest in rests]
        pairs = numbered[0].join(numbered[1], on=[*key, "_nth"], nulls_equal=True, suffix="_b").sort("_row")
        pairs = pairs.select("_row", "_row_b").with_row_index(CALL, offset=count)
        count += pairs.height
        for side, name in enumerate(("_row", "_row_b")):
            found[side].append(pairs.select(pl.col(name).alias("_row"), CALL))
            rests[side] = rests[side].join(found[side][-1], on="_row", how="anti", maintain_order="left")
    for side in (0, 1):
        found[side].append(rests[side].select("_row").with_row_index(CALL, offset=count).select("_row", CALL))
        count += rests[side].height
    a, b = (
        side.with_row_index("_row").join(pl.concat(parts), on="_row", maintain_order="left").drop("_row")
        for side, parts in zip((reference, candidate), found, strict=True)
    )
    return a, b


def both(before: str, after: str) -> pl.Expr:
    """Return what two columns say of the same calls: one value where they agree or one is missing, else both."""
    a, b = pl.col(before), pl.col(after)
    differ = a.is_not_null() & b.is_not_null() & (a != b)
    return pl.when(differ).then(pl.concat_str(a, pl.lit(ARROW), b)).otherwise(pl.coalesce(b, a))


def _numbered(sites: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Return the sites with `_nth`: which of those with this key it is, in the order of the step."""
    ordered = sites.sort("order_ns", "_row", nulls_last=True)
    return ordered.select(*key, "_row", pl.int_range(pl.len()).over(key).alias("_nth"))
