"""The commands of the command line, and how it ends.

Exit codes: 0 success, 1 a finding or a metric fails the check, 2 input or options cannot be used, 3 internal error,
4 runs cannot be compared.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EACCES, EDQUOT, EFBIG, EIO, ELOOP, EMFILE, ENAMETOOLONG, ENOSPC, EPERM, EROFS
from types import MappingProxyType
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from tracekit import __version__
from tracekit.cli import output
from tracekit.cli.question import Question, current_question
from tracekit.errors import TracekitError


@dataclass(frozen=True)
class LazyCommand:
    """A command, or a group of commands: its name, what `--help` says of it, and where it is defined."""

    name: str
    short_help: str
    module: str = ""
    """The module of `tracekit.cli.commands`; by default, its name is that of the command."""
    context_settings: Mapping[str, Any] | None = None


DEBUG = "TRACEKIT_DEBUG"
INTERNAL_ERROR, INTERRUPTED = 3, 130
# Errors of the operating system that only the user can fix.
_SYSTEM_ERRORS = (EACCES, EPERM, EROFS, ENOSPC, EDQUOT, EFBIG, EIO, ENAMETOOLONG, ELOOP, EMFILE)
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


COMMANDS = {
    command.name: command
    for command in (
        LazyCommand(
            "record", "Record a training without changing it: record -- COMMAND…", context_settings=_PASS_THROUGH
        ),
        LazyCommand(
            "merge", "Merge the parts of a run into one folder.", module="record", context_settings=_PASS_THROUGH
        ),
        LazyCommand("check", "Report why runs are slow; fail a build on it."),
        LazyCommand("summary", "Show where the time goes, by rank or by step."),
        LazyCommand("compare", "Compare two runs: better, worse, same or inconclusive."),
        LazyCommand("kernels", "Sum kernels or host ops by name, shapes, stack, …"),
        LazyCommand("memory", "Show who uses memory; replay the allocator."),
        LazyCommand("whatif", "Predict the step time without a cause; show the critical path."),
        LazyCommand("tune", "Propose changes of a training; try them and keep what is faster."),
        LazyCommand("export", "Write a run for Perfetto, browsers and monitoring."),
        LazyCommand("query", "Query a run in SQL."),
        LazyCommand("explain", "Explain a rule, a table, a cause, a metric or a term."),
        LazyCommand("dashboard", "Open runs in the browser."),
        LazyCommand("mcp", "Serve runs to coding agents (Model Context Protocol)."),
        LazyCommand("hang", "Show which rank a hung job waits for, and why."),
        LazyCommand("goodput", "Show the share of time that trained, over all attempts."),
        LazyCommand("verify-training", "Compare your training over ranks with one process."),
        LazyCommand("watch", "Show a running training and its outlier steps."),
        LazyCommand("scrub", "Copy a run without host names, users, paths and secrets."),
        LazyCommand("baseline", "Save, update or show the baseline of later runs."),
        LazyCommand("plan", "Estimate checkpoints, memory and pipelines."),
        LazyCommand("checkpoint", "Verify checkpoints on disk."),
        LazyCommand("history", "Store results of checks; show trends and changes."),
        LazyCommand("cache", "Show or clear the cache of parsed traces."),
        LazyCommand("simulate", "Write traces of a simulated training with known faults."),
    )
}


@dataclass(frozen=True)
class RenamedCommand:
    """What replaces a command: the words to type in place of its name, and in place of its options."""

    words: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


RENAMED: Mapping[str, RenamedCommand] = {
    "rules": RenamedCommand(("explain", "--kind", "rule")),
    "schema": RenamedCommand(("explain", "--kind", "table")),
    "ops": RenamedCommand(("kernels", "--of", "host")),
    "flamegraph": RenamedCommand(("kernels", "--by", "stack"), {"--by-rank": ("--by", "stack,rank")}),
    "critical-path": RenamedCommand(("whatif", "--critical-path")),
}


def renamed_command(words: Sequence[str]) -> str | None:
    """Old name that a command line uses; None for one without."""
    name = next((word for word in words if not word.startswith("-")), None)
    return name if name in RENAMED else None


def current_words(words: Sequence[str]) -> list[str]:
    """Words of a command line, with today's command in place of an old name.

    >>> current_words(["ops", "RUN", "--top", "3"])
    ['kernels', '--of', 'host', 'RUN', '--top', '3']
    """
    name = renamed_command(words)
    if name is None:
        return list(words)
    position = list(words).index(name)
    command = RENAMED[name]
    options = [part for word in words[position + 1 :] for part in command.options.get(word, (word,))]
    return [*words[:position], *command.words, *options]


class LazyCommands(Mapping[str, Any]):
    """Typer's commands by name, each of which is loaded when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        command, function_name = COMMANDS[name], name.replace("-", "_")
        module = importlib.import_module(f"tracekit.cli.commands.{command.module or function_name}")
        defined = getattr(module, function_name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = dict(command.context_settings or {"token_normalize_func": _option_name})
        if isinstance(defined, typer.Typer):
            app.add_typer(defined, name=name, context_settings=settings)
        else:
            app.command(name, context_settings=settings)(defined)
        return typer.main.get_group(app).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """A group whose `commands` are LazyCommands."""

    def __init__(self, **attributes: Any) -> None:
        """Replace the commands, of which there are none, by those of `COMMANDS`."""
        super().__init__(**attributes)
        self.commands = LazyCommands()  # type: ignore[assignment]  # nothing adds commands later

    def list_commands(self, _context: Any) -> list[str]:
        """Return the names of the commands, in the order of the list."""
        return list(COMMANDS)

    def format_commands(self, _context: Any, formatter: Any) -> None:
        """Write the name and the help of each command."""
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.short_help) for command in COMMANDS.values()])


