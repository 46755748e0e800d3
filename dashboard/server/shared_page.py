"""Write a page of a run as `tracekit export --format html` shares it: the page is drawn without a server or browser.

Arguments: the run, the page's address, the query of the link, the file to write.
"""

import sys
from pathlib import Path
from urllib.parse import parse_qs

TIMEOUT_S = 3600


def main(run: str, address: str, query: str, out: str) -> str | None:
    """Write the file; return why that is impossible, or None."""
    from streamlit.testing.v1 import AppTest

    from dashboard import pages
    from dashboard.pages.page import Needs
    from tracekit.report import shared_view

    by_address = {page.address: page for page in pages.all_pages() if page.needs not in (Needs.CATALOG, Needs.SEVERAL)}
    address, moved = pages.MOVED.get(address, (address, {}))
    if address not in by_address:
        return f"there is no page {address} of a run; there are {', '.join(by_address)}"
    app = AppTest.from_function(_draw, args=(address, run), default_timeout=TIMEOUT_S)
    parameters = {**moved, **parse_qs(query)}
    app.query_params.update({name: texts for name, texts in parameters.items() if name not in ("run", "compare")})
    app.run()
    problems = [element.value for element in (*app.error, *app.exception)]
    recording = app.session_state["shared_view"] if "shared_view" in app.session_state else None  # noqa: SIM401
    if recording is None or not recording.is_complete:
        return "; ".join(problems) or "the page cannot be shared"
    view = recording.view({name: texts[-1] for name, texts in parameters.items()})
    Path(out).write_text(shared_view.render(view), encoding="utf-8")
    return None


def _draw(address, run):  # type: ignore[no-untyped-def]  # Streamlit runs its text as a script
    from dashboard import pages, run_catalog
    from dashboard.pages.page import Selection

    catalog = run_catalog.Catalog((run,))
    selection = Selection(catalog, catalog.listing().entries[:1])
    next(page for page in pages.all_pages() if page.address == address).open(selection)


if __name__ == "__main__":
    # Run by its path: -m would run a package named dashboard of the current folder instead.
    sys.path.append(str(Path(__file__).parents[2]))
    sys.exit(main(*sys.argv[1:5]))
