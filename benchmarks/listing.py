"""How long the dashboard takes to list a folder of runs, in a real browser.

python benchmarks/listing.py [--runs 500] [--ranks 8] writes so many small run folders (made by hand, not recorded) with
manifests and traces, keeps a report of each, starts `tracekit dashboard` and measures, in headless Chromium, the time
from opening the address to the first paint of the table: by a server just started, in a new browser, in one that was
here before; and what the catalog takes without a browser.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
AGAIN = 5
STRATEGIES = ("ddp", "fsdp2", "yafsdp")
# The table is drawn on a canvas, so that it is painted shows where it is drawn: in the frame that writes a run's name.
# (Its copy for screen readers comes at least 200 ms later: the grid waits for so long a time without a change.)
WATCHES = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    if (String(text).startsWith("run-")) window.paintedRuns = true;
    return fillText.call(this, text, ...at);
};
"""
PAINTED = "() => window.paintedRuns === true"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tracekit-listing-") as place:
        os.environ["TRACEKIT_CACHE_DIR"] = str(Path(place) / "cache")
        runs = Path(place) / "runs"
        write_runs(runs, options.runs, options.ranks)
        checked = cache_reports(runs)
        print(f"{options.runs} runs of {options.ranks} ranks, {checked} of them checked")
        catalog_s = [timed_catalog(runs) for _ in range(AGAIN)]
        print(f"catalog without a browser: {statistics.median(catalog_s):.3f} s median of {AGAIN}")
        for visit, seconds in paint_times(runs).items():
            range_s = f"{min(seconds):.2f} to {max(seconds):.2f}"
            spread = f" (median of {len(seconds)}, {range_s})" if len(seconds) > 1 else ""
            print(f"{visit}: {statistics.median(seconds):.2f} s to the first paint of the table{spread}")


def write_runs(runs: Path, count: int, ranks: int) -> None:
    """Write one run, and copies of it whose manifests differ."""
    import json

    from tests.browser import recorded

    runs.mkdir()
    first = runs / "run-0000"
    recorded.write_run(first, kernel="gemm_kernel", ranks=tuple(range(ranks)))
    manifest = json.loads((first / "run.json").read_text())
    for number in range(1, count):
        folder = runs / f"run-{number:04d}"
        shutil.copytree(first, folder)
        created_ns = manifest["created_ns"] + number * 3_600 * 10**9
        manifest = manifest | {"strategy": STRATEGIES[number % len(STRATEGIES)], "created_ns": created_ns}
        (folder / "run.json").write_text(json.dumps(manifest))


def cache_reports(runs: Path) -> int:
    """Keep the first run's report as that of every run: what is listed is as large as if each had been checked."""
    from tracekit.analysis.time import breakdown
    from tracekit.regression import samples
    from tracekit.rules import report_cache

    folders = sorted(runs.iterdir())
    report = report_cache.report(str(folders[0]), facts=(breakdown.by_step, breakdown.by_rank, samples.samples))
    for folder in folders[1:]:
        report_cache.put(str(report_cache.run_key(str(folder))), report)
    return sum(report_cache.summary(str(folder)) is not None for folder in folders)


def timed_catalog(runs: Path) -> float:
    from dashboard import run_catalog

    start = time.perf_counter()
    listed = run_catalog.list_runs([str(runs)]).entries
    assert all(entry.summary for entry in listed)
    return time.perf_counter() - start


def paint_times(runs: Path) -> dict[str, list[float]]:
    """Time until the table was painted, in seconds by the kind of visit."""
    from playwright.sync_api import sync_playwright

    times_s = {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tracekit", "dashboard", str(runs), "--port", str(port), "--no-browser"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(f"http://127.0.0.1:{port}/_stcore/health")
        binary = shutil.which("chromium") or shutil.which("google-chrome")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=binary, chromium_sandbox=False, args=["--disable-gpu"])
            # The first visit waits for imports, too; who comes again has Streamlit's files in the browser.
            times_s["the server's first visit"] = [_visit(_page(browser), port)]
            times_s["a new browser"] = [_visit(_page(browser), port) for _ in range(AGAIN)]
            page = _page(browser)
            _visit(page, port)
            times_s["a browser that was here before"] = [_visit(page, port) for _ in range(AGAIN)]
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
    return times_s


def _page(browser: Any) -> Any:
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    page.add_init_script(WATCHES)
    return page


def _visit(page: Any, port: int) -> float:
    start = time.perf_counter()
    page.goto(f"http://127.0.0.1:{port}/runs")
    page.wait_for_function(PAINTED, polling="raf", timeout=120_000)
    seconds = time.perf_counter() - start
    page.goto("about:blank")
    time.sleep(6)  # until the server looks at the folder again
    return seconds


def _wait(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the dashboard did not start")


if __name__ == "__main__":
    main()
