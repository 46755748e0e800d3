"""The strategies by name: how each schedules a step, and which of its streams have high priority."""

from collections.abc import Mapping

from tracekit.conventions.strategies import STRATEGIES
from tracekit.simulate.fsdp1 import Ddp, Fsdp1
from tracekit.simulate.fsdp2 import Fsdp2, Hsdp
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1
from tracekit.simulate.program import ALL_REDUCE_STREAM, COPY_IN_STREAM, GATHER_STREAM, REDUCE_STREAM
from tracekit.simulate.schedule import Schedule
from tracekit.simulate.yafsdp import Yafsdp, YafsdpV1

SCHEDULES: Mapping[str, type[Schedule]] = {
    DDP: Ddp,
    FSDP1: Fsdp1,
    FSDP2: Fsdp2,
    HSDP: Hsdp,
    YAFSDP: Yafsdp,
    YAFSDP_V1: YafsdpV1,
}
_SIDE_STREAMS = frozenset({COPY_IN_STREAM, GATHER_STREAM, REDUCE_STREAM, ALL_REDUCE_STREAM})
HIGH_PRIORITY: Mapping[str, frozenset[int]] = {
    name: _SIDE_STREAMS for name in SCHEDULES if STRATEGIES[name].high_priority
}
"""Streams of high priority, by strategy; on the others small kernels are slowed by concurrent compute (give-way)."""
