"""The command line: parse, call, print, exit. Heavy packages are imported only when a command needs them.

Exit codes: 0 success, 1 a finding or a metric fails the check, 2 input or options cannot be used, 3 internal error,
4 runs cannot be compared.
"""

import logging
import os
import sys
from errno import EACCES, EDQUOT, EFBIG, EIO, ELOOP, EMFILE, ENAMETOOLONG, ENOSPC, EPERM, EROFS
from typing import Annotated

import typer

from tracekit import __version__
from tracekit.cli import output
from tracekit.cli.commands.baseline import baseline
from tracekit.cli.commands.cache import cache
from tracekit.cli.commands.check import check
from tracekit.cli.commands.checkpoint import checkpoint
from tracekit.cli.commands.compare import compare
from tracekit.cli.commands.critical_path import critical_path
from tracekit.cli.commands.dashboard import dashboard
from tracekit.cli.commands.export import export
from tracekit.cli.commands.flamegraph import flamegraph
from tracekit.cli.commands.hang import hang
from tracekit.cli.commands.history import history
from tracekit.cli.commands.kernels import kernels
from tracekit.cli.commands.memory import memory
from tracekit.cli.commands.ops import ops
from tracekit.cli.commands.plan import plan
from tracekit.cli.commands.query import query
from tracekit.cli.commands.record import PASS_THROUGH, gather, merge, record
from tracekit.cli.commands.rules import explain, rules
from tracekit.cli.commands.schema import schema
from tracekit.cli.commands.scrub import scrub
from tracekit.cli.commands.simulate import simulate
from tracekit.cli.commands.summary import summary
from tracekit.cli.commands.watch import watch
from tracekit.cli.commands.whatif import whatif
from tracekit.errors import TracekitError

DEBUG = "TRACEKIT_DEBUG"
INTERNAL_ERROR, INTERRUPTED = 3, 130
# Errors of the operating system that only the user can fix.
_SYSTEM_ERRORS = (EACCES, EPERM, EROFS, ENOSPC, EDQUOT, EFBIG, EIO, ENAMETOOLONG, ELOOP, EMFILE)

app = typer.Typer(
    help="Find out why a distributed PyTorch training is slow, what it costs and what to change.",
    epilog="First steps: tracekit check --sample. For your own run: tracekit record -- COMMAND records it, "
    "tracekit check RUN analyzes it (a folder of traces or one trace.json), tracekit dashboard RUN shows it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes 0.1 s to load; --help must be instant
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, short_help in (
    (record, "Record a training without changing it: record -- COMMAND…"),
    (merge, "Merge the parts of a run into one folder."),
    (check, "Report why runs are slow; fail a build on it."),
    (summary, "Show where the time goes, by rank or by step."),
    (compare, "Compare two runs: better, worse, same or inconclusive."),
    (kernels, "Sum kernels by name, op, shapes, unit, …"),
    (ops, "Sum host ops by name, shapes, unit, …"),
    (memory, "Show who uses memory; replay the allocator."),
    (whatif, "Predict the step time without one cause of lost time."),
    (critical_path, "Show what one step waited for, over all ranks."),
    (export, "Write a run as one file for Perfetto."),
    (flamegraph, "Write time by call stack for flame graph viewers."),
    (query, "Query a run in SQL."),
    (schema, "List the tables and columns for query."),
    (rules, "List the rules and their thresholds."),
    (explain, "Explain one rule."),
    (dashboard, "Open runs in the browser."),
    (cache, "Show or clear the cache of parsed traces."),
    (simulate, "Write traces of a simulated training with known faults."),
    (hang, "Say which rank a hung job waits for, and why."),
    (watch, "Show a running training and its outlier steps."),
    (scrub, "Copy a run without host names, users, paths and secrets."),
):
    app.command(short_help=short_help, context_settings=PASS_THROUGH if command in (record, merge) else None)(command)
app.command(hidden=True, context_settings=PASS_THROUGH)(gather)
app.add_typer(baseline, name="baseline")
app.add_typer(plan, name="plan")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(history, name="history", short_help="Store results of checks; show trends and changes.")


def main() -> None:
    """Run the command line and exit."""
    logging.basicConfig(level=logging.WARNING, format="tracekit: %(message)s", stream=sys.stderr)
    try:
        app(prog_name="tracekit")
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
        report = f"please report it with the output of {DEBUG}=1"
        _exit(f"internal error of tracekit: {details}; {report}", INTERNAL_ERROR)


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
