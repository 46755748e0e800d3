"""The command line: parse, call, print, exit. Nothing heavy is imported before a command needs it.

Exit codes: 0 all is well, 1 findings at or above the bar (or a metric past its own), 2 input or options that cannot be
used, 3 an error of ours, 4 runs that cannot be compared.
"""

import errno
import logging
import os
import sys
from typing import Annotated

import typer

from tracekit import __version__
from tracekit.cli import output
from tracekit.cli.commands.baseline import baseline
from tracekit.cli.commands.cache import cache
from tracekit.cli.commands.check import check
from tracekit.cli.commands.checkpoint import checkpoint
from tracekit.cli.commands.compare import compare
from tracekit.cli.commands.dashboard import dashboard
from tracekit.cli.commands.export import export
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
# What the system refuses wherever it is asked: no fault of ours, and for the user to mend.
_SYSTEM_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EMFILE,
)

app = typer.Typer(
    help="Say why a distributed PyTorch training run is slow, what it costs and what to change.",
    epilog="To begin: tracekit check --sample. Of your own: tracekit check RUN, a folder of traces or one trace.json; "
    "tracekit dashboard RUN shows it; tracekit record -- COMMAND makes one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes a tenth of a second to load, and --help is to be instant
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, short_help in (
    (record, "Record a training, as it is: record -- COMMAND…"),
    (merge, "Merge the parts of a run into one folder."),
    (check, "Say why runs are slow; fail a build on it."),
    (summary, "Show where the time goes, by rank or by step."),
    (compare, "Say whether one run is better or worse than another."),
    (kernels, "Add up kernels by name, op, shapes, unit, …"),
    (ops, "Add up host ops by name, shapes, unit, …"),
    (memory, "Show where memory goes; replay the allocator."),
    (whatif, "Say what a step would take without one cause."),
    (export, "Write a run as one file for Perfetto."),
    (query, "Ask a run in SQL."),
    (schema, "List the tables and columns of a run."),
    (rules, "List the rules and their thresholds."),
    (explain, "Explain one rule."),
    (dashboard, "Open runs in the browser."),
    (cache, "Show or clear the cache of parsed traces."),
    (simulate, "Write traces of a simulated training, with known faults."),
    (watch, "Show a training as it runs, and its steps out of line."),
    (scrub, "Copy a run without hosts, users, paths and secrets."),
):
    app.command(short_help=short_help, context_settings=PASS_THROUGH if command in (record, merge) else None)(command)
app.command(hidden=True, context_settings=PASS_THROUGH)(gather)
app.add_typer(baseline, name="baseline")
app.add_typer(plan, name="plan")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(history, name="history", short_help="Keep checked runs; show trends and changes.")


def main() -> None:
    """Run the command line and exit."""
    logging.basicConfig(level=logging.WARNING, format="tracekit: %(message)s", stream=sys.stderr)
    try:
        app(prog_name="tracekit")
    except TracekitError as error:
        _exit(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 whatever else comes here is a bug, and is said to be one
        if isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS:
            where = f"{error.filename}: " if error.filename else ""
            _exit(
                f"{where}{error.strerror}; check the path, its permissions and the space left", TracekitError.exit_code
            )
        cause = f": {error.__cause__!r}" if error.__cause__ else ""
        told = " ".join(f"{type(error).__name__}: {error}{cause}".split())
        _exit(
            f"an error of tracekit itself: {told}; please report it, with what {DEBUG}=1 shows",
            INTERNAL_ERROR,
        )


def _exit(message: str, code: int) -> None:
    if os.environ.get(DEBUG):
        logging.getLogger(__name__).exception("")
    output.notify(message)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tracekit {__version__}\n")
        raise typer.Exit


@app.callback()
def _main_options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks (as {DEBUG}=1 does).")] = False,
    version: Annotated[  # noqa: ARG001 answered by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
