"""Rules on saves that block training, one per class of stall."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages, saves, stalls
from tracekit.analysis.host import host_stalls
from tracekit.model import intervals, units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules.host import io_sentence
from tracekit.rules.rule import Finding, Rule, Severity, distinct, median_name, median_row

_EVIDENCE_ROWS = 60
_IO_KINDS = {conventions.WRITE: ("write",), conventions.FSYNC: ("sync",), conventions.FINISH: ("metadata", "sync")}
"""The kinds of file system calls that a stage consists of, as io_calls.kind."""


@dataclass(frozen=True)
class StalledSave(Rule):
    """A class of stall that is the largest part of saves that block training; each subclass is one class."""

    kind: ClassVar[str]
    subject: ClassVar[str]
    """The start of the message, such as "Writing", before the cost."""
    part_of: ClassVar[str] = "CKPT001"
    detail: ClassVar[str]
    """The end of the message: where and why. In braces, as in `subject` and `fix`: columns of `stalls.dominant`."""
    fix: ClassVar[str]
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times, host_stalls.io_calls)
    max_overhead_ratio: float = 0.05
    min_blocked_ms: int = 250

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all saves of this class."""
        parts = run.table(stalls.dominant).filter(
            (pl.col("clock") == stalls.BLOCKED) & (pl.col("kind") == self.kind), pl.col("dur_ns") > 0
        )
        if parts.is_empty():
            return
        long = pl.col("blocked_ns") >= self.min_blocked_ms * 1_000_000
        costly = (pl.col("overhead_ratio") > self.max_overhead_ratio).fill_null(value=True)
        costly_saves = run.table(saves.by_save).filter(~pl.col("background"), long, costly)
        stalled = parts.join(costly_saves.drop("bytes"), on="save")
        if stalled.is_empty():
            return
        row = median_row(stalled, "blocked_ns", "save")
        overhead = row["overhead_ratio"]
        which = (
            f"({row['save']}, the {median_name(stalled.height)} of {stalled.height} saves)"
            if stalled.height > 1
            else f"({row['save']})"
        )
        of_save = f"of the {units.duration(row['blocked_ns'])} for which a checkpoint blocks training {which}"
        # A sentence on the file system calls of that rank during the save, where they were logged.
        of_rank = (pl.col("save") == row["save"]) & (pl.col("rank") == row["rank"]) & pl.col("blocking")
        totals = run.table(saves.stages).filter(of_rank, pl.col("stage") == conventions.TOTAL)
        kinds = _IO_KINDS.get(row["stage"], ())
        io_calls = io_sentence(run, row["rank"], intervals.from_table(totals), "the save", kinds)
        yield Finding(
            self.code,
            Severity.INFO if overhead is None else Severity.WARNING,
            f"{self._activity(row)} takes {units.duration(row['dur_ns'])} ({units.share(row['ratio'])}) "
            f"{of_save}{self._detail(row)}.{io_calls}",
            self.fix.format_map(row),
            impact=(overhead or 0.0) * row["ratio"],
            is_of_training=True,
            cost_ns=round(row["dur_ns"] / row["interval_steps"]) if row["interval_steps"] else 0,
            confidence=(0.9 if overhead is not None else 0.6) * min(1.0, 0.5 + row["ratio"]),
            ranks=(row["rank"],),
            steps=distinct(stalled, "step"),
            evidence=_evidence(run, row),
            claim=f"{self._activity(row)} makes saves slow on rank {row['rank']}",
        )

    def _activity(self, row: dict[str, Any]) -> str:
        return self.subject.format_map(row)

    def _detail(self, row: dict[str, Any]) -> str:
        return self.detail.format_map(row)


def _rate(before: str, row: dict[str, Any]) -> str:
    return before + units.rate(row["bytes"] / (row["dur_ns"] / 1e9)) if row["bytes"] else ""


def _evidence(run: Run, row: dict[str, Any]) -> pl.DataFrame:
    """Return the rows of that save, those of the longest stage and its rank first."""
    stages = run.table(saves.stages).filter(pl.col("save") == row["save"], "blocking")
    slowest = (pl.col("rank") == row["rank"]) & (pl.col("stage") == row["stage"])
    rows = stages.sort(~slowest, "rank", "start_ns", "stage").head(_EVIDENCE_ROWS)
    return rows.select("save", pl.exclude("save", "whole_bytes"))


