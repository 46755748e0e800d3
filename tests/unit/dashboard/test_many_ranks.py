"""Pages of a run with more ranks than are drawn, without a browser: the limit is set below the ranks of a small run."""

import pytest

from tests.browser import recorded
from tests.support.dashboard_pages import addressed_pages, keep_main, page, runs  # noqa: F401  fixtures
from tracekit.report import rank_rows


@pytest.fixture(autouse=True)
def one_rank_is_drawn(monkeypatch):
    monkeypatch.setattr(rank_rows, "MAX_DRAWN", 1)


@pytest.mark.parametrize("address", [each.address for each in addressed_pages()])
def test_each_page_opens(runs, address):  # noqa: F811
    shown = page(address, runs / recorded.GOOD)
    assert not shown.exception
    assert not shown.error


@pytest.mark.parametrize("address", ["ranks", "timeline"])
def test_the_representative_ranks_are_chosen_at_first(runs, address):  # noqa: F811
    shown = page(address, runs / recorded.GOOD)
    (choice,) = shown.multiselect
    assert choice.label == "Ranks drawn, of 2"
    assert set(choice.value) <= {0, 1}
    assert choice.value
    chosen = choice.set_value([1]).run()
    assert not chosen.exception
    assert chosen.multiselect[0].value == [1]
