"""``python -m benchmarks.dashboard RUN``: how fast the timeline answers in a browser, and what the server takes.

The run is laid out first, so that what is measured is a cached one. Times are the browser's own: of a redraw from the
key to the sharper picture on the canvas, of the first paint from the start of the navigation.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import screenshots
from tracekit.ingest import loader
from tracekit.report import timeline

ZOOM_IN, ZOOM_OUT, LATER, EARLIER = "w", "s", "d", "a"
ROUND = (ZOOM_IN, ZOOM_IN, ZOOM_IN, ZOOM_IN, ZOOM_IN, LATER, LATER, LATER, LATER, LATER, EARLIER) + (ZOOM_OUT,) * 5
LIMITS_MS = {
    "first paint": 2000,
    "first paint, empty browser": 2000,
    "redraw, median": 300,
    "redraw, p95": 800,
    "four users, p95": 2000,
}
LIMIT_BYTES = 2 << 30
WAIT_MS = 60_000
_STATE = (
    "() => [...document.querySelectorAll('[data-testid=stBidiComponentIsolated]')]"
    ".map((part) => part.shadowRoot?.querySelector('.timeline')).find(Boolean)?.dataset"
)
_SHARP = f"() => {{ const e = ({_STATE})(); return e && e.sharp === 'true' && e.seq === e.requested; }}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; return 0 where every bar is met."""
    options = _parser().parse_args(arguments)
    run = loader.load(str(options.run))
    began_s = time.monotonic()
    scene = timeline.open_scene(run)
    print(f"{options.run}: {scene.tracks.height} tracks, opened in {time.monotonic() - began_s:.1f} s", flush=True)
    with screenshots.serve(options.run.resolve()) as (url, pid), _browser() as browser:
        _first(browser, url)  # the first person of all also waits for the server's imports
        paints = {
            "first paint": _paints(browser, url, options.rounds),
            "first paint, empty browser": [_first(browser, url) for _ in range(options.rounds)],
        }
        began_cpu_ms = _cpu_ms(pid)
        alone_ms = _redraws(browser, url, users=1, rounds=options.rounds)
        cpu_ms = (_cpu_ms(pid) - began_cpu_ms) / len(alone_ms)
        together = _redraws(browser, url, users=options.users, rounds=options.rounds)
        memory = _memory_bytes(pid)
    print(f"the server takes {cpu_ms:.0f} ms of CPU for a redraw; load of the machine {os.getloadavg()[0]:.1f}")
    return _report(paints, alone_ms, together, memory, users=options.users)


def _report(
    paints: dict[str, list[float]], alone_ms: list[float], together: list[float], memory: dict[str, int], *, users: int
) -> int:
    measured_ms = {name: statistics.median(times_ms) for name, times_ms in paints.items()} | {
        "redraw, median": statistics.median(alone_ms),
        "redraw, p95": _p95(alone_ms),
        "four users, p95": _p95(together),
    }
    print("| metric | measured | limit |\n|---|--:|--:|")
    for name, ms in measured_ms.items():
        print(f"| {name.replace('four', str(users))} | {ms:.0f} ms | {LIMITS_MS[name]} ms |")
    for name, used_bytes in memory.items():
        print(f"| server memory, {name} | {used_bytes / 2**20:.0f} MiB | {LIMIT_BYTES >> 20} MiB |")
    paint_count, redraws = len(paints["first paint"]), len(alone_ms)
    print(f"\n{paint_count} first paints of a kind, {redraws} redraws alone, {len(together)} together")
    return int(any(ms > LIMITS_MS[name] for name, ms in measured_ms.items()) or max(memory.values()) > LIMIT_BYTES)


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _first(browser: Any, url: str) -> float:
    """Return the time in ms from the start of a navigation to the first picture, in a browser that keeps nothing."""
    page = _open_page(browser, url)
    painted_ms = float(page.evaluate(_STATE)["paintedMs"])
    page.context.close()
    return painted_ms


def _paints(browser: Any, url: str, rounds: int) -> list[float]:
    """Return the same of one browser that was here before: Streamlit's files lie in its cache."""
    page = _open_page(browser, url)
    times_ms = []
    for _ in range(rounds):
        page.goto("about:blank")
        _go(page, url)
        times_ms.append(float(page.evaluate(_STATE)["paintedMs"]))
    page.context.close()
    return times_ms


def _open_page(browser: Any, url: str) -> Any:
    page = browser.new_context(viewport={"width": 1600, "height": 1000}).new_page()
    page.set_default_timeout(WAIT_MS)
    _go(page, url)
    return page


def _go(page: Any, url: str) -> None:
    page.goto(f"{url}/timeline")
    page.wait_for_function(_SHARP)


def _redraws(browser: Any, url: str, *, users: int, rounds: int) -> list[float]:
    """Return the times in ms from a key to the sharper picture, of all users, who press their keys together."""
    pages = [_open_page(browser, url) for _ in range(users)]
    times_ms: list[float] = []
    for page in pages:
        page.locator(".timeline").focus()
    for key in ROUND * rounds:
        for page in pages:
            page.keyboard.press(key)
        for page in pages:
            page.wait_for_function(_SHARP)
            times_ms.append(float(page.evaluate(_STATE)["latencyMs"]))
    for page in pages:
        page.context.close()
    return times_ms


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int) -> dict[str, int]:
    """Memory of a process: its highest ever, and what is its own and not a mapped file's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "RssAnon"))}
    return {"highest": fields["VmHWM"], "without mapped files": fields["RssAnon"]}


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = screenshots.chromium()
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"], chromium_sandbox=False)
        yield browser
        browser.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("run", type=Path, help="a run, such as the one that python -m benchmarks.tiles makes")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    return parser


if __name__ == "__main__":
    sys.exit(main())
