"""Eight common questions about a trace, with the answers of tracekit and of HolisticTraceAnalysis.

    python -m benchmarks.eight_questions [--browser]

With --browser the dashboard answers instead, in Chromium: each click or choice is a step.

The runs are **simulated** (8 GPUs, so that the answer is known), except for memory, kernels and the out-of-memory
error, which use recorded samples. HTA gets the same files written as torch writes them (it finds ranks by a pattern
that contains blanks). A step is a call, or a choice in its answer; what a person has to find by eye is stated and not
counted.
"""

import argparse
import contextlib
import gzip
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import screenshots

ROOT = Path(__file__).parents[1]
MEMORY = ROOT / "sample_traces" / "demo-fsdp2"
KERNELS = ROOT / "sample_traces" / "gpu" / "compiled"
OUT_OF_MEMORY = ROOT / "tests" / "recordings" / "out_of_memory" / "fragmented" / "rank00000.memory.pickle.gz"
FAULTS = {
    "late": "slow-rank:5",
    "gap": "dataloader-stall",
    "prefetch": "no-prefetch",
    "commit": "needless-recomputation",
}
OPTIONS = ("--strategy", "fsdp2", "--model", "125m", "--gpus", "8", "--steps", "6")
SEED = ("--seed", "3")
TIMEOUT_MS = 300_000
TWENTY_RUNS = "What changed between these twenty runs?"
SEQUENCES = (1024, 2048)
RUNS_EACH = 10


@dataclass(frozen=True)
class Answer:
    """What a tool said, in how many calls, and how long it took (wall clock, s)."""

    tool: str
    calls: int
    seconds: float
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eight_questions", description=__doc__.splitlines()[0])
    parser.add_argument("--browser", action="store_true", help="ask the dashboard, in a headless Chromium")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = _runs(Path(folder), spaced=not options.browser)
        if options.browser:
            _browse(Path(folder))
            return 0
        for question, answers in _questions(runs).items():
            print(f"\n# {question}")
            for answer in answers:
                print(f"## {answer.tool}: {answer.calls} calls, {answer.seconds:.1f} s\n{answer.said.strip()[:3600]}")
    return 0


def _runs(folder: Path, *, spaced: bool) -> dict[str, Path]:
    """Write the runs: single ones to `folder`/single, the twenty of one question to `folder`/twenty."""
    single = folder / "single"
    runs = {name: single / name for name in ("healthy", *FAULTS)}
    for name, run in runs.items():
        fault = ("--fault", FAULTS[name]) if name in FAULTS else ()
        _tracekit("simulate", *OPTIONS, *SEED, *fault, "--out", str(run))
        if spaced:
            _write_spaced(run, folder / f"{name}-spaced")
    for number, tokens in enumerate(tokens for tokens in SEQUENCES for _ in range(RUNS_EACH)):
        varied = ("--seq", str(tokens), "--seed", str(number), "--ranks-written", "2")
        _tracekit("simulate", *OPTIONS, *varied, "--out", str(folder / "twenty" / f"run{number:02}"))
    shutil.copytree(MEMORY, single / "memory")
    shutil.copytree(KERNELS, single / "kernels")
    (single / "failed").mkdir()
    snapshot = single / "failed" / OUT_OF_MEMORY.name.removesuffix(".gz")
    snapshot.write_bytes(gzip.decompress(OUT_OF_MEMORY.read_bytes()))
    return runs | {"kernels": single / "kernels", "failed": single / "failed", "twenty": folder / "twenty"}


def _write_spaced(run: Path, folder: Path) -> None:
    """Write traces as torch does: one item a line, a blank after each colon."""
    folder.mkdir()
    for file in run.glob("*.json.gz"):
        text = json.dumps(json.loads(gzip.decompress(file.read_bytes())), indent=1)
        (folder / file.name.removesuffix(".gz")).write_text(text)


