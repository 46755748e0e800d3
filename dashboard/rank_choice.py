"""The choice of ranks that a page draws one below the other: all of a few; of many the representative ones at first."""

from collections.abc import Iterable, Mapping

import streamlit as st

from dashboard.run_store import OpenRun
from dashboard.url_state import bind_several
from tracekit.report import rank_selection

MAX_CHOSEN = 32
"""How many ranks can be drawn at a time where a run has more than `rank_selection.MAX_DRAWN`."""
_NAME = "drawn"


def is_needed(rank_count: int) -> bool:
    """Return whether a run has too many ranks to draw all of them."""
    return rank_count > rank_selection.MAX_DRAWN


def choose(run: OpenRun, extra: Iterable[int] = (), also: Mapping[int, str] | None = None) -> Mapping[int, str] | None:
    """Let a person choose the ranks to draw; return them with what each is, such as "typical". None: all.

    At first these are the ranks of `also`, with what each is, then the typical rank and the extreme ones, as in the
    report. `extra` are added to the choice, such as the rank of a finding that another page opens.
    """
    ranks = run.run.ranks
    if not is_needed(len(ranks)):
        return None
    notable = dict(also or {})
    for rank, what in run.result_of(rank_selection.drawn_ranks).items():
        notable[rank] = f"{notable[rank]}, {what}" if rank in notable else what
    key = bind_several(_NAME, ranks, tuple(notable), at_most=MAX_CHOSEN)
    missing = [rank for rank in dict.fromkeys(extra) if rank in ranks and rank not in st.session_state[key]]
    if missing:
        st.session_state[key] = [*st.session_state[key], *missing][-MAX_CHOSEN:]
        bind_several(_NAME, ranks, tuple(notable), at_most=MAX_CHOSEN)
    picked = st.multiselect(
        f"Ranks drawn, of {len(ranks):,}", ranks, key=key, max_selections=MAX_CHOSEN, placeholder="Choose ranks",
        format_func=lambda rank: f"{rank} · {notable[rank]}" if notable.get(rank) else str(rank),
    )  # fmt: skip
    return {rank: notable.get(rank, "") for rank in picked or notable}
