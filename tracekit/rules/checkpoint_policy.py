"""Rules on the checkpoint policy: interval, durability, verification, and the cost of loading."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages, saves
from tracekit.model import units
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.plan import checkpoint as plan
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first, median_row

_EVIDENCE_ROWS = 60


@dataclass(frozen=True)
class AmplifiedRestore(Rule):
    """Loads in which ranks read the same bytes several times.

    What it does: reports loads in which all ranks together read more than `max_amplification` times the checkpoint. It
    is a warning if training waited for `max_load_s` or longer.

    Why it costs: after a failure every rank waits for the load, and storage serves the same bytes many times.

    How it is measured: bytes read on all ranks over the bytes of the checkpoint: for files the most that one rank
    reads, for torch.distributed.checkpoint the size in its metadata.

    How to fix: read once and broadcast.

    Blind spots: needs the checkpoint log of the load on all ranks. Bytes from a cache on the node count as read.
    """

    code: ClassVar[str] = "CKPT012"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.loads,)
    max_amplification: float = 1.5
    max_load_s: float = 60.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all such loads."""
        amplified = run.table(save_stages.restores).filter(pl.col("amplification") > self.max_amplification)
        if amplified.is_empty():
            return
        slowest = largest_first(amplified, "dur_ns", "checkpoint")
        row = slowest.row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING if row["dur_ns"] >= self.max_load_s * 1e9 else Severity.INFO,
            f"{row['ranks']} ranks read {units.size(row['read_bytes'])} to load {units.size(row['unique_bytes'])}, "
            f"{row['amplification']:.3g} times the checkpoint, in {units.duration(row['dur_ns'])} "
            f"({row['checkpoint']}).",
            "Read once and broadcast: load on one rank of each replica, then "
            "set_model_state_dict(…, options=StateDictOptions(broadcast_from_rank0=True)). "
            "torch.load(…, mmap=True) reads only the tensors that are used.",
            confidence=0.9,
            ranks=run.ranks,
            steps=distinct(amplified, "step"),
            evidence=slowest.head(_EVIDENCE_ROWS),
            claim="Ranks read more bytes than the checkpoint has",
        )


@dataclass(frozen=True)
class SuboptimalInterval(Rule):
    """A checkpoint interval far from the optimum for the failure rate.

    What it does: compares the time between saves with the optimal interval, if `mtbf_s` is set: the mean time between
    failures of the whole job in seconds (0: unknown, nothing is reported). Reports a factor of more than
    `max_interval_ratio` in either direction.

    Why it costs: saving too often costs the saves; saving too rarely costs the work lost in a failure.

    How it is measured: the interval with the largest share of time that trains under exponential failures, without the
    time to restore, where all saves after one step block training for their median.

    How to fix: save at the interval in the finding.

    Blind spots: failures are assumed to be random at a constant rate; if saving takes no time there is no optimum, and
    the upload's length is the limit.
    """

    code: ClassVar[str] = "CKPT013"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)
    mtbf_s: float = 0.0
    max_interval_ratio: float = 2.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the median save's interval is far from the optimum."""
        blocking = run.table(saves.by_save).filter(pl.col("blocked_ns") > 0).drop_nulls("interval_ns")
        all_saves = saves.by_training_step(blocking, run.table(saves.by_rank))
        if self.mtbf_s <= 0 or all_saves.is_empty():
            return
        row, median_ns = median_row(all_saves, "blocked_ns", "start_ns"), saves.median_cost(run)["blocked_ns"]
        blocked_s, interval_s = median_ns / 1e9, row["interval_ns"] / 1e9
        best_s = plan.best_interval_s(blocked_s, self.mtbf_s)
        if interval_s <= 0 or 1 / self.max_interval_ratio <= interval_s / best_s <= self.max_interval_ratio:
            return
        waste, best_waste = (1 - plan.goodput_ratio(blocked_s, at_s, self.mtbf_s) for at_s in (interval_s, best_s))
        often = "frequent" if interval_s < best_s else "rare"
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Checkpoints are too {often}: one every {units.long_duration(interval_s)} loses {units.share(waste)} "
            f"of the time, and one every {units.long_duration(best_s)} would lose {units.share(best_waste)} (with "
            f"{units.duration(median_ns)} per save and a failure every {units.long_duration(self.mtbf_s)}).",
            f"Save every {units.long_duration(best_s)}. Shorter saves shorten the optimal interval.",
            impact=min(1.0, max(0.0, waste - best_waste)),
            is_of_training=True,
            cost_ns=round(max(0.0, waste - best_waste) * row["interval_ns"] / (row["interval_steps"] or 1)),
            confidence=0.7,
            ranks=run.ranks,
            steps=distinct(all_saves, "step"),
            evidence=run.table(saves.by_rank)
            .filter(pl.col("save") == row["save"])
            .with_columns(pl.col("blocked_ns").alias("dur_ns")),
            claim=f"Checkpoints are too {often}",
        )