def _option_name(name: str) -> str:
    """Name of an option in the help: --output is another spelling of --out in every command."""
    return "out" if name == "output" else name


app = typer.Typer(
    cls=LazyGroup,
    help="Find out why a distributed PyTorch training is slow, what it costs and what to change.",
    epilog="First steps: tracekit check --sample. For your own run: tracekit record -- COMMAND records it, "
    "tracekit check RUN analyzes it (a folder of traces or one trace.json), tracekit dashboard RUN shows it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes 0.1 s to load; --help must be instant
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(question: Question | None = None) -> None:
    """Run the command line and exit. A question that has a stored answer is answered by it."""
    output.open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="tracekit: %(message)s", stream=sys.stderr)
    try:
        if question is not None and (answer := question.answer()):
            output.repeat(answer)
            sys.exit(answer.exit_code)
        with current_question(question or Question()):
            # Words that were typed, with today's command in place of an old name, which a line on stderr says.
            words = current_words(sys.argv[1:])
            if name := renamed_command(sys.argv[1:]):
                command = " ".join(RENAMED[name].words)
                output.notify(f"tracekit {name} is now tracekit {command}; the old name goes away in the next version")
            app(words, prog_name="tracekit")
    except TracekitError as error:
        _exit(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 any other exception is a bug
        if isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS:
            location = f"{error.filename}: " if error.filename else ""
            _exit(f"{location}{error.strerror}; check path, permissions and free space", TracekitError.exit_code)
        cause = f": {error.__cause__!r}" if error.__cause__ else ""
        details = " ".join(f"{type(error).__name__}: {error}{cause}".split())
        _exit(f"internal error of tracekit: {details}; {_report(error)}", INTERNAL_ERROR)


def _report(error: Exception) -> str:
    """Write what a report of a bug needs, and return how to report it."""
    from tracekit.cli import crash_report

    written = crash_report.write(error, current_words(sys.argv[1:]))
    if written is None:
        return f"please report it with the output of {DEBUG}=1"
    return f"please report it with the file {written.path} ({written.content})"


def _exit(message: str, code: int) -> None:
    if os.environ.get(DEBUG):
        logging.getLogger(__name__).exception("")
    output.notify(message)
    sys.exit(code)


def _show_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"tracekit {__version__}\n")
        raise typer.Exit


@app.callback()
def _main_options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks, like {DEBUG}=1.")] = False,
    version: Annotated[  # noqa: ARG001 handled by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
