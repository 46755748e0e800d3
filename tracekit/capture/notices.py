"""Lines on stderr: stdout is the training's."""

import sys


def notify(text: str) -> None:
    """Print one line on stderr, as ``tracekit: <text>``."""
    sys.stderr.write(f"tracekit: {text}\n")
    sys.stderr.flush()


def report_failure(consequence: str, error: BaseException) -> None:
    """Print one line on stderr: a part of the recording failed. Recording never stops the training."""
    reason = " ".join(str(error).split())
    notify(f"{consequence}: {type(error).__name__}: {reason}; training continues")
