"""Replay of a recorded allocator history by the model, under its own or other settings."""

from tracekit.replay.allocator.playback.player import ReplayResult, from_trace, predict, replay_as_recorded
from tracekit.replay.allocator.playback.recorded_history import History, from_snapshot

__all__ = ["History", "ReplayResult", "from_snapshot", "from_trace", "predict", "replay_as_recorded"]
