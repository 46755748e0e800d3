"""Rules on background saves that slow down or block training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages, saves, stalls
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first, median_row

_EVIDENCE_ROWS = 60
# Run delay, as a share of the save, below which the scheduler is no cause.
_DELAYED_RATIO = 0.1


def _slowdowns(run: Run) -> pl.DataFrame:
    """Return `saves.background_slowdown`, the largest loss first.

    More columns: the loss as a share of the steps during the save (slowdown_ratio) and of the interval (impact), and
    whether run delay explains it (delayed).
    """
    intervals = run.table(saves.by_save).select("save", "interval_ns", "interval_steps")
    lost, undisturbed = pl.col("lost_ns"), pl.col("steps") * pl.col("baseline_step_ns")
    return (
        run.table(saves.background_slowdown)
        .join(intervals, on="save", how="left", maintain_order="left")
        .with_columns(
            (lost / undisturbed).alias("slowdown_ratio"),
            (lost / (pl.col("interval_ns") + lost)).fill_null(0.0).clip(0, 1).alias("impact"),
            ((pl.col("delayed_ratio") > pl.col("waited_ratio")) & (pl.col("delayed_ratio") > _DELAYED_RATIO))
            .fill_null(value=False)
            .alias("delayed"),
        )
        .pipe(largest_first, "lost_ns", "rank")
    )


def _finding(rule: Rule, slow_saves: pl.DataFrame, reason: str, fix: str, *, confidence: float) -> Finding:
    """Return a finding on the rank that lost most; `reason` is the end of the message."""
    row = slow_saves.row(0, named=True)
    return Finding(
        rule.code,
        Severity.WARNING,
        f"A background save slows concurrent steps by {units.share(row['slowdown_ratio'])} "
        f"({row['save']}, {units.duration(row['lost_ns'])} in {row['steps']} steps of rank {row['rank']}). {reason}",
        fix,
        impact=row["impact"],
        is_of_training=True,
        cost_ns=round(row["lost_ns"] / row["interval_steps"]) if row["interval_steps"] else 0,
        confidence=confidence,
        ranks=distinct(slow_saves, "rank"),
        steps=distinct(slow_saves, "step"),
        evidence=slow_saves.head(_EVIDENCE_ROWS),
    )


@dataclass(frozen=True)
class GilContention(Rule):
    """Background saves that hold the GIL while training needs it.

    What it does: reports saves by a thread of the training process that mostly run Python code, and during which steps
    take longer by `max_slowdown_ratio`. Saves with less than `min_python_ms` of Python are left out.

    Why it costs: a thread that plans, fetches and pickles holds the global interpreter lock (GIL), and the training
    thread, which launches the kernels, waits for it.

    How it is measured: steps that ran during the save, compared with the median of the others; the save's stages plan,
    stage and serialize as a share of its length; and, if the log has the counters of the training thread, its time
    neither running nor waiting for a core. If it lacked a core for longer than that, this is reported only from
    `min_waited_ratio` of the save on, with lower confidence, together with CKPT010.

    How to fix: save in a separate process.

    Blind spots: needs the checkpoint and the metrics log. No counter measures the wait for the GIL itself: a training
    thread that waits for its device or for other ranks looks the same, so this is reported only if steps slow down.
    """

    code: ClassVar[str] = "CKPT009"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)
    max_slowdown_ratio: float = 0.1
    min_python_ms: int = 500
    min_waited_ratio: float = 0.08

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all such saves."""
        python = pl.col("python_ns")
        in_process = pl.col("worker").fill_null(conventions.THREAD) != conventions.PROCESS
        slow_saves = _slowdowns(run).filter(
            in_process,
            ~pl.col("delayed") | (pl.col("waited_ratio") >= self.min_waited_ratio),
            pl.col("slowdown_ratio") > self.max_slowdown_ratio,
            (python >= self.min_python_ms * 1_000_000) & (python > 0.5 * pl.col("dur_ns")),
        )
        if slow_saves.is_empty():
            return
        row = slow_saves.row(0, named=True)
        waited = row["waited_ratio"]
        share = "" if waited is None else f"; the training thread is blocked for {units.share(waited)} of it"
        yield _finding(
            self,
            slow_saves,
            f"{units.share(row['python_ns'] / row['dur_ns'])} of its {units.duration(row['dur_ns'])} is Python code in "
            f"the training process, which needs the GIL{share}.",
            "Save in a separate process: dcp.async_save(…, async_checkpointer_type=AsyncCheckpointerType.PROCESS). "
            "Fewer, larger tensors also need the GIL for less time.",
            confidence=0.5 if waited is None or row["delayed"] else 0.8,
        )


