"""What a page says first: the answer, in the words and numbers of its tables, and of the other pages."""

import pytest

pytest.importorskip("streamlit")

from pathlib import Path

from dashboard import run_catalog, run_store
from dashboard.pages import ranks
from dashboard.pages import runs as runs_page
from dashboard.run_store import tables
from tests.browser import recorded
from tests.support.dashboard_pages import html_of, page, runs

_runs = runs
SAMPLES = Path(__file__).parents[3] / "sample_traces"
WHITE_CONTRAST = 4.5


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [*runs_page._COLOURS.values(), runs_page._OTHER_COLOUR])
def test_the_white_text_of_a_verdict_can_be_read(colour):
    assert 1.05 / (_luminance(colour) + 0.05) >= WHITE_CONTRAST


def test_who_waits_for_whom_comes_before_the_causes_of_gaps():
    shown = page("ranks", SAMPLES / "gpu" / "slow-rank")
    assert [each.value for each in shown.subheader][:2] == ["Which ranks wait for which", "Ranks and steps"]
    exposed = page("ranks", SAMPLES / "gpu" / "slow-rank", tab="exposed communication")
    assert [each.value for each in exposed.subheader][:2] == ["Exposed communication", "Why nothing computes"]


def test_groups_have_the_same_axis_on_both_pages_that_name_it():
    (entry,) = run_catalog.Catalog((str(SAMPLES / "demo-fsdp2"),)).listing().entries
    run = run_store.open_run(entry)
    collectives = ranks._with_axes(run, run.table(tables.COLLECTIVES))
    by_axis = run.table(tables.COMMUNICATION_BY_AXIS)
    assert set(collectives["axis"].drop_nulls()) == set(by_axis["axis"].drop_nulls()) == {"dp"}


def test_the_table_of_axes_is_per_step_as_the_bars_are():
    shown = page("ranks", SAMPLES / "parallelism" / "pipeline-interleaved", tab="mesh")
    headings = [each.value for each in shown.subheader]
    assert "Communication by axis, per step" in headings
    assert "tk-headline" in html_of(shown)


def test_a_cpu_run_opens_its_call_stacks_with_the_time_of_the_host():
    shown = page("kernels", SAMPLES / "demo-fsdp2", what="call stacks")
    assert not shown.info
    assert len(shown.get("plotly_chart")) == 1


def test_a_run_without_memory_events_offers_no_rank_to_choose(runs):
    shown = page("memory", runs / recorded.GOOD)
    assert not shown.selectbox
    assert "record with profile_memory=True" in shown.info[0].value
