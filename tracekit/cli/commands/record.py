"""``tracekit record`` and ``tracekit merge``: their arguments go to `tracekit.capture`, which needs only torch."""

import sys

import typer


def record(context: typer.Context) -> None:
    """Record a training without changing it: tracekit record [options] -- COMMAND."""
    from tracekit.capture.launcher import command

    sys.exit(command.record(list(context.args), program="tracekit record"))


def merge(context: typer.Context) -> None:
    """Merge the parts of one run, from several nodes, into one folder."""
    from tracekit.capture.launcher import command

    sys.exit(command.merge_run(list(context.args), program="tracekit merge"))