@dataclass(frozen=True)
class CpuStarvation(Rule):
    """Background saves during which training gets too few CPU cores.

    What it does: reports saves during which steps take longer by `max_slowdown_ratio` while the training thread was
    ready to run but did not run, for longer than it waited for anything else. Losses below `min_lost_ms` are left out.

    Why it costs: a thread that launches kernels and gets no core leaves the device idle.

    How it is measured: the run delay of the training thread during the save, measured by the system's scheduler; the
    mean slowdown alone does not distinguish it from waiting for the GIL.

    How to fix: leave CPU cores free, or pin the save to separate ones.

    Blind spots: needs the checkpoint and the metrics log, of dcp.async_save on Linux. The log does not show which
    processes take the cores.
    """

    code: ClassVar[str] = "CKPT010"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)
    max_slowdown_ratio: float = 0.1
    min_lost_ms: int = 100

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all such saves."""
        slow_saves = _slowdowns(run).filter(
            pl.col("delayed"),
            pl.col("slowdown_ratio") > self.max_slowdown_ratio,
            pl.col("lost_ns") >= self.min_lost_ms * 1_000_000,
        )
        if slow_saves.is_empty():
            return
        yield _finding(
            self,
            slow_saves,
            "The training thread was ready to run but got no CPU core for "
            f"{units.share(slow_saves['delayed_ratio'][0])} of the save.",
            "Give each rank more CPU cores (--cpus-per-task), or use fewer DataLoader workers and a lower "
            "OMP_NUM_THREADS. Pin the save to separate cores with os.sched_setaffinity.",
            confidence=0.8,
        )


@dataclass(frozen=True)
class BlockingBackgroundSave(Rule):
    """Background saves that block training.

    What it does: reports asynchronous saves whose call blocks for `min_blocked_ms` or longer and more than
    `max_overhead_ratio` of the time, and saves that start within `max_slack_ratio` of an upload's length after the
    previous one ended: training waited for it.

    Why it costs: a save that should overlap with training stops every rank.

    How it is measured: for the call, the stages of the training thread; for the upload, the end of all background work
    of a save compared with the start of the next such save after another step, and the time between their starts
    compared with that of as many undisturbed steps.

    How to fix: stage asynchronously into reused pinned memory; save at longer intervals than an upload takes.

    Blind spots: needs the checkpoint log. That a loop waits for an upload before the next save is inferred from times
    alone.
    """

    code: ClassVar[str] = "CKPT011"
    facts: ClassVar[tuple[TraceFact, ...]] = (save_stages.saves, save_stages.step_times)
    max_overhead_ratio: float = 0.05
    min_blocked_ms: int = 250
    max_slack_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield a finding for calls that block, and one for uploads that end too late."""
        background = run.table(saves.by_save).filter("background")
        long = pl.col("blocked_ns") >= self.min_blocked_ms * 1_000_000
        costly = (pl.col("overhead_ratio") > self.max_overhead_ratio).fill_null(value=True)
        blocking = background.filter(long, costly)
        if blocking.height:
            yield self._blocking_call(run, blocking)
        late = background.filter(
            # Several saves of one step are not too frequent saves.
            pl.col("step").diff().ne(0).fill_null(value=True),
            pl.col("slack_ns") < self.max_slack_ratio * pl.col("previous_written_ns"),
            pl.col("previous_written_ns") >= self.min_blocked_ms * 1_000_000,
        )
        if late.height:
            yield self._unfinished_upload(run, late)

    def _blocking_call(self, run: Run, rows: pl.DataFrame) -> Finding:
        row = median_row(rows, "blocked_ns", "save")
        of_save = (pl.col("save") == row["save"]) & (pl.col("clock") == stalls.BLOCKED)
        part = next(run.table(stalls.parts).filter(of_save).iter_rows(named=True), None)
        longest = (
            f", most of it {part['kind']}, {units.duration(part['dur_ns'])} on rank {part['rank']}" if part else ""
        )
        return Finding(
            self.code,
            Severity.WARNING if row["overhead_ratio"] is not None else Severity.INFO,
            f"The call of a background save blocks training for {units.duration(row['blocked_ns'])} "
            f"({row['save']}, complete after {units.duration(row['written_ns'])}){longest}.",
            "Stage asynchronously into reused pinned memory: one DefaultStager(StagingOptions(use_pinned_memory=True, "
            "use_async_staging=True)) for all saves, as async_stager of dcp.async_save.",
            impact=row["overhead_ratio"] or 0.0,
            is_of_training=True,
            cost_ns=round(row["blocked_ns"] / row["interval_steps"]) if row["interval_steps"] else 0,
            confidence=0.9 if part else 0.6,
            ranks=(part["rank"],) if part else (),
            steps=distinct(rows, "step"),
            evidence=_evidence(run, row["save"]),
            subject="staging",
        )

    def _unfinished_upload(self, run: Run, rows: pl.DataFrame) -> Finding:
        row = median_row(rows, "previous_written_ns", "save")
        between, plain = row["start_interval_ns"], row["interval_ns"]
        lost_ns = max(0, between - plain) if row["interval_steps"] and plain else 0
        return Finding(
            self.code,
            Severity.WARNING,
            f"{rows.height} {'saves start' if rows.height > 1 else 'save starts'} while the previous upload runs or "
            f"has just ended: the upload takes {units.duration(row['previous_written_ns'])}, and saves come every "
            f"{units.duration(between)} ({row['save']}).",
            "Save at longer intervals than an upload takes, or make the upload faster (local disk first, more "
            "writers). Wait for the future of dcp.async_save only before the next save.",
            impact=min(1.0, lost_ns / between) if between > 0 else 0.0,
            is_of_training=True,
            cost_ns=round(lost_ns / row["interval_steps"]) if row["interval_steps"] else 0,
            confidence=0.7,
            ranks=run.ranks,
            steps=distinct(rows, "step"),
            evidence=_evidence(run, row["save"]),
            subject="upload",
        )


def _evidence(run: Run, save: str) -> pl.DataFrame:
    save_stages = run.table(saves.stages).filter(pl.col("save") == save)
    return save_stages.sort(~pl.col("blocking"), "rank", "start_ns", "stage").drop("whole_bytes").head(_EVIDENCE_ROWS)
