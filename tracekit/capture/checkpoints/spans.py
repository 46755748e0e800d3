"""Spans of a save or load in the trace that is being recorded."""

import contextlib
import os

import torch

from tracekit import conventions

_ON_DEMAND = "KINETO_USE_DAEMON" in os.environ  # a profile may begin that Python hears nothing of


def span(stage: str = "") -> contextlib.AbstractContextManager[object]:
    """Return the span of a stage, "" being the whole, around a block; nothing where no profile is recorded.

    A span takes tens of microseconds and lets go of Python's lock, for which a thread that saves is waiting.
    """
    if not (torch.autograd.profiler._is_profiler_enabled or _ON_DEMAND):
        return contextlib.nullcontext()
    parts = (conventions.CHECKPOINT, stage) if stage else (conventions.CHECKPOINT,)
    recorded: contextlib.AbstractContextManager[object] = torch.profiler.record_function(
        conventions.span_name(".".join(parts))
    )
    return recorded
