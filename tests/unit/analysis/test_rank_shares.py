import polars as pl
import pytest

from tests.support import drawn_traces
from tracekit.analysis.time import rank_shares
from tracekit.report import rank_selection


def shares(compute):
    """Return the shares of ranks that compute for these parts of their time and wait for the rest."""
    return pl.DataFrame(
        {
            "rank": range(len(compute)),
            "traced_ns": [1000 + rank for rank in range(len(compute))],
            "compute_ratio": compute,
            "exposed comm_ratio": [1 - each for each in compute],
            "exposed copy_ratio": [0.0] * len(compute),
            "idle_ratio": [0.0] * len(compute),
            "comm hidden_ratio": [None] * len(compute),
        },
        schema_overrides={"comm hidden_ratio": pl.Float64},
    )


def test_the_typical_rank_and_the_extreme_ones_are_named():
    compute = [0.5] * 20
    compute[7], compute[11], compute[3] = 0.8, 0.2, 0.505
    assert rank_shares.notable(shares(compute)) == {0: "typical", 7: "most compute", 11: "most exposed comm"}


def test_ranks_that_are_alike_have_no_extreme_one():
    assert rank_shares.notable(shares([0.500, 0.501, 0.502] * 8)) == {1: "typical"}


def test_a_rank_that_is_several_things_is_listed_once():
    ranks = shares([0.5] * 19 + [0.6]).with_columns(pl.lit(0.3).alias("idle_ratio"))
    ranks = ranks.with_columns(pl.when(pl.col("rank") == 19).then(0.5).otherwise("idle_ratio").alias("idle_ratio"))
    assert rank_shares.notable(ranks)[19] == "most compute, most idle"


@pytest.mark.parametrize("ranks", [64, 65])
def test_figures_draw_all_ranks_of_a_few_and_the_notable_ones_of_many(ranks):
    work = ["step 00000\ncompute aa..a", "step 00000\ncompute aaaaa"]
    drawn_run = drawn_traces.run(*(drawn_traces.trace(work[rank == 7], rank=rank) for rank in range(ranks)))
    drawn = rank_selection.drawn_ranks(drawn_run)
    if ranks == 64:
        assert drawn == dict.fromkeys(range(64), "")
        assert rank_selection.selection_note(drawn_run) == ""
    else:
        assert drawn[0] == "typical"
        assert "most compute" in drawn[7]
        assert rank_selection.selection_note(drawn_run).startswith("Of 65 ranks")


def test_quantiles_are_of_all_ranks():
    compute = [rank / 100 for rank in range(101)]
    rows = rank_shares.with_quantiles(shares(compute))
    quantiles = {row[""]: row for row in rows.to_dicts() if row["rank"] is None}
    assert [quantiles[name]["compute_ratio"] for name in ("5th percentile", "median", "95th percentile")] == [
        pytest.approx(each) for each in (0.05, 0.5, 0.95)
    ]
    assert quantiles["95th percentile"]["traced_ns"] == 1095
    assert rows["rank"].to_list() == [50, 100, 0, None, None, None]
