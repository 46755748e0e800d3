"""Screenshots of the dashboard's pages and the report: python -m benchmarks.screenshots [NAME…] [--out DIR] [--dark].

The runs are those in sample_traces unless others are named, a simulated one for what needs devices, and a simulated
history. Pictures for docs/images are made in the light theme, in as few colours as keep them under 150 kB.
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

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 1400, 900
MOST_BYTES = 150_000
WAIT_MS = 120_000

REPORT, REPORTED, REPORT_SIZE = "report", "demo-fsdp2", {"width": 1200, "height": 1400}
SIMULATED = "simulated"
_GIVE_WAY = ("--gpus", "16", "--layers", "6", "--ranks-written", "4", "--fault", "give-way")


@dataclass(frozen=True)
class Shot:
    """One picture: its name, page and run (and choices on it), its height, a heading to show, a button to press."""

    name: str
    page: str
    run: str
    height: int = HEIGHT
    scroll_to: str = ""
    press: str = ""
    search: str = ""
    """What to look for on the timeline: the first match is picked."""


SHOTS = (
    Shot("overview", "", "demo-yafsdp"),
    Shot("timeline", "timeline", "demo-yafsdp&from=1130000000&to=1400000000", 960, search="gloo:all_gather"),
    Shot("communication", "communication", "demo-yafsdp", 1250),
    Shot("contention", "contention", SIMULATED, 1150),
    Shot("kernels", "kernels", "demo-yafsdp", 1000),
    Shot("ranks", "ranks", "demo-yafsdp&colour=waited_ratio", 1000),
    Shot("memory", "memory", "demo-yafsdp", 1000, "Held over time"),
    Shot("checkpoints", "checkpoints", "demo-yafsdp", 1000, "Training blocked"),
    Shot("whatif", "whatif", "demo-yafsdp&without=checkpoint&without=straggler", 1250),
    Shot("sql", "sql", "demo-yafsdp", press="Run"),
    Shot("quality", "quality", "demo-yafsdp", 1000),
    Shot("compare", "compare", "demo-yafsdp&compare=demo-fsdp2", 1000),
    Shot("plan", "plan", "demo-yafsdp"),
    Shot("history", "history", "demo-yafsdp", 960),
    Shot("runs", "runs", "demo-yafsdp"),  # the last, so that runs looked at before have their verdict
)


def main(words: Sequence[str] | None = None) -> None:
    """Take all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [REPORT, *(shot.name for shot in SHOTS)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"pictures to take, all if none: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, default=ROOT / "sample_traces")
    parser.add_argument("--run", help="show this run on all pages")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="pages from top to bottom, in full colour")
    asked = parser.parse_args(words)
    if unknown := set(asked.names) - set(names):
        parser.error(f"there is no picture called {', '.join(sorted(unknown))}")
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.names or REPORT in asked.names:
        with tempfile.TemporaryDirectory() as folder:
            _keep(asked.out / f"{REPORT}.png", small(reported(asked.runs / (asked.run or REPORTED), Path(folder))))
    shots = [shot for shot in SHOTS if not asked.names or shot.name in asked.names]
    if not shots:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        served(asked.runs, made(Path(folder))) as (url, _),
    ):
        for shot, picture in taken(url, shots, run=asked.run, dark=asked.dark, whole=asked.whole):
            _keep(asked.out / f"dashboard_{shot.name}.png", picture if asked.whole else small(picture))


def _keep(path: Path, picture: bytes) -> None:
    path.write_bytes(picture)
    print(f"{path}: {len(picture) / 1000:.0f} kB")


def reported(run: Path, folder: Path) -> bytes:
    """Return a picture of the top of a run's HTML report."""
    from playwright.sync_api import sync_playwright

    file = folder / "report.html"
    command = [sys.executable, "-m", "tracekit", "check", str(run), "--fail-on", "never", "--format", "html"]
    subprocess.run([*command, "--output", str(file)], check=True, env=_environment())
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


def made(folder: Path) -> Path:
    """Make what the pages need beside recorded runs: a run on devices and a history, both simulated."""
    simulate(folder / SIMULATED)
    remember(folder)
    return folder


def simulate(run: Path) -> None:
    """Simulate a run on devices."""
    command = [sys.executable, "-m", "tracekit", "simulate", *_GIVE_WAY, "--out", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())
    for file in run.iterdir():
        os.utime(file, (0, 0))  # it is not being recorded


def remember(folder: Path) -> None:
    """Write a history of 20 simulated runs, slower by a fifth from the 13th on: that of docs/history.md."""
    from tests.support import simulated_history
    from tracekit.regression.history import store
    from tracekit.regression.history.commits import Commit
    from tracekit.regression.history.entry import history_entry
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
def served(*runs: Path) -> Iterator[tuple[str, int]]:
    """Give the address of the dashboard opened on runs, or folders of them, and the number of its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "dashboard" / "server" / "app.py")]
    command += ["--server.port", str(port), "--", *map(str, runs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    try:
        _wait_until_healthy(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_healthy(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2):
            return
        time.sleep(0.2)
    raise SystemExit("the dashboard did not start")


def taken(url: str, shots: Sequence[Shot], *, run: str | None, dark: bool, whole: bool) -> Iterator[tuple[Shot, bytes]]:
    """Yield each shot with its PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        page = browser.new_page(color_scheme="dark" if dark else "light")
        page.set_default_timeout(WAIT_MS)
        for shot in shots:
            page.set_viewport_size({"width": WIDTH, "height": shot.height})
            page.goto(f"{url}/{shot.page}?run={quote(run or shot.run, safe='&=')}")
            _settle(page)
            if shot.press:
                page.get_by_role("button", name=shot.press, exact=True).click()
                page.mouse.move(0, 0)
                _settle(page)
            if whole:
                height = page.locator("[data-testid=stMainBlockContainer]").evaluate("e => e.scrollHeight")
                page.set_viewport_size({"width": WIDTH, "height": int(height) + 80})
                _settle(page)
            elif shot.search:
                page.locator(".timeline input").fill(shot.search)
                page.locator(".timeline .count", has_text="·").wait_for()
                page.keyboard.press("Enter")
                page.locator(".timeline .details table").wait_for()
                _settle(page)
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


def _settle(page: "Page") -> None:
    """Wait until the page runs no script any more and its figures are drawn."""
    page.locator("[data-testid=stMain]").wait_for()
    page.wait_for_timeout(500)
    page.wait_for_function(_SETTLED)
    page.wait_for_timeout(1000)


def small(picture: bytes) -> bytes:
    """Return a PNG in as many colours as keep it under 150 kB."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        out = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= MOST_BYTES:
            break
    return out.getvalue()


if __name__ == "__main__":
    main()
