"""A recorded history of the allocator, played again by its model: under its own settings, or under others."""

from tracekit.replay.history import History, of
from tracekit.replay.inferred import of_trace
from tracekit.replay.play import Outcome, play, predict

__all__ = ["History", "Outcome", "of", "of_trace", "play", "predict"]