def _browse(runs: Path) -> None:
    """Ask the dashboard, opened on a folder of runs, and print how many clicks and choices each answer took."""
    from playwright.sync_api import sync_playwright

    with contextlib.ExitStack() as opened:
        urls = {name: opened.enter_context(screenshots.serve(runs / name))[0] for name in ("single", "twenty")}
        playwright = opened.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
        for question, ask in _IN_THE_DASHBOARD.items():
            page = browser.new_page(viewport={"width": 2000, "height": 1000})
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(urls["twenty" if question == TWENTY_RUNS else "single"])
            person = _Person(page)
            began = time.perf_counter()
            said = ask(person)
            print(f"{question}: {person.steps} clicks, {time.perf_counter() - began:.1f} s: {' '.join(said.split())}")
            page.close()
        browser.close()


class _Person:
    """Somebody at the dashboard, whose clicks and choices are counted."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.steps = 0

    def choose(self, run: str) -> "_Person":
        self._option("Run", run)
        return self

    def compare_with(self, run: str) -> "_Person":
        box = self.page.locator("[data-testid=stSidebar] [data-testid=stMultiSelect] input")
        box.click()
        box.press_sequentially(run)
        box.press("Enter")
        box.press("Escape")
        self.steps += 1
        return self

    def turn_to(self, page: str) -> "_Person":
        return self.click("[data-testid=stSidebarNavLink]", page)

    def click(self, selector: str, text: str) -> "_Person":
        self.page.locator(selector).filter(has_text=text, visible=True).first.click()
        self.steps += 1
        return self

    def read(self, selector: str, text: str) -> str:
        element = self.page.locator(selector).filter(has_text=text, visible=True).first
        return str(element.inner_text())

    def group_by(self, setting: str) -> "_Person":
        """Group charts by a setting."""
        self.page.get_by_role("combobox", name=re.compile("Group by")).click()
        self.page.get_by_role("option", name=re.compile(rf"^{re.escape(setting)} ")).click()
        self.steps += 1
        return self

    def read_first_row(self, column: str) -> str:
        """Read the first row of the table with a column, which is drawn on a canvas, as screen readers do."""
        table = self.page.locator("[data-testid=stDataFrame] canvas table").filter(has_text=column).first
        rows = table.locator("tbody tr")
        rows.first.wait_for(state="attached")
        return " | ".join(filter(None, (text.strip() for text in rows.first.locator("td").all_text_contents())))

    def _option(self, label: str, name: str) -> None:
        box = self.page.locator("[data-testid=stSidebar] [data-testid=stSelectbox]").filter(has_text=label)
        box.get_by_role("combobox").first.click()
        self.page.get_by_role("option", name=name, exact=True).click()
        self.page.keyboard.press("Escape")
        self.steps += 1


_IN_THE_DASHBOARD: dict[str, Callable[[_Person], str]] = {
    "Which rank is late?": lambda person: (
        person.choose("late").turn_to("Overview").read(".tk-verdict", "Rank 5 is a straggler")
    ),
    "Why is there a gap here?": lambda person: (
        person.choose("gap")
        .turn_to("Overview")
        .click("[data-testid=stExpander] summary", "Evidence")
        .click("[data-testid=stExpander] button", "Show in the timeline")
        .read(".timeline .details", "Data loading stalls the step")
    ),
    "What would prefetch give?": lambda person: (
        person.choose("prefetch").turn_to("What if").read("table.tracekit tr", "late-gathers")
    ),
    "Where does memory peak?": lambda person: person.choose("memory").turn_to("Memory").read(".tk-headline", "peak"),
    "What did this commit change?": lambda person: (
        person.choose("commit").compare_with("healthy").turn_to("Compare").read(".tk-verdict", "needless-recomputation")
    ),
    "Which kernel is furthest from the roofline?": lambda person: (
        person.choose("kernels")
        .turn_to("Kernels")
        .click("[data-testid=stMain] button", "roofline")
        .read_first_row("roofline")
    ),
    TWENTY_RUNS: lambda person: (
        person.turn_to("Runs")
        .click("[data-testid=stMain] button", "Charts")
        .click("[data-testid=stMain] button", "Check 20 runs")
        .group_by("arguments.seq")
        .read("[data-testid=stMain] p", "has the shortest median step")
    ),
    "Why did it run out of memory?": lambda person: (
        person.choose("failed").turn_to("Memory").read(".tk-headline", "Out of memory")
    ),
}


def _questions(runs: dict[str, Path]) -> dict[str, tuple[Answer, ...]]:
    healthy, late, gap, prefetch, commit = (str(runs[name]) for name in ("healthy", *FAULTS))
    return {
        "Which rank is late? (rank 5, 1.3x)": (
            _ours("check", late, "--select", "RANK", "--fail-on", "never"),
            _hta(lambda hta: hta.analysis(late).get_potential_stragglers(num_candidates=2)),
        ),
        "Why is there a gap here? (the batch comes late)": (
            _ours("check", gap, "--select", "HOST", "--fail-on", "never"),
            _hta(lambda hta: hta.analysis(gap).get_idle_time_breakdown(ranks=[0], visualize=False)[0]),
        ),
        "What would prefetch give? (its twin with prefetch exists)": (
            _ours("whatif", prefetch, "--without", "late-gathers"),
            _ours("compare", prefetch, healthy),
            _hta(
                lambda hta: (
                    hta.analysis(prefetch)
                    .critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=2)[0]
                    .summary()
                )
            ),
        ),
        "Where does memory peak?": (
            _ours("memory", str(MEMORY)),
            _hta(lambda hta: [name for name in dir(hta.analysis(late)) if "memory" in name]),
        ),
        "What did this commit change? (layers are computed twice)": (
            _ours("check", commit, "--baseline", healthy),
            _hta(lambda hta: hta.difference(healthy, commit)),
        ),
        "Which kernel is furthest from the roofline? (recorded on an H100)": (
            _ours("kernels", str(runs["kernels"]), "--of", "host", "--by", "name,shapes"),
        ),
        f"{TWENTY_RUNS} (sequences of {' and '.join(map(str, SEQUENCES))} tokens)": (
            _history(sorted(map(str, runs["twenty"].iterdir())), runs["twenty"].with_name("history.duckdb")),
        ),
        "Why did it run out of memory? (fragmentation)": (_ours("memory", str(runs["failed"])),),
    }


def _ours(*words: str) -> Answer:
    began = time.perf_counter()
    said = _tracekit(*words)
    return Answer(f"tracekit {words[0]}", 1, time.perf_counter() - began, said)


def _history(runs: Sequence[str], file: Path) -> Answer:
    began = time.perf_counter()
    _tracekit("history", "add", *runs, "--db", str(file))
    said = _tracekit("history", "show", "--db", str(file))
    return Answer("tracekit history", 2, time.perf_counter() - began, said)


def _tracekit(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tracekit", *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


class _Hta:
    """HTA with its calls counted."""

    def __init__(self) -> None:
        self.calls = 0

    def analysis(self, run: str) -> object:
        from hta.trace_analysis import TraceAnalysis

        self.calls += 2  # the object and the query
        folder = Path(run)
        return TraceAnalysis(trace_dir=str(folder.parents[1] / f"{folder.name}-spaced"))

    def difference(self, reference: str, run: str) -> object:
        from hta.trace_diff import TraceDiff

        before, after = self.analysis(reference), self.analysis(run)
        table = TraceDiff.compare_traces(before.t, after.t)  # type: ignore[attr-defined]
        return table.sort_values("diff_duration")[["diff_counts", "diff_duration"]].tail(6).to_string()


def _hta(ask: Callable[[_Hta], object]) -> Answer:
    hta, began = _Hta(), time.perf_counter()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            said = str(ask(hta))
    except Exception as error:  # noqa: BLE001 whatever a peer raises is its answer
        said = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return Answer("HTA", hta.calls, time.perf_counter() - began, said)


if __name__ == "__main__":
    sys.exit(main())