@dataclass(frozen=True)
class SerializedSave(StalledSave):
    """Saves that are mostly serialization in Python, usually of many small tensors.

    What it does: reports saves whose largest part is serialization. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: torch.save makes an archive of each tensor, which costs a fraction of a millisecond and over a
    thousand bytes for tensors of any size; storage is idle meanwhile.

    How it is measured: on the critical path of the save (see docs/checkpoints.md). If over a fifth of the written bytes
    is not tensor data, tensors are many and small, and planning is included: it grows with their number too.

    How to fix: save fewer, larger tensors (fused or foreach optimizer states in one), in safetensors, or with more
    threads.

    Blind spots: needs the checkpoint log of tracekit.capture. Data that C++ writes at once (safetensors, the old format
    of torch.save) counts as writing.
    """

    code: ClassVar[str] = "CKPT002"
    kind: ClassVar[str] = stalls.SERIALIZE
    fix: ClassVar[str] = (
        "Save fewer, larger tensors (flatten small states into one), or use FileSystemWriter(thread_count=…) or "
        "HuggingFaceStorageWriter (safetensors). DefaultSavePlanner(enable_plan_caching=True) plans only once."
    )

    def _activity(self, row: dict[str, Any]) -> str:
        is_small = row["envelope_ratio"] > stalls.SMALL_TENSORS_RATIO
        return "Planning plus serializing" if is_small else "Serializing"

    def _detail(self, row: dict[str, Any]) -> str:
        if row["envelope_ratio"] <= stalls.SMALL_TENSORS_RATIO:
            return f", on rank {row['rank']}"
        return (
            f". {units.share(row['envelope_ratio'])} of the bytes of rank {row['rank']} are not tensor data, so its "
            "tensors are many and small"
        )


@dataclass(frozen=True)
class StagedSave(StalledSave):
    """Saves that mostly copy tensors from the device to the host.

    What it does: reports saves whose largest part is staging. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: a copy into pageable memory runs at a fraction of the bus bandwidth and stops its stream.

    How it is measured: stage `stage` on the critical path of the save, with its bytes and their rate.

    How to fix: stage into pinned memory that is reused by all saves.

    Blind spots: needs the checkpoint log. On a host without a device, the same stage is copying in memory.
    """

    code: ClassVar[str] = "CKPT003"
    kind: ClassVar[str] = stalls.STAGING
    subject: ClassVar[str] = "Copying tensors to the host"
    fix: ClassVar[str] = (
        "Reuse pinned staging memory: dcp.async_save(…, async_stager=DefaultStager(StagingOptions("
        "use_pinned_memory=True, use_async_staging=True))), with one stager for all saves."
    )

    def _detail(self, row: dict[str, Any]) -> str:
        return f"{_rate(': ', row)}, on rank {row['rank']}"


@dataclass(frozen=True)
class SlowStorage(StalledSave):
    """Saves that mostly wait for storage to accept their bytes.

    What it does: reports saves whose largest part is writing. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: training is blocked until the last byte is written.

    How it is measured: stage `write` on the critical path of the save; the rate is that of the slowest rank while it
    writes.

    How to fix: faster or nearer storage, more ranks that write, or fewer bytes.

    Blind spots: needs the checkpoint log. Without fsync the rate is that of the page cache, not of storage.
    """

    code: ClassVar[str] = "CKPT004"
    kind: ClassVar[str] = stalls.WRITE
    subject: ClassVar[str] = "Writing"
    fix: ClassVar[str] = (
        "Write to local disk first, or spread the shards over more writers and threads "
        "(FileSystemWriter(thread_count=…)). Or overlap the write with training: dcp.async_save. tracekit plan "
        "checkpoint computes the bandwidth needed."
    )

    def _detail(self, row: dict[str, Any]) -> str:
        return f", where rank {row['rank']} writes {units.size(row['bytes'] or 0)}{_rate(' at ', row)}"


@dataclass(frozen=True)
class SlowSync(StalledSave):
    """Saves that mostly wait for fsync, or for opening and closing files.

    What it does: reports saves whose largest part is fsync and metadata. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: each file costs a round trip to storage that no bandwidth shortens.

    How it is measured: stages `fsync` and `finish` on the critical path of the save.

    How to fix: fewer files; a background save.

    Blind spots: needs the checkpoint log. fsync also waits for bytes that were written earlier and are in the page
    cache: with few files and many bytes this is bandwidth.
    """

    code: ClassVar[str] = "CKPT005"
    kind: ClassVar[str] = stalls.FSYNC
    subject: ClassVar[str] = "Syncing files and metadata"
    detail: ClassVar[str] = ", most of it the stage {stage} on rank {rank}"
    fix: ClassVar[str] = (
        "Sync fewer files: FileSystemWriter(single_file_per_rank=True), or fewer writers. Or overlap the sync with "
        "training: dcp.async_save. FileSystemWriter(sync_files=False) gives up durability."
    )


