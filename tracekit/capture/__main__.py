"""``python -m tracekit.capture record …``: the same as ``tracekit record``, where only torch is installed."""

import sys

from tracekit.capture.launcher import command

_USAGE = """usage: python -m tracekit.capture record [options] -- COMMAND…
       python -m tracekit.capture merge RUN PART…
"""


def main(words: list[str]) -> int:
    """Do what the words of a command line say and return the exit code."""
    if words[:1] == ["record"]:
        return command.record(words[1:], program="python -m tracekit.capture record")
    if words[:1] == ["merge"]:
        return command.merge_run(words[1:], program="python -m tracekit.capture merge")
    sys.stderr.write(_USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
