"""The frameworks that tests train with, each if it is installed, and what ranks import in any case. Not a test.

The process from which those of ranks are forked imports this: transformers and Lightning take 8 s of CPU time.
"""

import contextlib
import gc

import tests.support.imported_by_ranks  # noqa: F401
from tracekit.conventions.gc_pause import gc_paused

with gc_paused():
    with contextlib.suppress(ImportError):
        import accelerate  # noqa: F401
    with contextlib.suppress(ImportError):
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer  # noqa: F401
    with contextlib.suppress(ImportError):
        import pytorch_lightning  # noqa: F401
gc.freeze()
