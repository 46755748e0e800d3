"""The trainers, and what they, the strategies and torch itself import, if only when first used. Not a test.

The process from which those of ranks are forked imports this.
"""

import gc

from tracekit.conventions.gc_pause import gc_paused

with gc_paused():
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # by torch.compile, whatever its backend
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel
    import torch.profiler  # noqa: F401

    import instrumented_trainers.loop  # noqa: F401
gc.freeze()  # no collection in a rank goes through all that
