"""Pages of a run with more ranks than are drawn, without a browser: the limit is set below the ranks of a small run."""

import pytest

from tests.browser import recorded
from tests.support.cli_runner import tracekit
from tests.support.dashboard_pages import addressed_pages, page, runs  # noqa: F401  fixtures
from tracekit.report import rank_selection


@pytest.fixture(autouse=True)
def one_rank_is_drawn(monkeypatch):
    monkeypatch.setattr(rank_selection, "MAX_DRAWN", 1)


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


def test_of_many_slowdowns_those_that_lose_most_are_listed_and_all_downloaded(tmp_path, monkeypatch):
    from dashboard import downloads
    from dashboard.sections import contention

    monkeypatch.setattr(contention, "MAX_PAIRS", 1)
    layout = ("--gpus", "2", "--layers", "2", "--seq", "512", "--steps", "2", "--fault", "give-way")
    assert tracekit("simulate", *layout, "--out", tmp_path / "run").returncode == 0
    offered = []
    monkeypatch.setattr(downloads, "table", lambda rows, *, key: offered.append((key, rows)))
    shown = page("ranks", tmp_path / "run", tab="contention")
    assert not shown.exception
    (whole,) = [rows for key, rows in offered if key == "contention-pairs"]
    assert whole.height > 1
    (listed,) = [
        each.value for each in shown.dataframe if "slowdown" in each.value.columns and each.value.shape[0] == 1
    ]
    assert listed["rank"][0] in whole["rank"]
