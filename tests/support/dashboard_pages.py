"""The dashboard's pages as Streamlit runs them, without a browser. Needs the extra [dashboard]."""

import sys

import pytest

from tests.browser import recorded

testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra [dashboard]")
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder of recorded.write_runs."""
    folder = tmp_path_factory.mktemp("runs")
    recorded.write_runs(folder)
    return folder


@pytest.fixture(autouse=True)
def keep_main(monkeypatch):
    """Streamlit puts the page it runs in the place of __main__, which spawned processes of later tests would import."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def page(view, *paths, state=(), **address):
    """Return the page `view` as it is first shown of the run at a path, or of those at several."""

    def script(view, paths):
        from importlib import import_module

        from dashboard import run_catalog

        entries = run_catalog.entries(paths)
        import_module(f"dashboard.pages.{view}").page(entries if view == "compare" else entries[0])

    app = testing.AppTest.from_function(script, args=(view, [str(path) for path in paths]), default_timeout=TIMEOUT_S)
    app.query_params.update(address)
    for name, value in dict(state).items():
        app.session_state[name] = value
    return app.run()


def html_of(app):
    """Return the HTML that a page shows."""
    return "".join(element.proto.body for element in app.get("html"))
