"""What a run would gain without one cause: the number that rules quote as the cost of their findings."""

from dataclasses import dataclass

import polars as pl

from tracekit.trace import Run


@dataclass(frozen=True, eq=False)
class Saving:
    """What the steps of a run would take without one cause.

    `saved_ns` is per step, the mean over steps of the rank that takes longest; `saved_ratio` its share of the recorded
    step. `confidence` runs from 0 to 1. `steps` has columns window, rank, step, duration_ns (recorded), replayed_ns
    (the replay unmodified), without_ns (the replay without the cause) and saved_ns (their difference); one row per
    window, rank and step. Empty and 0 where the run cannot tell: `why_not` then says why.
    """

    cause: str
    saved_ns: int
    saved_ratio: float
    confidence: float
    steps: pl.DataFrame
    why_not: str = ""


def saving(run: Run, cause: str) -> Saving:
    """Return what a run would gain without a cause, by replaying its dependency graph with that cause taken away.

    `cause` is a name in `tracekit.whatif.causes.CAUSES`: late-launch (HOST001), blocking-sync, rate-limiter (HOST002),
    data-loading (HOST003), allocator (MEM001), checkpoint (CKPT001), preparation (COMM004), give-way (STREAM001),
    slowed-compute (STREAM003), slowed-collectives (STREAM004), shared-queue, shared-communicator (STREAM002), straggler
    (RANK001), slow-link (RANK002), communication, late-gathers (COMM001), small-collectives (COMM002),
    micro-batch-reductions (COMM003), recomputation (MEM002). The graph of a run is built once and kept as long as the
    run; a replay takes some hundredths of a second. A rule that calls this lists `tracekit.whatif.FACTS` among its
    facts, so that it shares the one pass over the traces. Raises InputError for any other name.
    """
    raise NotImplementedError
