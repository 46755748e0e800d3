"""The registry of pages: what derives from it follows a page that a plug-in adds."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import screenshots
from dashboard import pages
from tests.browser import recorded
from tests.support import dashboard_pages
from tests.support.dashboard_pages import TIMEOUT_S, testing
from tracekit.model import kernel_names

ROOT = Path(__file__).parents[3]
PLUGIN = """
import streamlit as st
from dashboard.pages.page import TOOLS, Needs, Page

PAGE = Page("Acme", "acme", "the ranks of Acme", lambda run: st.text(f"Acme: {len(run.run.ranks)} ranks"), Needs.WORK,
            TOOLS)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a page as another distribution would."""
    (tmp_path / "acme_page.py").write_text(PLUGIN)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.pages]\nacme = acme_page:PAGE\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_page_of_a_plugin_has_a_link_an_address_a_screenshot_and_browser_tests(plugin, tmp_path, monkeypatch):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    monkeypatch.setattr(sys, "argv", ["frame.py", str(tmp_path / "run")])
    app = testing.AppTest.from_file(str(ROOT / "dashboard" / "server" / "frame.py"), default_timeout=TIMEOUT_S).run()
    links = {page["url_pathname"]: key for key, page in app._registered_pages.items()}
    assert "acme" in links
    app._page_hash = links["acme"]  # as a browser reports it that opens the address
    app.run()
    assert [text.value for text in app.text] == ["Acme: 2 ranks"]
    assert "acme" in [shot.name for shot in screenshots.shots()]
    assert "acme" in [page.address for page in dashboard_pages.addressed_pages()]


def test_the_address_of_a_page_that_is_part_of_another_leads_to_that_part(tmp_path, monkeypatch):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    monkeypatch.setattr(sys, "argv", ["frame.py", str(tmp_path / "run")])
    app = testing.AppTest.from_file(str(ROOT / "dashboard" / "server" / "frame.py"), default_timeout=TIMEOUT_S).run()
    links = {page["url_pathname"]: key for key, page in app._registered_pages.items()}
    assert pages.MOVED.keys() < links.keys()
    app._page_hash = links["quality"]
    app.query_params["bars"] = pages.diagnosis.BY_STEP
    app.run()
    assert not app.exception
    assert "True" in app.query_params["trust"]
    assert app.session_state["bars"] == pages.diagnosis.BY_STEP
    assert app.toggle(key="trust").value


def test_every_part_that_an_old_address_names_exists():
    by_address = {page.address: page for page in pages.PAGES}
    for target, parameters in pages.MOVED.values():
        tabs = {tab.name for tab in by_address[target].tabs}
        assert set(parameters.get("tab", ())) <= tabs


def test_titles_and_addresses_are_unique_and_fit_a_url():
    for names in ([page.title for page in pages.PAGES], [page.address for page in pages.PAGES]):
        assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+", page.address) for page in pages.PAGES)


def test_the_guide_lists_every_page_of_the_registry():
    guide = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    rows = [f"| {page.title} | `/{page.address}` | {page.summary} | {page.needs.value} |" for page in pages.PAGES]
    table = "\n".join(["| page | address | shows | needs |", "|---|---|---|---|", *rows])
    assert table in guide, f"docs/dashboard.md lacks this table:\n{table}"


def test_kernels_have_short_names_in_tables_and_their_full_names_in_the_last_column():
    app = dashboard_pages.page("kernels", ROOT / "sample_traces" / "gpu" / "slow-rank")
    (table,) = [each.value for each in app.dataframe if "full name" in each.value.columns]
    assert table.columns[-1] == "full name"
    short = table["name"].to_list()
    full = table["full name"].fillna(table["name"]).to_list()
    assert len(set(short)) == len(short) == len(set(full))
    assert max(map(len, short)) < 110 < max(map(len, full))
    assert short == [kernel_names.short_names(full)[name] for name in full]
    assert table["full name"].isna().any()  # where it is the name itself
    whole = dashboard_pages.page("kernels", ROOT / "sample_traces" / "demo-fsdp2")
    assert not [each for each in whole.dataframe if "full name" in each.value.columns]
