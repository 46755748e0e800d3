"""A model of PyTorch's CUDA caching allocator (the native backend), block for block.

Written from the allocator's behaviour and checked against recorded snapshots: `playback` replays their histories and
compares every address. The model itself knows neither traces nor files.
"""

from tracekit.replay.allocator.blocks import Block, Overlap
from tracekit.replay.allocator.model import Allocator, BlockState, OutOfMemory, SegmentEvent, SegmentState
from tracekit.replay.allocator.settings import Settings

__all__ = ["Allocator", "Block", "BlockState", "OutOfMemory", "Overlap", "SegmentEvent", "SegmentState", "Settings"]
