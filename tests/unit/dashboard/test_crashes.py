"""What crashes on a page, or in a rule, is named with its reason and what to send to whom; the rest works."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dashboard import pages
from dashboard.pages import kernels, ranks
from tests.browser import recorded
from tests.support.dashboard_pages import TIMEOUT_S, html_of, page, testing
from tracekit.rules import engine, report_cache
from tracekit.rules.registry import all_rules

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    return tmp_path / "run"


def whole_app(monkeypatch, run, address):
    """Return the dashboard as a browser shows it at an address."""
    monkeypatch.setattr(sys, "argv", ["frame.py", str(run)])
    app = testing.AppTest.from_file(str(ROOT / "dashboard" / "server" / "frame.py"), default_timeout=TIMEOUT_S).run()
    links = {shown["url_pathname"]: key for key, shown in app._registered_pages.items()}
    app._page_hash = links[address]
    return app.run()


def said(app):
    return "".join(error.value for error in app.error).replace("\\", "")


def test_a_page_that_raises_is_named_with_its_reason_and_a_report(monkeypatch, run):
    def show(_):
        raise ZeroDivisionError("of *no* steps")

    monkeypatch.setattr(pages, "PAGES", tuple(
        replace(each, show=show) if each is kernels.PAGE else each for each in pages.PAGES
    ))  # fmt: skip
    app = whole_app(monkeypatch, run, "kernels")
    assert not app.exception  # Streamlit's own box
    assert said(app) == "The page Kernels failed: ZeroDivisionError: of *no* steps. The other pages work."
    (details,) = [code.value for code in app.code]
    assert "ZeroDivisionError: of *no* steps" in details
    assert Path(__file__).name in details  # the place
    assert not whole_app(monkeypatch, run, "ranks").error


def test_a_headline_that_raises_leaves_its_page(monkeypatch, run):
    def headline(*_):
        raise KeyError("late")

    tabs = tuple(replace(tab, headline=headline) for tab in ranks.PAGE.tabs)
    monkeypatch.setattr(pages, "PAGES", tuple(
        replace(each, tabs=tabs) if each is ranks.PAGE else each for each in pages.PAGES
    ))  # fmt: skip
    app = whole_app(monkeypatch, run, "ranks")
    assert f"The headline of the page {ranks.PAGE.title} failed: KeyError: 'late'. The rest" in said(app)
    assert "One step, rank by rank" in [each.value for each in app.subheader]


def test_a_rule_that_raises_is_named_and_the_findings_of_the_others_are_shown(monkeypatch, run):
    def check(*_):
        raise ValueError("no units")

    exposed = next(rule for rule in all_rules() if rule.code == "COMM001")
    broken = next(rule for rule in all_rules() if rule.code == "HOST001")
    monkeypatch.setattr(broken, "check", check)
    app = page("diagnosis", run)
    assert not app.exception
    assert said(app).startswith("Rule HOST001 failed: RuleError: HOST001 crashed on")
    assert "ValueError: no units" in said(app)
    assert exposed.code in html_of(app)
    assert report_cache.summary(str(run)) is None  # it is checked again once the rule is repaired
    with pytest.raises(Exception, match="no units"):
        report_cache.report(str(run))  # a build must fail


def test_a_report_names_the_rule_that_crashed_among_those_that_could_not_judge(monkeypatch, run):
    from tracekit.ingest import loader

    broken = next(rule for rule in all_rules() if rule.code == "HOST001")
    monkeypatch.setattr(broken, "check", lambda *_: 1 // 0)
    crashed = {}
    report = engine.check(loader.load(str(run), cache=False), on_crash=crashed.__setitem__)
    assert list(crashed) == ["HOST001"]
    assert "crashed" in report.blind_spots["HOST001"]
    assert any(finding.code == "COMM001" for finding in report.findings)


def test_a_page_of_a_plugin_that_cannot_be_imported_shows_why(monkeypatch, run, tmp_path):
    (tmp_path / "acme_broken_page.py").write_text("raise RuntimeError('no licence')")
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.pages]\nacme = acme_broken_page:PAGE\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = whole_app(monkeypatch, run, "acme")
    assert "The page acme failed: RuntimeError: no licence." in said(app)
    assert any("acme_broken_page" in each.label.replace("\\", "") for each in app.expander)


def test_a_command_at_the_end_of_an_error_is_code_to_copy(tmp_path):
    (tmp_path / "empty").mkdir()
    app = page("diagnosis", tmp_path / "empty")
    assert "no trace files" in said(app)
    assert "COMMAND" not in said(app)
    assert [code.value for code in app.code] == ["tracekit record -- COMMAND"]
