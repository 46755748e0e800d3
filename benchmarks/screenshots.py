"""Screenshots of the dashboard's pages and the report: python -m benchmarks.screenshots [NAME…] [--out DIR] [--dark].

The runs are those in sample_traces by default, a simulated one for pages that need GPUs, and a simulated history.
Pictures for docs/images use the light theme and a palette that is small enough for 150 kB per file.
"""

import argparse
import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from dashboard.pages import all_pages
from dashboard.pages.page import Needs

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 1400, 900
MAX_BYTES = 150_000
WAIT_MS = 120_000

REPORT, REPORT_RUN, REPORT_SIZE = "report", "demo-fsdp2", {"width": 1200, "height": 1400}
SIMULATED = "simulated"
_GIVE_WAY = ("--gpus", "16", "--layers", "6", "--ranks-written", "4", "--fault", "give-way")


@dataclass(frozen=True)
class Shot:
    """One picture: the address of its page, run and choices, its height, a heading to show, a button to press."""

    name: str
    run: str = "demo-yafsdp"
    height: int = 1000
    scroll_to: str = ""
    press: str = ""
    search: str = ""
    """What to search on the timeline: the first match is selected."""
    view: str = ""
    """What the picture shows of the page, where it is not what the page opens with; its name ends with it."""

    @property
    def picture(self) -> str:
        """Return the name of the picture."""
        return f"{self.name}_{self.view}" if self.view else self.name


SETTINGS = {
    shot.name: shot
    for shot in (
        Shot("diagnosis", height=1150),
        Shot("timeline", "demo-yafsdp&from=1130000000&to=1400000000", 960, search="gloo:all_gather"),
        Shot("memory", scroll_to="Allocated over time"),
        Shot("sql", height=HEIGHT, press="Run"),
        Shot("compare", "demo-yafsdp&compare=demo-fsdp2"),
        Shot("plan", height=HEIGHT),
        Shot("runs", height=HEIGHT),
    )
}
"""Settings of pages whose top would not show enough."""
VIEWS = (
    Shot("diagnosis", "demo-yafsdp&savings=True&without=checkpoint", 1250, "Without one cause", view="savings"),
    Shot("diagnosis", "demo-yafsdp&trust=True", 1150, view="trust"),
    Shot("timeline", f"{SIMULATED}&path=True", 1250, "Path, first", view="path"),
    Shot("ranks", "demo-yafsdp&tab=exposed communication", 1250, view="communication"),
    Shot("ranks", f"{SIMULATED}&tab=contention", 1150, view="contention"),
    Shot("ranks", "parallelism/pipeline-1f1b&tab=pipeline", 1150, view="pipeline"),
    Shot("memory", "demo-yafsdp&tab=checkpoints", view="checkpoints"),
    Shot("runs", "demo-yafsdp&view=charts", 1250, view="charts"),
    Shot("runs", "demo-yafsdp&view=trends", 960, view="trends"),
)
"""Pictures of views in addition to those that pages open with."""


def shots() -> list[Shot]:
    """Return one picture per page and those of VIEWS.

    That of all runs comes last, so that the runs shown before have a verdict.
    """
    pages = sorted(all_pages(), key=lambda page: page.needs is Needs.CATALOG)
    return [*(SETTINGS.get(page.address, Shot(page.address)) for page in pages), *VIEWS]


def main(words: Sequence[str] | None = None) -> None:
    """Take all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = shots()
    names = [REPORT, *(shot.picture for shot in listed)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"pictures to take, all if none: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, default=ROOT / "sample_traces")
    parser.add_argument("--run", help="show this run on all pages")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="pages from top to bottom, in full colour")
    options = parser.parse_args(words)
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no picture called {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.names or REPORT in options.names:
        with tempfile.TemporaryDirectory() as folder:
            _write(
                options.out / f"{REPORT}.png",
                small(report_picture(options.runs / (options.run or REPORT_RUN), Path(folder))),
            )
    selected = [shot for shot in listed if not options.names or shot.picture in options.names]
    if not selected:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(options.runs, extra_inputs(Path(folder))) as (url, _),
    ):
        for shot, picture in shoot(url, selected, run=options.run, dark=options.dark, full=options.whole):
            _write(options.out / f"dashboard_{shot.picture}.png", picture if options.whole else small(picture))


def _write(path: Path, picture: bytes) -> None:
    path.write_bytes(picture)
    print(f"{path}: {len(picture) / 1000:.0f} kB")


def report_picture(run: Path, folder: Path) -> bytes:
    """Return a picture of the top of a run's HTML report."""
    from playwright.sync_api import sync_playwright

    file = folder / "report.html"
    command = [sys.executable, "-m", "tracekit", "check", str(run), "--fail-on", "never", "--format", "html"]
    subprocess.run([*command, "--out", str(file)], check=True, env=_environment())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        page = browser.new_page(viewport=REPORT_SIZE)
        page.set_default_timeout(WAIT_MS)
        page.goto(file.as_uri())
        page.locator("#figure-breakdown svg.main-svg").first.wait_for()
        page.wait_for_timeout(1000)
        picture = page.screenshot()
        browser.close()
    return picture


