"""Shared options: the fields of a dataclass become options of every command that takes the dataclass."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from tracekit import executors
from tracekit.cli.options import ExecutorKind, ExecutorOptions, expand_options
from tracekit.executors.processes import Processes
from tracekit.model.source import Threads


@dataclass(frozen=True, kw_only=True)
class Input:
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.")]
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the cache.")] = True


@dataclass(frozen=True, kw_only=True)
class Output:
    names: Annotated[list[str] | None, typer.Option("--name", help="A name.")] = None


received: list[tuple[object, ...]] = []


@expand_options
def show(
    *,
    top: Annotated[int, typer.Option("--top", help="Rows.")] = 3,
    source: Input,
    output: Output,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query.")] = "none",
) -> None:
    """Show something."""
    received.append((source, output, top, sql))


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(show)
    received.clear()
    return lambda *words: CliRunner().invoke(app, words)


def test_the_command_gets_the_dataclasses_with_the_values_of_the_options(invoke):
    assert invoke("runs/today", "FROM ops", "--no-cache", "--name", "a", "--name", "b", "--top", "5").exit_code == 0
    assert received == [(Input(run="runs/today", cache=False), Output(names=["a", "b"]), 5, "FROM ops")]


def test_fields_keep_their_defaults(invoke):
    assert invoke("runs/today").exit_code == 0
    assert received == [(Input(run="runs/today"), Output(), 3, "none")]


def test_a_field_without_a_default_is_required(invoke):
    assert invoke().exit_code == 2
    assert received == []


def test_help_shows_each_option_in_the_order_of_the_parameters(invoke):
    text = invoke("--help").output
    places = [text.index(word) for word in ("Show something.", "--top", "--cache", "--name")]
    assert places == sorted(places)


def test_the_command_can_be_called_from_python():
    received.clear()
    show(run="runs/today", top=1)
    assert received == [(Input(run="runs/today"), Output(), 1, "none")]
    with pytest.raises(TypeError, match="run"):
        show(top=1)


@pytest.mark.parametrize(("files", "executor"), [(31, Threads), (32, Processes)])
def test_many_local_traces_are_measured_by_processes_unless_the_user_chooses(tmp_path, monkeypatch, files, executor):
    monkeypatch.setattr(executors, "processors", lambda: 4)
    for number in range(files):
        (tmp_path / f"rank{number:05}.pt.trace.json.gz").touch()
    with ExecutorOptions().open([str(tmp_path)]) as opened:
        assert isinstance(opened, executor)
        assert opened.workers == 4 or executor is Threads
    with ExecutorOptions(executor=ExecutorKind.THREADS).open([str(tmp_path)]) as opened:
        assert isinstance(opened, Threads)
