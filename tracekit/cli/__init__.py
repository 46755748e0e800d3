"""The command line: parse, call, print, exit. Heavy packages are imported only when a command needs them."""

import sys


def main() -> None:
    """Run the command line and exit."""
    # Spawned worker processes import the script that calls this function, but run no command.
    from tracekit.cli import application
    from tracekit.cli.question import Question

    application.run(Question(sys.argv[1:]))
