"""What each rank imports. The process from which ranks are forked imports it once, and does nothing else."""

import gc

from tracekit.conventions.gc_pause import gc_paused

with gc_paused():
    import instrumented_trainers.loop  # noqa: F401
gc.freeze()  # no collection in a rank goes through all that
