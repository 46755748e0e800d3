"""Lines on stderr: stdout is the training's."""

import contextlib
import sys


def notify(text: str) -> None:
    """Print one line on stderr, as ``tracekit: <text>``; do nothing where the training has closed or replaced it."""
    with contextlib.suppress(Exception):  # whatever its stderr is now, the training continues
        sys.stderr.write(f"tracekit: {text}\n")
        sys.stderr.flush()


def flush() -> None:
    """Write what Python has buffered for stderr, as far as that is possible."""
    with contextlib.suppress(Exception):  # as above
        sys.stderr.flush()


def report_failure(consequence: str, error: BaseException) -> None:
    """Print one line on stderr: a part of the recording failed. Recording never stops the training."""
    reason = " ".join(str(error).split())
    notify(f"{consequence}: {type(error).__name__}: {reason}; training continues")
