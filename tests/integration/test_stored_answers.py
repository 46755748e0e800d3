"""A stored answer is what the command would print, and is used only while nothing that it depends on has changed."""

import gzip
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.browser import recorded
from tests.support import cli_runner
from tests.support.cli_runner import in_a_process, on_a_terminal
from tests.support.selection import others_in_accuracy
from tracekit.cli import output, question
from tracekit.cli.commands.check import ReportFormat
from tracekit.ingest import loader

ROOT = Path(__file__).parents[2]
RULE = '''
from dataclasses import dataclass
from typing import ClassVar
from tracekit.rules.rule import Finding, Rule, Severity


@dataclass(frozen=True)
class OfAPlugin(Rule):
    """Always the same.

    Nothing.
    """

    code: ClassVar = "PLUG001"

    def check(self, run):
        yield Finding(self.code, Severity.INFO, "MESSAGE", fix="none", impact=0.0)
'''


@pytest.fixture(autouse=True)
def _trust_new_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tracekit.cli.question._UNSURE_NS", -(10**15))
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the runs that were loaded, so not answered from the store."""
    paths: list[str] = []
    load = loader.load
    monkeypatch.setattr(loader, "load", lambda path, **options: paths.append(path) or load(path, **options))
    return paths


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "today"
    folder.parent.mkdir()
    recorded.write_run(folder, kernel="gemm")
    return folder


def ask(*words: object, **options: object):
    done = cli_runner.tracekit(*words, stored_answers=True, **options)  # type: ignore[arg-type]
    return done.stdout, done.stderr, done.returncode


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.answer"))


# Equal answers --------------------------------------------------------------------------------------------------------


FORMATS = [("check", "--format", str(name)) for name in ReportFormat]
TABLES = [("summary", "--by", by, "--format", kind) for by in ("rank", "step") for kind in ("text", "json")]


# Text and HTML; the other formats are made of the same parts.
EVERYDAY_WORDS = [*(words for words in FORMATS if words[-1] in ("text", "html")), *TABLES]
OTHER_WORDS = [pytest.param(words, marks=pytest.mark.accuracy) for words in FORMATS if words not in EVERYDAY_WORDS]


@pytest.mark.parametrize("words", [*EVERYDAY_WORDS, *OTHER_WORDS], ids="-".join)
def test_a_stored_answer_equals_that_of_the_command(words, run, loads):
    command, *options = words
    fresh = cli_runner.tracekit(command, run, *options, "--no-cache")
    first = ask(command, run, *options)
    assert len(loads) == 2
    assert ask(command, run, *options) == first == (fresh.stdout, fresh.stderr, fresh.returncode)
    assert len(loads) == 2


def test_a_failed_check_fails_again_with_the_same_lines(run, loads):
    first = ask("check", run, "--fail-on", "info")
    assert (first[2], len(first[1].splitlines())) == (1, 1)
    assert ask("check", run, "--fail-on", "info") == first
    assert len(loads) == 1


def test_two_processes_share_an_answer(run, tmp_path):
    time.sleep(2.1)  # a run that was written a moment ago is not trusted
    first, second = (in_a_process("check", run, cwd=run) for _ in range(2))
    assert len(entries(tmp_path)) == 1
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)


def test_a_terminal_has_an_answer_of_its_own(run, loads, monkeypatch):
    monkeypatch.setattr(output, "_DELAY_S", 1e9)  # the progress bar is no part of an answer
    shown = on_a_terminal("summary", run, stored_answers=True)
    assert on_a_terminal("summary", run, stored_answers=True) == shown
    assert len(loads) == 1
    assert ask("summary", run)[0] != shown[1]
    assert len(loads) == 2


# Changes --------------------------------------------------------------------------------------------------------------


def _same_size_and_time(run: Path) -> None:
    path = run / "rank00001.pt.trace.json.gz"
    times, size = path.stat(), path.stat().st_size
    trace = json.loads(gzip.decompress(path.read_bytes()))
    raw = gzip.compress(json.dumps(trace | {"more": 1}).encode(), 9)
    path.write_bytes(raw[:size] + b"\0" * (size - len(raw)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _a_settings_file_above(run: Path) -> None:
    (run.parent / "tracekit.toml").write_text('fail_on = "never"\n')


CHANGES: dict[str, Callable[[Path], object]] = {
    "a trace": lambda run: os.utime(run / "rank00000.pt.trace.json.gz", ns=(1, 1)),
    "bytes, with the same size and time": _same_size_and_time,
    "the manifest": lambda run: (run / "run.json").write_text('{"world_size": 3}'),
    "a rank more": lambda run: shutil.copy(run / "rank00001.pt.trace.json.gz", run / "rank00002.pt.trace.json.gz"),
    "a rank less": lambda run: (run / "rank00001.pt.trace.json.gz").unlink(),
    "a log": lambda run: (run / "rank00000.metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n'),
    "a log above": lambda run: (run.parent / "rank00000.metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n'),
    "a settings file": lambda run: (run / "tracekit.toml").write_text('fail_on = "never"\n'),
    "a settings file above": _a_settings_file_above,
    "a project file": lambda run: (run / "pyproject.toml").write_text("[tool.tracekit]\n"),
    "a repository": lambda run: (run / ".git").mkdir(),
}


# A summary takes a quarter of the time, and its answer depends on the same.
EVERYDAY = {
    *(("summary", change) for change in CHANGES),
    ("check", "the manifest"),
}


@pytest.mark.parametrize(
    ("command", "change"), others_in_accuracy(itertools.product(("check", "summary"), CHANGES), EVERYDAY)
)
def test_a_change_gives_a_fresh_answer(command, change, run, loads):
    ask(command, run, cwd=run)
    time.sleep(0.01)  # file systems keep times in units of milliseconds
    CHANGES[change](run)
    changed = ask(command, run, cwd=run)
    assert len(loads) == 2
    fresh = cli_runner.tracekit(command, run, "--no-cache", cwd=run)
    assert changed == (fresh.stdout, fresh.stderr, fresh.returncode)


@pytest.mark.parametrize("variable", ["TRACEKIT_CRASH_REPORT", "NO_COLOR", "COLUMNS", "TERM", "GITHUB_ACTIONS"])
def test_variables_that_shape_output_are_part_of_the_key(variable, run, loads):
    ask("summary", run)
    ask("summary", run, UNRELATED="1")
    assert len(loads) == 1
    ask("summary", run, **{variable: "77"})
    assert len(loads) == 2


@pytest.mark.parametrize("other", ["the folder", "the path", "an option"])
def test_other_words_and_folders_have_other_answers(other, run, loads):
    ask("summary", run)
    words = {"the folder": ["summary", run], "the path": ["summary", f"{run}/"]}
    ask(*words.get(other, ["summary", run, "--by", "step"]), cwd=run if other == "the folder" else None)
    assert len(loads) == 2


@pytest.mark.parametrize(
    "kind", others_in_accuracy(["config", "baseline", "baseline run", "repeat"], ["config", "baseline"])
)
def test_a_change_of_another_file_that_is_read_gives_a_fresh_answer(kind, run, loads, tmp_path):
    other = tmp_path / "other"
    if kind == "config":
        other.with_suffix(".toml").write_text('fail_on = "never"\n')
        option, changed = ["--config", other.with_suffix(".toml")], other.with_suffix(".toml")
    elif kind == "baseline":
        cli_runner.tracekit("check", run, "--format", "json", "--out", other)
        cli_runner.tracekit("baseline", "save", run, "--out", other)
        option, changed = ["--baseline", other], other
    else:
        recorded.write_run(other, kernel="gemm")
        option, changed = ["--baseline" if kind == "baseline run" else "--repeat", other], other / "run.json"
    first = ask("check", run, *option)
    before = len(loads)
    assert ask("check", run, *option) == first
    assert len(loads) == before
    time.sleep(0.01)
    os.utime(changed, ns=(1, 1))
    assert ask("check", run, *option) == first
    assert len(loads) > before


def test_an_ignore_that_ends_is_asked_about_each_day(run, loads, monkeypatch):
    ignore = '[[ignore]]\ncode = "COMM001"\nreason = "known"\nuntil = 2100-01-01\n'
    (run / "tracekit.toml").write_text(ignore)
    ask("check", run, cwd=run)
    ask("check", run, cwd=run)
    assert len(loads) == 1
    real = question.datetime
    tomorrow = lambda zone: real.datetime.now(zone) + real.timedelta(days=1)  # noqa: E731
    monkeypatch.setattr(
        "tracekit.cli.question.datetime", SimpleNamespace(datetime=SimpleNamespace(now=tomorrow), UTC=real.UTC)
    )
    ask("check", run, cwd=run)
    assert len(loads) == 2


def test_a_source_file_that_findings_may_point_at_is_an_input(run, loads):
    (run / "run.json").write_text(json.dumps({"world_size": 2, "command": ["train.py"]}))
    words = ("check", run, "--format", "sarif")
    assert "train.py" not in ask(*words, cwd=run)[0]
    (run / "train.py").write_text("print()\n")
    assert ask(*words, cwd=run)[0].count("train.py")
    ask(*words, cwd=run)
    assert len(loads) == 2


def test_a_change_of_the_code_gives_a_fresh_answer(run, loads, tmp_path, monkeypatch):
    copy = tmp_path / "tracekit"
    shutil.copytree(ROOT / "tracekit", copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("tracekit.cli.question._PACKAGE", copy)
    ask("summary", run)
    ask("summary", run)
    assert len(loads) == 1
    with (copy / "rules" / "communication.py").open("a") as code:
        code.write("# changed\n")
    ask("summary", run)
    assert len(loads) == 2


def test_a_rule_of_a_plugin_is_an_input(run, tmp_path):
    plugin = tmp_path / "plugin"
    metadata = plugin / "of_a_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    source = plugin / "of_a_plugin.py"
    source.write_text(RULE.replace("MESSAGE", "first"))
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{plugin}"}
    time.sleep(2.1)
    assert "first" not in in_a_process("check", run, "-v", **path).stdout
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-a-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.rules]\nof-a-plugin = of_a_plugin:OfAPlugin\n")
    time.sleep(2.1)
    assert "first" in in_a_process("check", run, "-v", **path).stdout
    assert len(entries(tmp_path)) == 2
    source.write_text(RULE.replace("MESSAGE", "other"))
    assert "other" in in_a_process("check", run, "-v", **path).stdout


def test_a_run_that_changes_while_it_is_read_is_not_stored(run, tmp_path, monkeypatch):
    load = loader.load
    monkeypatch.setattr(loader, "load", lambda path, **options: CHANGES["a trace"](run) or load(path, **options))
    assert ask("summary", run)[2] == 0
    assert entries(tmp_path) == []


# What is never stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["run", "settings"])
def test_files_that_changed_a_moment_ago_are_not_trusted(change, run, tmp_path, monkeypatch):
    monkeypatch.setattr("tracekit.cli.question._UNSURE_NS", 2 * 10**9)
    time.sleep(2.1)
    (run / "tracekit.toml").touch() if change == "settings" else os.utime(run / "run.json", ns=(1, 1))
    assert ask("summary", run, cwd=run)[2] == 0
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--no-cache"],
        ["--out", "out"],
        pytest.param(["--also", "json=out"], marks=pytest.mark.accuracy),
        ["--history", "h.db"],
        pytest.param(["--executor", "dask"], marks=pytest.mark.accuracy),
    ],
    ids=lambda options: options[0],
)
def test_no_answer_is_stored_of_a_command_that_does_more_than_print(options, run, tmp_path, monkeypatch):
    if "dask" in options:
        from tracekit.executors import open_executor

        monkeypatch.setattr("tracekit.executors.open_executor", lambda *_, **__: open_executor("threads", workers=1))
    assert ask("check", run, *options, cwd=tmp_path)[2] == 0
    assert entries(tmp_path) == []


@pytest.mark.parametrize("case", ["missing", "glob", "being written", "unreadable rank"])
def test_no_answer_is_stored_of_a_run_that_may_read_otherwise_the_next_time(case, run, tmp_path):
    path = {"missing": f"{run}x", "glob": f"{run}/*.json.gz"}.get(case, run)
    if case == "being written":
        (run / "rank00002.pt.trace.json.gz.partial").write_bytes(b"")
    if case == "unreadable rank":
        (run / "rank00001.pt.trace.json.gz").write_bytes(b"damaged")
    ask("summary", path)
    assert entries(tmp_path) == []


# Damage and limits ----------------------------------------------------------------------------------------------------


def test_a_damaged_entry_is_answered_anew(run, loads, tmp_path):
    first = ask("summary", run)
    (entry,) = entries(tmp_path)
    raw = entry.read_bytes()
    for damaged in (b"", raw[: len(raw) // 2], raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], b"x" * len(raw)):
        entry.write_bytes(damaged)
        before = len(loads)
        assert ask("summary", run) == first
        assert len(loads) == before + 1


def test_a_cache_that_cannot_be_written_or_is_disabled_changes_no_answer(run, loads, tmp_path):
    first = ask("summary", run)
    (tmp_path / "file").write_text("in the way")
    for variables in ({"TRACEKIT_CACHE_DIR": str(tmp_path / "file")}, {"TRACEKIT_CACHE_MAX_BYTES": "0"}):
        for _ in range(2):
            before = len(loads)
            assert ask("summary", run, **variables) == first
            assert len(loads) == before + 1