def extra_inputs(folder: Path) -> Path:
    """Write what the pages need in addition to recorded runs: a run on GPUs and a history, both simulated."""
    simulate(folder / SIMULATED)
    write_history(folder)
    return folder


def simulate(run: Path) -> None:
    """Simulate a run on GPUs."""
    command = [sys.executable, "-m", "tracekit", "simulate", *_GIVE_WAY, "--out", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())
    for file in run.iterdir():
        os.utime(file, (0, 0))  # it is not being recorded


def write_history(folder: Path) -> None:
    """Write a history of 20 simulated runs, slower by a fifth from the 13th on: that of docs/history.md."""
    from tests.support import simulated_history
    from tracekit.regression.history import store
    from tracekit.regression.history.entry import Commit, history_entry
    from tracekit.report import json as reports

    entries = [
        history_entry(
            report,
            reports.comparison_side(report),
            commit=Commit(f"{number:02d}{'abcdef' * 6}ab", f"Tune the loader, part {number}", "main"),
            failures=(),
        )
        for number, report in enumerate(simulated_history.slower_from(12, 20))
    ]
    store.add(folder / store.FILE, entries)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def serve(*runs: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a dashboard opened on runs, or folders of them, and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "dashboard" / "server" / "app.py")]
    command += ["--server.port", str(port), "--", *map(str, runs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    try:
        wait_until_healthy(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(20)


def wait_until_healthy(port: int) -> None:
    """Return when a dashboard of this machine answers at a port. Raises SystemExit after a minute."""
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2):
            return
        time.sleep(0.2)
    raise SystemExit("the dashboard did not start")


def shoot(url: str, shots: Sequence[Shot], *, run: str | None, dark: bool, full: bool) -> Iterator[tuple[Shot, bytes]]:
    """Yield each shot with its PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        page = browser.new_page(color_scheme="dark" if dark else "light")
        page.set_default_timeout(WAIT_MS)
        for shot in shots:
            page.set_viewport_size({"width": WIDTH, "height": shot.height})
            page.goto(f"{url}/{shot.name}?run={quote(run or shot.run, safe='&=')}")
            page.locator(".tk-title").wait_for()
            settle(page)
            if shot.press:
                page.get_by_role("button", name=shot.press, exact=True).click()
                page.mouse.move(0, 0)
                settle(page)
            if full:
                height = page.locator("[data-testid=stMainBlockContainer]").evaluate("e => e.scrollHeight")
                page.set_viewport_size({"width": WIDTH, "height": int(height) + 80})
                settle(page)
            elif shot.search:
                page.locator(".timeline input").fill(shot.search)
                page.locator(".timeline .count", has_text="·").wait_for()
                page.keyboard.press("Enter")
                page.locator(".timeline .details table").wait_for()
                settle(page)
            elif shot.scroll_to:
                page.get_by_role("heading", name=shot.scroll_to).first.scroll_into_view_if_needed()
            yield shot, page.screenshot()
        browser.close()


def chromium() -> str:
    """Return the path of an installed Chromium. Raises SystemExit where there is none."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        raise SystemExit("no Chromium on this machine (Debian: apt install chromium)")
    return binary


_SETTLED = """() => document.querySelector("[data-testid=stApp]")?.dataset.testScriptState === "notRunning"
    && !document.querySelector("[data-testid=stSkeleton]")
    && [...document.querySelectorAll("[data-testid=stPlotlyChart]")].every((each) => each.querySelector(".main-svg"))"""


def settle(page: "Page") -> None:
    """Wait until the page runs no script and its figures are drawn."""
    page.locator("[data-testid=stMain]").wait_for()
    page.wait_for_timeout(500)
    page.wait_for_function(_SETTLED)
    page.wait_for_timeout(1000)


def small(picture: bytes) -> bytes:
    """Return a PNG with the largest palette that fits into 150 kB."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        out = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= MAX_BYTES:
            break
    return out.getvalue()


if __name__ == "__main__":
    main()
