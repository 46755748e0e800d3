"""A recorded history of the allocator, played again by its model: under its own settings, or under others."""

from tracekit.replay.allocator.playback.inferred_history import of_trace
from tracekit.replay.allocator.playback.player import Outcome, play, predict
from tracekit.replay.allocator.playback.recorded_history import History, of

__all__ = ["History", "Outcome", "of", "of_trace", "play", "predict"]
