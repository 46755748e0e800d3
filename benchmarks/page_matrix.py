"""Screenshots of every page in both themes, wide and narrow: python -m benchmarks.page_matrix RUN… --out DIR.

Each page is shown from top to bottom, in full colour, with its views (charts, ranges, flame graphs, …). The warnings
and errors that the browser reports are printed with the page that caused them, and make the command exit with 1.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from benchmarks.screenshots import WAIT_MS, chromium, serve, settle, write_history
from dashboard.pages import all_pages
from tracekit.report.charts import ranks

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
WIDTHS = (1440, 800)
LEAST_HEIGHT, MARGIN_PX, MAX_HEIGHT = 900, 80, 12_000
VIEWS: Mapping[str, Mapping[str, str]] = {
    "runs": {"charts": "view=charts", "trends": "view=trends"},
    "diagnosis": {"trust": "trust=True", "savings": "savings=True", "without": "without=straggler"},
    "timeline": {
        "range": "range=10000000-50000000",
        "flame": "flame=10000000-50000000",
        "pair": "with={other}",
        "path": "path=True",
    },
    "ranks": {
        "step_time": f"colour={ranks.SLOWER}",
        **{
            tab.replace(" ", "_"): f"tab={quote(tab)}"
            for tab in ("exposed communication", "bandwidth", "contention", "pipeline", "mesh", "experts")
        },
    },
    "memory": {"checkpoints": "tab=checkpoints"},
    "kernels": {
        view.replace(" ", "_"): f"what={quote(view)}" for view in ("operators", "modules", "call stacks", "roofline")
    },
    "compare": {"two": "compare={other}"},
}
"""Views of a page in addition to the one that it opens with: name and query."""
# Streamlit looks for its server below the address of a page first; the server answers 404.
_PROBED = re.compile(r"/\w+/_stcore/(health|host-config)")


@dataclass(frozen=True)
class View:
    """One picture of a run: its name and its address."""

    name: str
    address: str


def main(words: Sequence[str] | None = None) -> None:
    """Take the pictures and print what the browser reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", nargs="+", metavar="PAGE", help="addresses of pages, all if none")
    parser.add_argument("--themes", nargs="+", choices=THEMES, default=THEMES)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--only", nargs="+", metavar="RUN", help="names of the runs to show, all if none")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    names = [run.name for run in options.runs]
    reported = 0
    with tempfile.TemporaryDirectory() as folder:
        for run in options.runs:
            shutil.copytree(run, Path(folder) / run.name)
        write_history(Path(folder))
        with serve(Path(folder)) as (url, _):
            for path, messages in _take_all(url, names, options):
                print(path, *messages, sep="\n    ", flush=True)
                reported += len(messages)
    sys.exit(1 if reported else 0)


def views(run: str, other: str, pages: Sequence[str] | None = None) -> list[View]:
    """Return the pictures of a run: of all pages, or of those with the given addresses."""
    pictures = []
    for page in all_pages():
        if pages is None or page.address in pages:
            queries = {"": "", **VIEWS.get(page.address, {})}
            for name, query in queries.items():
                query = query.format(other=quote(other))
                parameters = "&".join(filter(None, (f"run={quote(run)}", query)))
                pictures.append(View("_".join(filter(None, (page.address, name))), f"{page.address}?{parameters}"))
    return pictures


def _take_all(url: str, runs: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """Yield the path of each picture with the messages of the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        for theme in options.themes:
            for width in options.widths:
                for run in options.only or runs:
                    other = next((name for name in runs if name != run), run)
                    for view in views(run, other, options.pages):
                        path = options.out / f"{run}_{view.name}_{width}_{theme}.png"
                        yield path, _take(browser, f"{url}/{view.address}", path, width=width, theme=theme)
        browser.close()


def _take(browser: "Browser", url: str, path: Path, *, width: int, theme: Theme) -> list[str]:
    """Write a picture of a page from top to bottom; return the warnings and errors of the browser."""
    page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": LEAST_HEIGHT})
    page.set_default_timeout(WAIT_MS)
    messages: list[str] = []
    page.on("console", lambda message: messages.extend(_report(message)))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    page.goto(url)
    page.locator("[data-testid=stSidebarNavLink], .tk-title, [data-testid=stAlert]").first.wait_for(state="attached")
    settle(page)
    page.set_viewport_size({"width": width, "height": _height(page)})
    settle(page)
    page.screenshot(path=path)
    page.close()
    return list(dict.fromkeys(messages))


def _height(page: "Page") -> int:
    """Return the height of a window that shows the whole page."""
    height = page.locator("[data-testid=stMainBlockContainer]").evaluate("e => e.scrollHeight")
    return min(max(int(height) + MARGIN_PX, LEAST_HEIGHT), MAX_HEIGHT)


def _report(message: "ConsoleMessage") -> list[str]:
    path = re.sub(r"^\w+://[^/]+", "", message.location["url"])
    if message.type not in ("warning", "error") or (_PROBED.fullmatch(path) and "404" in message.text):
        return []
    return [f"{message.type}: {message.text[:300]}"]


if __name__ == "__main__":
    main()