@dataclass(frozen=True)
class LostOnPowerFailure(Rule):
    """Checkpoints that may not be on disk when the save ends.

    What it does: reports saves with a file that was not synced after its last byte.

    Why it costs: a node that fails soon after loses the checkpoint, or leaves one that only looks complete.

    How it is measured: the recorder follows each file that a save writes to its last fsync.

    How to fix: fsync files and their folder after the last byte; see docs/checkpoints.md for the gaps in torch.

    Blind spots: needs a checkpoint log of this version. What storage guarantees after fsync is not checked; fsync of
    folders is not followed, and stores without file descriptors are unknown.
    """

    code: ClassVar[str] = "CKPT014"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all such saves."""
        by_rank = run.table(saves.by_rank)
        risky = by_rank.filter(~pl.col("durable"))
        if risky.is_empty():
            return
        first = risky.row(0, named=True)
        synced = first["storage_bytes_per_s"] is not None
        reason = "the metadata file is synced before it is flushed" if synced else "no file is synced"
        yield Finding(
            self.code,
            Severity.INFO,
            f"{risky['save'].n_unique()} of {by_rank['save'].n_unique()} saves may be lost on a power failure, because "
            f"{reason} ({first['save']}, rank {first['rank']}).",
            "After the save, os.fsync the metadata file and the folder."
            if synced
            else "Write to an open file, flush and os.fsync it, then os.replace it and os.fsync the folder. dcp.save "
            "syncs its shards.",
            confidence=0.9,
            ranks=distinct(risky, "rank"),
            steps=distinct(risky, "step"),
            evidence=risky.with_columns(pl.col("written_ns").alias("dur_ns")).head(_EVIDENCE_ROWS),
            claim=f"Saves may be lost on a power failure: {reason}",
        )


@dataclass(frozen=True)
class UnverifiedShards(Rule):
    """Shards that are not verified when they are loaded.

    What it does: reports saves by torch.distributed.checkpoint without checksums of their own.

    Why it costs: a flipped bit in a shard is loaded without an error: torch computes a checksum when it saves but does
    not check it when it loads.

    How it is measured: from the calls; the instrumented trainers write checksums for each checkpoint and are recognized
    by the run's manifest.

    How to fix: write checksums next to the shards, and verify them before loading.

    Blind spots: the log does not show other ways to verify the files.
    """

    code: ClassVar[str] = "CKPT015"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all saves."""
        by_dcp = pl.col("call").is_in((conventions.DCP_SAVE, conventions.DCP_ASYNC_SAVE))
        lines = run.table(saves.stages).filter(by_dcp & (pl.col("stage") == conventions.TOTAL))
        sealed = "checkpoint_every" in Manifest.of(run.manifest).arguments
        if sealed or lines.is_empty():
            return
        number = lines["save"].n_unique()
        yield Finding(
            self.code,
            Severity.INFO,
            f"{number} {'checkpoints are' if number > 1 else 'checkpoint is'} saved by torch.distributed.checkpoint, "
            "which loads corrupted shards without an error.",
            "Write a checksum next to each shard when saving, and verify it before dcp.load.",
            confidence=0.6,
            ranks=distinct(lines, "rank"),
            steps=distinct(lines, "step"),
            evidence=lines.head(_EVIDENCE_ROWS).select(
                "save", "window", "rank", "step", "start_ns", "dur_ns", "call", "bytes"
            ),
            claim="Checkpoints have no checksums, so that corrupted shards load without an error",
        )


@dataclass(frozen=True)
class SeveralWriters(Rule):
    """Checkpoint files that several ranks write.

    What it does: reports saves by torch.save or safetensors in which more than one rank writes to the same path.

    Why it costs: storage receives the same bytes several times, and on a shared file system the last writer wins, or
    the file is a mixture of all.

    How it is measured: the same path in the checkpoint logs of several ranks, in one save.

    How to fix: let one rank write replicated state.

    Blind spots: needs the checkpoint logs of all ranks. One path may mean different files on different nodes; ranks
    that write the same state to separate files are not seen.
    """

    code: ClassVar[str] = "CKPT017"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves,)

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all such files."""
        duplicates = run.table(saves.duplicate_files)
        if duplicates.is_empty():
            return
        row = largest_first(duplicates, "repeated_bytes", "path").row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{row['ranks']} ranks write the same file ({row['save']}): {units.size(row['repeated_bytes'] or 0)} of "
            f"{units.size(row['bytes'] or 0)} are written more than once.",
            "Save on one rank (if dist.get_rank() == 0), then dist.barrier(). Or use dcp.save, which writes replicated "
            "tensors once.",
            confidence=0.7,
            ranks=run.ranks,
            steps=distinct(duplicates, "step"),
            evidence=duplicates.head(_EVIDENCE_ROWS),
            claim="Several ranks write the same file of a checkpoint",
        )
