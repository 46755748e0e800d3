"""Watch a training for hangs: without progress of its collectives, dump flight recorder and stacks of the rank."""

from tracekit.capture.hangs.watch import HangWatch, start

__all__ = ["HangWatch", "start"]
