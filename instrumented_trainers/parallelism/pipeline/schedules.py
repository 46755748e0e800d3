"""The order in which a rank runs the forward and backward of its stages, by name; torch adds what they communicate.

1F1B and GPipe are written down here: torch's own classes of that name run without a list of actions, and so without
the spans that every other schedule has.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
)
from torch.distributed.pipelining.stage import PipelineStage

from instrumented_trainers.parallelism.pipeline.executor import Executor

F, B = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD


def make_schedule(name: str, stages: list[PipelineStage], micro_batches: int, **hooks: Any) -> PipelineScheduleMulti:
    """Return the schedule of that name over a rank's stages."""
    return _SCHEDULES[name](stages, micro_batches, scale_grads=False, **hooks)


class OneForwardOneBackward(Executor):
    """Forward until the pipeline is full, then one backward after each forward (https://arxiv.org/abs/1806.03377)."""

    def __init__(self, stages: list[PipelineStage], micro_batches: int, **options: Any) -> None:
        super().__init__(stages, micro_batches, **options)
        ranks = self.pp_group_size
        self.pipeline_order = {rank: one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)}
        self._prepare_schedule_with_comms(self.pipeline_order)


class GPipe(Executor):
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965)."""

    def __init__(self, stages: list[PipelineStage], micro_batches: int, **options: Any) -> None:
        super().__init__(stages, micro_batches, **options)
        self.pipeline_order = {rank: gpipe(rank, micro_batches) for rank in range(self.pp_group_size)}
        self._prepare_schedule_with_comms(self.pipeline_order)


class Interleaved(Executor, ScheduleInterleaved1F1B):
    """1F1B of several stages on each rank (https://arxiv.org/abs/2104.04473, section 2.2)."""


class ZeroBubbleH1(Executor, ScheduleInterleavedZeroBubble):
    """1F1B whose weights' gradients fill the end (https://arxiv.org/abs/2401.10241, section 2.1)."""


class ZeroBubbleV(Executor, ScheduleZBVZeroBubble):
    """The V-shaped schedule without a bubble (https://arxiv.org/abs/2401.10241, section 6)."""


class DualPipeV(Executor, ScheduleDualPipeV):
    """DeepSeek's DualPipe, cut in half (https://github.com/deepseek-ai/DualPipe)."""


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[_Action | None]:
    """Actions of a rank with one stage under 1F1B."""
    warm_up = min(ranks - 1 - rank, micro_batches)
    forwards, backwards = _actions(rank, F, micro_batches), _actions(rank, B, micro_batches)
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[micro_batches - warm_up :]]


def gpipe(rank: int, micro_batches: int) -> list[_Action | None]:
    """Actions of a rank with one stage under GPipe."""
    return [*_actions(rank, F, micro_batches), *_actions(rank, B, micro_batches)]


def _actions(stage: int, kind: _ComputationType, micro_batches: int) -> list[_Action | None]:
    return [_Action(stage, kind, index) for index in range(micro_batches)]


_SCHEDULES: Mapping[str, Callable[..., PipelineScheduleMulti]] = MappingProxyType(
    {
        "1f1b": OneForwardOneBackward,
        "gpipe": GPipe,
        "interleaved": Interleaved,
        "zb-h1": ZeroBubbleH1,
        "zbv": ZeroBubbleV,
        "dualpipev": DualPipeV,
    }
)
