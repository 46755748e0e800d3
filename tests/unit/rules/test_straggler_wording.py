"""The time lost to a straggler and the time that ranks idle for it, which pages draw, are told apart in the message."""

import pytest

from tracekit.rules import stragglers

MS = 1_000_000


@pytest.mark.parametrize(
    ("idle_ms", "lost_ms", "said"),
    [
        (8, 8, ""),
        (6, 14, " They idle for 6 ms of it; compute hides the rest of their waiting, which makes them late in turn."),
        (12, 9, " They idle for 12 ms, of which 3 ms is a longer transfer, not lateness."),
    ],
)
def test_idle_time_is_stated_where_it_is_not_the_time_lost(idle_ms, lost_ms, said):
    assert stragglers._idle({"idle_ns": idle_ms * MS, "lost_ns": lost_ms * MS}) == said
