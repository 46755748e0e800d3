"""The dashboard's pages as Streamlit runs them, without a browser. Needs the extra [dashboard]."""

import functools
import sys

import pytest

from tests.browser import recorded

testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra [dashboard]")
scanner = pytest.importorskip("streamlit.components.v2.manifest_scanner")
# Each run of a page reads the metadata of all installed packages, half of its time; the packages stay the same.
scanner.scan_component_manifests = functools.cache(scanner.scan_component_manifests)
TIMEOUT_S = 240


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return a folder of recorded.write_runs."""
    folder = tmp_path_factory.mktemp("runs")
    recorded.write_runs(folder)
    return folder


def page(address, *paths, state=(), **parameters):
    """Return the page at `address` as it is first shown of the runs at `paths`."""

    def script(address, paths):
        from dashboard import pages, run_catalog
        from dashboard.pages.page import Selection

        catalog = run_catalog.Catalog(paths)
        selection = Selection(catalog, catalog.listing().entries)
        next(page for page in pages.all_pages() if page.address == address).open(selection)

    texts = [str(path) for path in paths]
    app = testing.AppTest.from_function(script, args=(address, texts), default_timeout=TIMEOUT_S)
    app.query_params.update(parameters)
    for name, value in dict(state).items():
        app.session_state[name] = value
    # Streamlit replaces __main__ by the page it runs, which processes that later tests start would import in vain.
    main = sys.modules["__main__"]
    try:
        return app.run()
    finally:
        sys.modules["__main__"] = main


def html_of(app):
    """Return the HTML that a page shows."""
    return "".join(element.proto.body for element in app.get("html"))


def component(app, name):
    """Return what the component of this name got."""
    return next(
        each.proto for each in app.get("bidi_component") if each.proto.component_name.endswith(f"tracekit_{name}")
    )


def addressed_pages():
    """Return the pages that a browser can open on a folder of runs, those of plug-ins included."""
    from dashboard import pages

    return list(pages.all_pages())
