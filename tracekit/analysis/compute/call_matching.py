"""Which calls of one run are which calls of the other: by operator, call path, shapes and order in the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from tracekit.analysis.compute import call_paths

CALL, LABEL = "call", "label"
OPERATOR, CHAIN = "operator", "chain"
ARROW = " → "
_AND = " + "
_MAX_OPERATORS = 3
_CALLER, _IS_BACKWARD, _TENSORS = "_caller", "_is_backward", "_tensors"
_TENSOR = r"\[\d[^\[\]]*\]"


def match_calls(
    reference: pl.DataFrame, candidate: pl.DataFrame, identity: Sequence[str], place: Sequence[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both tables of call sites with a number `call`, the same for sites that are the same calls, and a label.

    Sites that agree in `identity` and `place` (path and shapes) are the same. Of the rest, those that agree in the
    identity and all of the place but its last column are, in order (column order_ns), then in all but the one before,
    and so on: with another batch size the shapes differ, under another annotation the path.

    Of what is left, if the identity has the operator: what one operator of the dispatcher calls in one run is the same
    work as what it calls in the other, by another library (``aten::_convolution`` calls cuDNN or MIOpen). The innermost
    common caller decides (column chain, see `call_paths.dispatch_chains`), of forward and backward apart; sites of the
    same tensors are the same calls, then in order. The label has the operators of both: "a → b". A caller with more
    than three operators left in a run is not such a pair. What is left then is new or gone. Each table has one row per
    identity and place.
    """
    rests = [side.with_row_index("_row") for side in (reference, candidate)]
    matching = _Matching(rests, [[], []])
    for key in dict.fromkeys(
        ((*identity, *place), *((*identity, *(p for p in place if p != dropped)) for dropped in reversed(place)))
    ):
        matching.pair(matching.rests[0], matching.rests[1], key)
    if OPERATOR in identity and CHAIN in reference.columns and CHAIN in candidate.columns:
        _match_libraries(matching, [name for name in identity if name != OPERATOR])
    return matching.finish(reference, candidate)


def both(before: str, after: str) -> pl.Expr:
    """Join two columns about the same calls: one value where they agree or one is missing, else both."""
    a, b = pl.col(before), pl.col(after)
    differ = a.is_not_null() & b.is_not_null() & (a != b)
    return pl.when(differ).then(pl.concat_str(a, pl.lit(ARROW), b)).otherwise(pl.coalesce(b, a))


def _match_libraries(matching: "_Matching", identity: Sequence[str]) -> None:
    """Match what is left under the same operators of the dispatcher, the innermost first."""
    key = (*identity, _CALLER, _IS_BACKWARD)
    links = [rest[CHAIN].str.count_matches(call_paths.SEPARATOR, literal=True).max() for rest in matching.rests]
    for depth in range(max(int(str(count or 0)) for count in links), 0, -1):
        labels = _labels(*(_inside(rest, depth) for rest in matching.rests), key=key)
        for pass_key, is_rest in (((*key, _TENSORS), False), (key, True)):
            if labels[0].height:
                pair = zip(matching.rests, labels, strict=True)
                a, b = (_inside(rest, depth).join(label, on=[*key, OPERATOR], nulls_equal=True) for rest, label in pair)
                matching.pair(a, b, pass_key, with_rest=is_rest)


def _labels(a: pl.DataFrame, b: pl.DataFrame, *, key: Sequence[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the operators of either run that are left under a caller in that run alone: columns key, operator, label.

    Only of callers that have some in both runs.
    """
    a_operators, b_operators = (side.select(*key, OPERATOR).unique() for side in (a, b))
    on = [*key, OPERATOR]
    one_sided = (
        a_operators.join(b_operators, on=on, how="anti", nulls_equal=True),
        b_operators.join(a_operators, on=on, how="anti", nulls_equal=True),
    )
    before, after = (side.group_by(key).agg(pl.col(OPERATOR).sort().alias("_names")) for side in one_sided)
    both_sides = before.join(after, on=key, nulls_equal=True, suffix="_b").filter(
        *(pl.col(names).list.len() <= _MAX_OPERATORS for names in ("_names", "_names_b"))
    )
    label = pl.concat_str(pl.col("_names").list.join(_AND), pl.lit(ARROW), pl.col("_names_b").list.join(_AND))
    labels = both_sides.select(*key, label.alias(LABEL))
    first, second = (side.join(labels, on=key, nulls_equal=True) for side in one_sided)
    return first, second


def _inside(sites: pl.DataFrame, depth: int) -> pl.DataFrame:
    """Return the sites inside an operator that is the `depth`-th of their chain: that caller, and their tensors."""
    names = pl.col(CHAIN).str.split(call_paths.SEPARATOR)
    inside = sites.filter(names.list.len() > depth, names.list.get(depth - 1, null_on_oob=True) != call_paths.BACKWARD)
    return inside.with_columns(
        names.list.head(depth).list.join(call_paths.SEPARATOR).alias(_CALLER),
        names.list.contains(call_paths.BACKWARD).alias(_IS_BACKWARD),
        pl.col("shapes").str.extract_all(_TENSOR).list.join(" ").alias(_TENSORS),
    )


@dataclass(eq=False)
class _Matching:
    """The sites of both runs that are not matched yet, and the calls of those that are: columns _row, call, label."""

    rests: list[pl.DataFrame]
    pairs: list[list[pl.DataFrame]]
    count: int = 0

    def pair(self, a: pl.DataFrame, b: pl.DataFrame, key: Sequence[str], *, with_rest: bool = False) -> None:
        """Match sites that agree in the key, in order. `with_rest`: those beyond the shorter side are of one run."""
        sides = [_number_sites(side, key) for side in (a, b)]
        how: Literal["inner", "full"] = "full" if with_rest else "inner"
        pairs = sides[0].join(sides[1], on=[*key, "_nth"], how=how, nulls_equal=True, suffix="_b")
        label = pl.coalesce(LABEL, f"{LABEL}_b")
        pairs = pairs.sort("_row", "_row_b", nulls_last=True).select("_row", "_row_b", label.alias(LABEL))
        pairs = pairs.with_row_index(CALL, offset=self.count)
        self.count += pairs.height
        for side, name in enumerate(("_row", "_row_b")):
            self.pairs[side].append(pairs.select(pl.col(name).alias("_row"), CALL, LABEL).drop_nulls("_row"))
            self.rests[side] = self.rests[side].join(self.pairs[side][-1], on="_row", how="anti", maintain_order="left")

    def finish(self, *sides: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return both tables with call and label; what is not matched is a call of its own."""
        for side, rest in enumerate(self.rests):
            unmatched = rest.select("_row").with_row_index(CALL, offset=self.count)
            self.pairs[side].append(unmatched.select("_row", CALL, pl.lit(None, pl.String).alias(LABEL)))
            self.count += rest.height
        a, b = (
            side.with_row_index("_row").join(pl.concat(parts), on="_row", maintain_order="left").drop("_row")
            for side, parts in zip(sides, self.pairs, strict=True)
        )
        return a, b


def _number_sites(sites: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Return the sites with `_nth`: which of those with this key it is, in the order of the step; and their label."""
    ordered = sites.sort("order_ns", "_row", nulls_last=True)
    label = LABEL if LABEL in sites.columns else pl.lit(None, pl.String).alias(LABEL)
    return ordered.select(*key, "_row", label, pl.int_range(pl.len()).over(key).alias("_nth"))
