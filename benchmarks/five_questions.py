"""Five questions that people bring to a trace, asked of tracekit and of HolisticTraceAnalysis, with what each answers.

    python -m benchmarks.five_questions

The runs are **simulated** (8 GPUs, so that the truth is known), but for memory, which is asked of a recorded sample.
HTA gets the same files written as torch writes them (it tells ranks by a pattern with blanks in it). A step is a call,
or a choice that the person has to make in its answer; what a person then has to find by eye is said and not counted.
"""

import contextlib
import gzip
import io
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEMORY = ROOT / "sample_traces" / "demo-fsdp2"
FAULTS = {
    "late": "slow-rank:5",
    "gap": "dataloader-stall",
    "prefetch": "no-prefetch",
    "commit": "needless-recomputation",
}
OPTIONS = ("--strategy", "fsdp2", "--model", "125m", "--gpus", "8", "--steps", "6", "--seed", "3")


@dataclass(frozen=True)
class Answer:
    """What a tool said, in how many calls, and how long it took (wall clock, s)."""

    tool: str
    calls: int
    seconds: float
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask and print; return the exit code."""
    del arguments
    with tempfile.TemporaryDirectory() as folder:
        runs = _simulated(Path(folder))
        for question, asked in _questions(runs).items():
            print(f"\n# {question}")
            for answer in asked:
                print(f"## {answer.tool}: {answer.calls} calls, {answer.seconds:.1f} s\n{answer.said.strip()[:2400]}")
    return 0


def _simulated(folder: Path) -> dict[str, Path]:
    runs = {"healthy": folder / "healthy"} | {name: folder / name for name in FAULTS}
    for name, run in runs.items():
        fault = ("--fault", FAULTS[name]) if name in FAULTS else ()
        _tracekit("simulate", *OPTIONS, *fault, "--out", str(run))
        spaced = run.with_name(f"{name}-spaced")
        spaced.mkdir()
        for file in run.glob("*.json.gz"):
            # As torch writes it: one item a line, a blank after each colon.
            text = json.dumps(json.loads(gzip.decompress(file.read_bytes())), indent=1)
            (spaced / file.name.removesuffix(".gz")).write_text(text)
    return runs


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
    }


def _ours(*words: str) -> Answer:
    began = time.perf_counter()
    said = _tracekit(*words)
    return Answer(f"tracekit {words[0]}", 1, time.perf_counter() - began, said)


def _tracekit(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tracekit", *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


class _Hta:
    """HTA with its calls counted."""

    def __init__(self) -> None:
        self.calls = 0

    def analysis(self, run: str) -> object:
        from hta.trace_analysis import TraceAnalysis

        self.calls += 2  # the object, and what is asked of it
        return TraceAnalysis(trace_dir=f"{run}-spaced")

    def difference(self, reference: str, run: str) -> object:
        from hta.trace_diff import TraceDiff

        one, other = self.analysis(reference), self.analysis(run)
        table = TraceDiff.compare_traces(one.t, other.t)  # type: ignore[attr-defined]
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
