"""What commands print for recorded runs at widths from 40 columns on: no line is wider, and no number is cut."""

import functools
import re
from pathlib import Path

import pytest

import tracekit
from tests.support import cli_runner, loaded_runs
from tests.support.selection import others_in_accuracy
from tracekit.analysis.time import breakdown
from tracekit.cli import application
from tracekit.regression import comparison
from tracekit.regression.comparison import RunSamples
from tracekit.report import comparison as comparison_report
from tracekit.report import summary_tables, text, what_if
from tracekit.report.document import Document
from tracekit.report.render import text as render_text
from tracekit.rules import stated_savings

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")
SAMPLES = Path(__file__).parents[2] / "sample_traces"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d.,]*(?: [kMGT]?i?B| [mµn]?s|%)(?!\w)")


@functools.cache
def document(kind: str, name: str) -> Document:
    run = tracekit.load(SAMPLES / name)
    if kind == "summary":
        return summary_tables.document(breakdown.slowest_device_by_rank(run))
    if kind == "compare":
        other = tracekit.load(SAMPLES / "demo-fsdp2")
        compared = comparison.compare(RunSamples.of(other), RunSamples.of(run), allow_different=True)
        return comparison_report.document(compared)
    report = run.check()
    if kind == "whatif":
        return what_if.document(stated_savings.answer(report), (), run=run.name)
    return text.brief(report, run) if kind == "check" else text.document(report, run)


@pytest.mark.parametrize(
    "name", others_in_accuracy(["ci/red", "gpu/slow-rank", "parallelism/moe-ep2"], ["ci/red", "parallelism/moe-ep2"])
)
@pytest.mark.parametrize("kind", ["check", "check -v", "summary", "whatif", "compare"])
def test_numbers_are_whole_at_every_width(kind: str, name: str) -> None:
    whole = set(NUMBER.findall(" ".join(render_text.render(document(kind, name), width=400).split())))
    assert whole
    for width in (40, 60, 80, 120):
        printed = render_text.render(document(kind, name), width=width)
        assert max(map(len, printed.splitlines())) <= width, width
        numbers = set(NUMBER.findall(" ".join(printed.split())))
        assert numbers <= whole, (width, numbers - whole)
        assert not re.search(r"(?<![\w.])[+-]?\d[\d.,]*…", printed), (width, printed)


