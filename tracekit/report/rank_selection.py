"""The ranks that figures with a row for each rank draw: all of a few; of many the typical one and the extremes."""

from collections.abc import Mapping

from tracekit.analysis.time import rank_shares
from tracekit.model.run import Run

MAX_DRAWN = 64
"""Figures with a row for each rank draw all ranks of runs that have no more."""


def drawn_ranks(run: Run) -> Mapping[int, str]:
    """Ranks that a figure with a row for each rank draws, with what each is: "typical", "most idle".

    All ranks of a run with at most `MAX_DRAWN`, without a text; of larger ones those of `rank_shares.notable`.
    """
    if len(run.ranks) <= MAX_DRAWN:
        return dict.fromkeys(run.ranks, "")
    ranks = rank_shares.shares(run)
    return dict.fromkeys(run.ranks[:MAX_DRAWN], "") if ranks.is_empty() else rank_shares.notable(ranks)


def selection_note(run: Run) -> str:
    """Sentence about the ranks of `drawn_ranks`; "" where these are all ranks."""
    if len(run.ranks) <= MAX_DRAWN:
        return ""
    return f"Of {len(run.ranks):,} ranks, the typical one and the extreme ones are drawn."
