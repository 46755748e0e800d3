"""``tracekit record`` and ``tracekit gather``: what `tracekit.capture` does where only torch is installed, as it is."""

import sys

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def record(context: typer.Context) -> None:
    """Record a training as it is: tracekit record [options] -- COMMAND."""
    from tracekit.capture.launcher import command

    sys.exit(command.record(list(context.args), program="tracekit record"))


def gather(context: typer.Context) -> None:
    """Bring the parts of one run, from several nodes, into one folder."""
    from tracekit.capture.launcher import command

    sys.exit(command.gather(list(context.args), program="tracekit gather"))