GREEN, RED = SAMPLES / "ci/green", SAMPLES / "ci/red"
RECORDINGS = Path(__file__).parents[1] / "recordings"
VERIFIED = f"{Path(__file__).parent / 'scripts' / 'verified_trainings.py'}:summed_loss"
COMMANDS = {
    "kernels": ("kernels", SAMPLES / "gpu/cuda-graphs"),
    "kernels of the host": ("kernels", RED, "--of", "host"),
    "collectives": ("summary", SAMPLES / "demo-yafsdp", "--by", "collective"),
    "critical path": ("whatif", RED, "--critical-path"),
    "changes by operator": ("compare", GREEN, RED, "--by", "operator", "--top", "5"),
    "metrics": ("compare", GREEN, RED, "--verbose"),
    "verdict": ("compare", GREEN, RED),
    "verdict that cannot be told": ("compare", SAMPLES / "faults/healthy-ddp", SAMPLES / "faults/host-sync"),
    "calls of devices": ("compare", SAMPLES / "demo-fsdp2", SAMPLES / "demo-yafsdp", "--verbose"),
    "steps": ("summary", SAMPLES / "gpu/slow-rank", "--by", "step"),
    "kernels by rank": ("kernels", SAMPLES / "gpu/slow-rank", "--by", "rank"),
    "saves": ("check", SAMPLES / "faults/slow-disk", "--verbose"),
    "check against a run": ("check", RED, "--baseline", GREEN),
    "memory": ("memory", RECORDINGS / "out_of_memory/leak"),
    "goodput": ("goodput", RECORDINGS / "goodput", "--gpu-hour-price", "2"),
    "verification": ("verify-training", VERIFIED, "--strategy", "ddp", "--steps", "1"),
    "hang": ("hang", RECORDINGS / "hangs/skipped_collective"),
    "plan memory": ("plan", "memory", "--model", "llama3-70b", "--dp", "64", "--zero", "3"),
    "plan checkpoint": (
        "plan",
        "checkpoint",
        "--model",
        "405b",
        "--dp",
        "128",
        "--tp",
        "8",
        "--write-bandwidth",
        "273e9",
        "--interval",
        "4h",
    ),
    "rule": ("explain", "RANK003"),
    "query": ("query", RED, "SELECT rank, step, kind, count(*) AS n FROM activities GROUP BY ALL ORDER BY ALL"),
    "several runs": ("check", GREEN, RED, "--fail-on", "never"),
    "pipeline": ("check", SAMPLES / "parallelism/pipeline-slow-stage", "--verbose"),
    "tune": ("tune", SAMPLES / "demo-fsdp2"),
    "what-if": ("whatif", SAMPLES / "gpu/slow-rank"),
    "sizes": ("compare", "gpus4", "gpus8", "--verbose"),
    "simulate": ("simulate", "--gpus", "4", "--layers", "2", "--steps", "2", "--out", "gpus4", "--force"),
    "faults": ("simulate", "--list-faults"),
    "memory of two runs": ("memory", SAMPLES / "demo-fsdp2", "--against", SAMPLES / "demo-yafsdp"),
    "replay of the allocator": ("memory", RECORDINGS / "allocator_h100", "--replay", "default"),
    "watch": ("watch", SAMPLES / "demo-fsdp2", "--once"),
    "save a baseline": ("baseline", "save", GREEN, "--out", "saved.json"),
    "update a baseline": ("baseline", "update", "saved.json", GREEN),
    "baseline": ("baseline", "show", "main.json"),
    "history": ("history", "show", "--db", "history.duckdb"),
    "add to a history": ("history", "add", GREEN, "--db", "history.duckdb"),
    "export": ("export", RED, "--out", "run.pftrace"),
    "export of metrics": ("export", SAMPLES / "demo-fsdp2", "--format", "prometheus", "--out", "metrics.prom"),
    "checkpoint": ("checkpoint", "verify", RECORDINGS / "distributed_checkpoint"),
    "scrub": ("scrub", RED, "scrubbed", "--force"),
    "cache": ("cache",),
    "plan layout": ("plan", "layout", "--model", "llama2-7b", "--gpus", "16"),
    "plan train": ("plan", "train", "--model", "405b", "--tokens", "15.6e12", "--gpus", "16384", "--device", "h100-80"),
    "plan pipeline": ("plan", "pipeline", "--stages", "4", "--micro-batches", "8"),
    "term": ("explain", "straggler"),
    "metric": ("explain", "step_time_ns"),
}
MESSAGES = (
    *("simulate", "faults", "export", "export of metrics", "scrub", "cache", "checkpoint"),
    *("save a baseline", "update a baseline"),
)
"""Commands whose lines are as long as they are: a terminal wraps them."""
WITHOUT_NUMBERS = (
    *("query", "rule", "term", "metric", "faults", "export", "export of metrics", "scrub"),
    *("save a baseline", "update a baseline", "add to a history", "verification"),
)
"""What they print has no number with a unit."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read: runs of two sizes, a baseline and a history."""
    path = tmp_path_factory.mktemp("widths")
    made = (
        *(("simulate", "--gpus", n, "--layers", "2", "--steps", "3", "--out", f"gpus{n}") for n in (4, 8)),
        ("baseline", "save", GREEN, "--out", "main.json"),
        ("history", "add", GREEN, "--db", "history.duckdb"),
    )
    for arguments in made:
        assert cli_runner.tracekit(*arguments, cwd=path).returncode == 0
    return path


@pytest.mark.parametrize("name", application.COMMANDS)
def test_no_word_of_the_help_is_cut(name: str) -> None:
    wide_help, narrow_help = (cli_runner.tracekit(name, "--help", COLUMNS=width).stdout for width in ("200", "40"))
    assert "".join(narrow_help.split()) == "".join(wide_help.split())


def test_every_command_is_printed_at_all_widths() -> None:
    # A recorder prints what the training prints; a merge moves its files; the dashboard prints its address; mcp answers
    # programs.
    left_out = {"record", "merge", "dashboard", "mcp"}
    assert {str(arguments[0]) for arguments in COMMANDS.values()} == set(application.COMMANDS) - left_out


def printed_at(width: int, name: str, folder: Path) -> str:
    done = cli_runner.tracekit(*COMMANDS[name], cwd=folder, stored_answers=True, COLUMNS=str(width))
    assert done.returncode in (0, 1), done.stderr  # 1: it has found something
    return done.stdout + (done.stderr if name in MESSAGES else "")


@pytest.mark.parametrize("name", others_in_accuracy(COMMANDS, ["kernels", "hang", "plan memory", "watch", "history"]))
def test_commands_cut_no_number_at_any_width(name: str, folder: Path) -> None:
    whole = set(NUMBER.findall(" ".join(printed_at(400, name, folder).split())))
    assert whole or name in WITHOUT_NUMBERS
    for width in (40, 60, 80, 120):
        printed = printed_at(width, name, folder)
        # A word that is longer than a line stays whole.
        wide = [line for line in printed.splitlines() if len(line) > width and len(line.split()) > 1]
        assert wide == [] or name in MESSAGES, width
        numbers = set(NUMBER.findall(" ".join(printed.split())))
        assert numbers <= whole, (width, numbers - whole)
        assert not re.search(r"(?<![\w.])[+-]?\d[\d.,]*…", printed), (width, printed)
