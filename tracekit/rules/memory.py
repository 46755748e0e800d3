"""Judgements of memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, checkpoint, memory
from tracekit.rule import Finding, Rule, Severity
from tracekit.rules import typical
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 40
_LESS_CHURN = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, lower the peak (smaller batch, activation checkpointing), "
    "keep torch.cuda.empty_cache() out of the loop and PYTORCH_NO_CUDA_MEMORY_CACHING unset."
)


@dataclass(frozen=True)
class AllocatorChurn(Rule):
    """Device memory taken and returned in steady state, allocator retries, and unit buffers that come and go.

    What it does: reports cudaMalloc, cudaFree, hipMalloc and the like after warm-up with the time they stall the
    device; retries of the allocator (it freed its cache and tried again); and, as information, buffers of at least
    1 MiB that FSDP's gather and reduce spans allocate every step.

    Why it costs: a device malloc or free blocks the host and often all streams; once the device has done what was
    queued, it stands idle. Buffers that come and go fragment memory.

    How it is measured: lost is the time in which no device works during such a call, and after it up to the next work
    as far as the call went on while the device was busy; host time in calls is told apart. The first `warmup_steps`
    profiled steps fill the cache and are left out where there are more; without marked steps the second half of the
    trace is judged. The typical step of the worst rank is quoted: from `min_stall_ratio` of it as a warning, or, where
    the device hardly waits, from `min_host_ratio` of it on the host as information. Retries are steps in which the
    counter num_alloc_retries of the metrics log grew, after `warmup_steps` logged ones; their cost is how much longer
    those steps took than the others, at the median. Buffers are allocations inside spans of FSDP units.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller peak, no empty_cache in the loop; for unit
    buffers an engine with pre-allocated ones (YaFSDP).

    Blind spots: activations come and go in every run and are not counted. A call that is hidden under queued work and
    makes the host late for good is not counted. Without profile_memory no buffers are seen, without the metrics log of
    tracekit.capture no retries.
    """

    code: ClassVar[str] = "MEM001"
    facts: ClassVar[tuple[Fact, ...]] = (
        memory.device_calls,
        memory.stalls,
        memory.retries,
        memory.unit_buffers,
        breakdown.by_step,
        checkpoint.save_spans,
    )
    min_stall_ratio: float = 0.01
    min_host_ratio: float = 0.05
    warmup_steps: int = 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding on device calls, one on retries and one on unit buffers."""
        yield from self._device_calls(run)
        yield from self._retries(run)
        yield from self._unit_buffers(run)

    def _device_calls(self, run: Run) -> Iterator[Finding]:
        steps = self._steady(_without_saves(run, run.table(memory.stalls).filter(pl.col("duration_ns") > 0)))
        stalled, blocked = pl.col("stalled_ns") / pl.col("duration_ns"), pl.col("host_ns") / pl.col("duration_ns")
        steps = steps.with_columns(stalled.alias("stall_ratio"), blocked.alias("host_ratio"))
        worst = typical.of_worst(steps, "stall_ratio")
        if worst is None or (worst["stall_ratio"] < self.min_stall_ratio and worst["host_ratio"] < self.min_host_ratio):
            return
        judged = steps.filter(pl.col("calls") > 0)
        yield Finding(
            self.code,
            Severity.WARNING if worst["stall_ratio"] >= self.min_stall_ratio else Severity.INFO,
            f"{worst['calls']:,} device malloc and free calls in {_where(worst)} leave the device idle for "
            f"{units.duration(worst['stalled_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(worst['stall_ratio'])}); on the host they take {units.duration(worst['host_ns'])}.",
            _LESS_CHURN,
            impact=worst["stall_ratio"],
            cost_ns=worst["stalled_ns"] if worst["step"] is not None else 0,
            # A trace of one step, or without steps, cannot tell what only the first of them does.
            confidence=0.8 if steps["step"].n_unique() > 1 else 0.5,
            ranks=tuple(judged["rank"].unique().sort().to_list()),
            steps=tuple(judged["step"].drop_nulls().unique().sort().to_list()),
            evidence=_calls_of(run, worst),
            subject="device calls",
        )

    def _retries(self, run: Run) -> Iterator[Finding]:
        table = run.table(memory.retries).filter(pl.col("window") == pl.col("window").min().over("rank"))
        rows = table.filter(pl.col("step").rank("ordinal").over("rank") > self.warmup_steps)
        retried = rows.filter(pl.col("retries") > 0)
        if retried.is_empty():
            return
        counts = retried.group_by("rank").agg(pl.col("retries").sum(), pl.len().alias("steps"))
        worst = counts.sort("retries", "rank", descending=[True, False]).row(0, named=True)
        own = rows.filter(pl.col("rank") == worst["rank"])
        late_ns = _later(own)
        share = worst["steps"] / own.height
        yield Finding(
            self.code,
            Severity.WARNING,
            f"The allocator ran out of memory, freed its cache and tried again {worst['retries']} times in "
            f"{worst['steps']} of {own.height} steps on rank {worst['rank']}"
            + (f"; those steps take {units.duration(late_ns)} longer than the others." if late_ns > 0 else "."),
            _LESS_CHURN,
            impact=min(1.0, late_ns * worst["steps"] / own["step_time_ns"].sum()) if late_ns > 0 else 0.0,
            cost_ns=int(late_ns * share) if late_ns > 0 else 0,
            confidence=0.9,
            ranks=tuple(counts["rank"].sort().to_list()),
            steps=tuple(retried["step"].unique().sort().to_list()),
            evidence=pl.concat([own.filter(pl.col("retries") > 0), own.filter(pl.col("retries") == 0)]).select(
                "window", "rank", "step", "retries", "step_time_ns"
            ),
            subject="retries",
        )

    def _unit_buffers(self, run: Run) -> Iterator[Finding]:
        buffers = run.table(memory.unit_buffers)
        keys = ["window", "rank", "step"]
        taken = buffers.group_by(keys).agg(pl.len().alias("count"), pl.col("bytes").sum())
        steps = run.table(breakdown.by_step).select(*keys, "device").drop_nulls("step").unique(keys)
        steps = steps.join(taken, on=keys, how="left").with_columns(pl.col("count", "bytes").fill_null(0))
        worst = typical.of_worst(steps, "bytes")
        if worst is None or not worst["count"] or buffers["step"].n_unique() < 2:
            return
        own = typical.here(buffers, worst).sort("bytes", "start_ns", descending=[True, False])
        yield Finding(
            self.code,
            Severity.INFO,
            f"FSDP's gathers and reductions allocate {worst['count']} buffers of 1 MiB or more, "
            f"{units.size(worst['bytes'])} in all, in {typical.in_words(worst)}.",
            "Buffers allocated once serve all units: YaFSDP keeps two for weights and two for gradients.",
            cost_bytes=worst["bytes"],
            confidence=0.8,
            ranks=tuple(buffers["rank"].unique().sort().to_list()),
            steps=tuple(buffers["step"].unique().sort().to_list()),
            evidence=own,
            subject="unit buffers",
        )

    def _steady(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Return the steps without the first ones of each window, where there are more than those."""
        place = ["window", "rank", "device"]
        number = pl.col("step").rank("dense").over(place)
        enough = pl.col("step").n_unique().over(place) > self.warmup_steps
        return steps.filter(pl.col("step").is_null() | ~enough | (number > self.warmup_steps))


def _without_saves(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    saving = run.table(checkpoint.save_spans).drop_nulls("step").select("window", "step").unique()
    return steps.join(saving, on=["window", "step"], how="anti")


def _where(worst: dict[str, Any]) -> str:
    return typical.in_words(worst) if worst["step"] is not None else f"the second half of {typical.in_words(worst)}"


def _calls_of(run: Run, worst: dict[str, Any]) -> pl.DataFrame:
    """Return the calls of the window judged, the costliest first, then all of them in one row."""
    calls = run.table(memory.device_calls)
    end_ns = worst["start_ns"] + worst["duration_ns"]
    own = typical.here(calls, worst).filter(
        pl.lit(worst["step"] is not None) | pl.col("start_ns").is_between(worst["start_ns"], end_ns)
    )
    whole = pl.DataFrame(
        [
            {name: worst[name] for name in ("window", "rank", "step", "host_ns", "stalled_ns")}
            | {"name": f"all {worst['calls']} calls", "step_ns": worst["duration_ns"]}
        ],
        schema_overrides={"step": pl.Int64},
    )
    own = own.sort("stalled_ns", "start_ns", descending=[True, False]).head(_EVIDENCE_ROWS)
    shown = pl.concat([own.with_columns(pl.col("dur_ns").alias("host_ns")), whole], how="diagonal")
    return shown.select("window", "rank", "step", "name", "start_ns", "dur_ns", "host_ns", "stalled_ns", "step_ns")


def _later(steps: pl.DataFrame) -> float:
    """Return how much longer steps with retries took than those without, at the median, in ns; 0 if not known."""
    with_retries = steps.filter(pl.col("retries") > 0)["step_time_ns"].median()
    without = steps.filter(pl.col("retries") == 0)["step_time_ns"].median()
    return float(str(with_retries)) - float(str(without)) if with_retries and without else 0.0
