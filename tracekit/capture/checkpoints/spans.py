"""Spans of a save or load in the trace that is being recorded."""

import contextlib
import os

import torch

from tracekit import conventions

_ON_DEMAND = "KINETO_USE_DAEMON" in os.environ  # a profile may begin without Python's knowledge


def span(stage: str = "") -> contextlib.AbstractContextManager[object]:
    """Return the span of a stage, "" being the whole, around a block; nothing where no profile is recorded.

    A span takes tens of microseconds and releases the GIL, for which a saving thread may be waiting.
    """
    if not (torch.autograd.profiler._is_profiler_enabled or _ON_DEMAND):
        return contextlib.nullcontext()
    parts = (conventions.CHECKPOINT, stage) if stage else (conventions.CHECKPOINT,)
    recorded: contextlib.AbstractContextManager[object] = torch.profiler.record_function(
        conventions.span_name(".".join(parts))
    )
    return recorded