@dataclass(frozen=True)
class StragglingWriter(StalledSave):
    """One rank that writes more slowly than its share of the bytes explains, while the others wait.

    What it does: reports saves whose largest part is the extra time of the slowest rank for writing and syncing,
    compared with the time for as many bytes and files on the other ranks. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: every rank waits for the slowest.

    How it is measured: relative to the median of the other ranks' time per byte (writing) and per file (syncing), so a
    rank with more bytes to write, as under ZeRO-1, is not a straggler. It must take twice the expected time, and
    another rank must wait for most of that.

    How to fix: check that node's storage, network and other jobs.

    Blind spots: needs the checkpoint log of two ranks or more; if half of the ranks are slow, none is a straggler.
    """

    code: ClassVar[str] = "CKPT006"
    kind: ClassVar[str] = stalls.STRAGGLER
    subject: ClassVar[str] = "Waiting for rank {rank} to write"
    detail: ClassVar[str] = (
        ", beyond the time that its bytes and files take on other ranks, mostly in the stage {stage}"
    )
    fix: ClassVar[str] = (
        "Check the storage of rank {rank}'s node (disk health, mount, quota, other jobs), or let other ranks write: "
        "DefaultSavePlanner(dedup_save_to_lowest_rank=False) spreads replicated tensors."
    )


@dataclass(frozen=True)
class PlannedSave(StalledSave):
    """Saves that are mostly planning, and barriers at which ranks wait although no rank works.

    What it does: reports saves whose largest part is building the state dict, planning, and barriers that no rank's
    work explains. Not reported below `min_blocked_ms` or `max_overhead_ratio` of the time.

    Why it costs: one rank gathers all plans, merges them and scatters the result, again for each save; the time grows
    with ranks times tensors.

    How it is measured: stage `plan` of the slowest rank, and the time of the save that is not on its critical path.

    How to fix: cache plans.

    Blind spots: needs the checkpoint log. Ranks that enter a save late look like waiting: so do stragglers of training.
    """

    code: ClassVar[str] = "CKPT007"
    kind: ClassVar[str] = stalls.PLAN
    subject: ClassVar[str] = "Planning plus barriers"
    detail: ClassVar[str] = ", most of it the stage {stage} on rank {rank}"
    fix: ClassVar[str] = (
        "Cache plans across saves: DefaultSavePlanner(enable_plan_caching=True). Save a sharded state dict "
        "(get_model_state_dict without full_state_dict), and synchronize ranks before saving."
    )


@dataclass(frozen=True)
class GlobalSync(StalledSave):
    """Saves that sync the whole machine.

    What it does: reports saves whose largest part is `os.sync`. Not reported below `min_blocked_ms` or
    `max_overhead_ratio` of the time.

    Why it costs: it waits for the dirty pages of every process on the machine, not only for those of the checkpoint.

    How it is measured: sync calls without a file, counted by the recorder.

    How to fix: torch calls os.sync if a stream has no file descriptor, as with fsspec: disable syncing there.

    Blind spots: needs a checkpoint log of this version; older ones do not distinguish `os.sync` from `os.fsync`.
    """

    code: ClassVar[str] = "CKPT008"
    kind: ClassVar[str] = stalls.GLOBAL_SYNC
    subject: ClassVar[str] = "os.sync (of the whole machine)"
    detail: ClassVar[str] = ", on rank {rank}, whose stream has no file descriptor to sync"
    fix: ClassVar[str] = (
        "Use FsspecWriter(…, sync_files=False) if the store makes writes durable itself, as object stores do."
    )


@dataclass(frozen=True)
class CrowdedSave(StalledSave):
    """Saves that wait for CPU cores.

    What it does: reports saves whose largest part is waiting that no rank's work explains but a lack of CPU cores does.
    Not reported below `min_blocked_ms` or `max_overhead_ratio` of the time.

    Why it costs: ranks meet several times in a save, and each time they wait for the rank that gets no core.

    How it is measured: the time of the save that is not on its critical path, as far as the rank with the largest run
    delay, measured by the system's scheduler, was ready to run but did not run.

    How to fix: leave CPU cores free for the ranks.

    Blind spots: needs a checkpoint log with counters, which Linux provides. Run delay inside stages counts as those
    stages.
    """

    code: ClassVar[str] = "CKPT016"
    kind: ClassVar[str] = stalls.CPU_CONTENTION
    subject: ClassVar[str] = "Waiting for a CPU core"
    detail: ClassVar[str] = ", most of it on rank {rank}"
    fix: ClassVar[str] = (
        "Give each rank more CPU cores (--cpus-per-task), or run fewer DataLoader workers and threads "
        "(OMP_NUM_THREADS). Check for other processes on the node of rank {rank}."
    )
