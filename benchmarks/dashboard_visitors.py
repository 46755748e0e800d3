"""``python -m benchmarks.dashboard_visitors OWN OTHER``: how long pages take while another visitor loads the server.

One visitor opens pages of the run OWN in a new session each time, without a browser. Another one opens pages of OTHER,
a large run that is not cached, or of OWN, and runs SQL queries that need all the time and memory they may use.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import screenshots
from tests.support.visitor import Answer, Visitor, WidgetState

PAGES = ("", "ranks", "kernels", "communication", "quality", "timeline")
HEAVY_PAGES = ("", "timeline", "kernels", "criticalpath", "whatif")
HEAVY_QUERIES = {
    "SQL for 30 s": "SELECT count(*) FROM ops a, ops b, ops c WHERE a.dur_ns <> b.dur_ns + c.dur_ns",
    "SQL beyond its memory": "SELECT list(a.name || b.name) FROM ops a, ops b",
}
LIMIT_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; return 0 where every 95th percentile is within the limit."""
    options = _parser().parse_args(arguments)
    worst_s = 0.0
    print(f"load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| another visitor | takes | pages | median | p95 | longest |\n|---|--:|--:|--:|--:|--:|")
    with screenshots.serve(options.own.resolve(), options.other.resolve()) as (url, _):
        port = urlsplit(url).port or 0
        run_name, other = options.own.name, options.other.name
        for page in PAGES:
            _visit(port, page, run_name)
        for name, work in _tasks(port, run_name, other).items():
            took_s, visits_s = _visits_during(work, lambda page: _visit(port, page, run_name))
            p95_s = statistics.quantiles(visits_s, n=20, method="inclusive")[-1]
            worst_s = max(worst_s, p95_s)
            times = f"{statistics.median(visits_s):.2f} s | {p95_s:.2f} s | {max(visits_s):.2f} s"
            print(f"| {name} | {took_s:.1f} s | {len(visits_s)} | {times} |", flush=True)
    return int(worst_s > LIMIT_S)


def _tasks(port: int, run_name: str, other: str) -> dict[str, Callable[[], object]]:
    tasks: dict[str, Callable[[], object]] = {"none": lambda: time.sleep(5)}
    for label, run in (("a large run", other), ("the same run", run_name)):
        for page in HEAVY_PAGES:
            tasks[f"opens {page or 'the diagnosis'} of {label}"] = lambda page=page, run=run: _visit(port, page, run)  # type: ignore[misc]
        for name, text in HEAVY_QUERIES.items():
            tasks[f"{name}, {label}"] = lambda text=text, run=run: _query(port, run, text)  # type: ignore[misc]
    return tasks


def _visits_during(work: Callable[[], object], visit: Callable[[str], float]) -> tuple[float, list[float]]:
    """Time that the work took, and that of each visit of a page that began meanwhile, in s; at least two rounds."""
    thread = threading.Thread(target=work)
    began_s = time.monotonic()
    ended_s: list[float] = []
    thread.start()
    threading.Thread(target=lambda: (thread.join(), ended_s.append(time.monotonic()))).start()
    visits_s: list[float] = []
    while thread.is_alive() or len(visits_s) < 2 * len(PAGES):
        visits_s.append(visit(PAGES[len(visits_s) % len(PAGES)]))
    while not ended_s:
        time.sleep(0.01)
    return ended_s[0] - began_s, visits_s


def _visit(port: int, page: str, run: str) -> float:
    with Visitor(port) as visitor:
        answer: Answer = visitor.open(page, run=run)
        return answer.took_s


def _query(port: int, run: str, text: str) -> None:
    with Visitor(port) as visitor:
        page: Answer = visitor.open("sql", run=run)
        (area,) = page.of_kind("text_area")
        (button,) = (button for button in page.of_kind("button") if button.label == "Run")
        widgets = [WidgetState(id=area.id, string_value=text), WidgetState(id=button.id, trigger_value=True)]
        visitor.open("sql", widgets=widgets, run=run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard_visitors", description=__doc__)
    parser.add_argument("own", type=Path, help="the run whose pages are timed")
    parser.add_argument("other", type=Path, help="a large run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
