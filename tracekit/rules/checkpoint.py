"""Rules on checkpoint saves that block training, and on background saves that slow it down."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages, saves, stalls
from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.analysis.time import breakdown
from tracekit.model import intervals, units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.host import CHECKPOINT
from tracekit.rules.host import io_sentence
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, median_row

_EVIDENCE_ROWS = 60
_FIXES = {
    conventions.PLAN: "Cache plans with DefaultSavePlanner(enable_plan_caching=True), and save a sharded state dict: "
    "building it counts as planning.",
    conventions.STAGE: "Reuse pinned staging memory: DefaultStager(StagingOptions(use_pinned_memory=True)) as "
    "async_stager.",
    conventions.SERIALIZE: "Save fewer, larger tensors with more threads: FileSystemWriter(thread_count=…).",
    conventions.WRITE: "Write to faster storage, or spread the shards over more writers.",
    conventions.FSYNC: "Sync fewer files: FileSystemWriter(single_file_per_rank=True); sync_files=False gives up "
    "durability.",
    conventions.FINISH: "Write less metadata: fewer, larger tensors.",
}
_BACKGROUND_FIX = "Save in the background with dcp.async_save."


@dataclass(frozen=True)
class BlockingCheckpoint(Rule):
    """Checkpoint saves that block the training thread.

    What it does: reports how long saves block training, which rank and stage the others wait for, and the share of the
    time between saves.

    Why it costs: every rank waits while a blocking save runs; checkpoints should take less than 5% of the
    time.

    How it is measured: from the checkpoint log: the total of all saves after one step, the longest over the ranks,
    relative to the training time between saves in the metrics log. The message has the medians of all saves, and breaks
    down the save next to the median (of several after one step, the longest). Ranks meet after planning, after writing
    and at the end. Between two meetings, the rank with most work of its own is the one the others wait for (waiting is
    not work), and its longest stage is reported.
    Without a log, spans of the trace that are named like saves (record_function annotations, or functions in traces
    with stacks) count: what their steps take longer than the others, at least the device's idle time in them, as a
    share of the profiled steps. The message says if a save may be rare.

    How to fix: save asynchronously with pinned staging; then fix the reported stage.

    Blind spots: stages need the checkpoint log of tracekit.capture; from spans alone neither stages nor, with fewer
    than two saves in the trace, the share of the whole training are known. With a single logged save, the interval is
    the number of steps of this run before it. Files that torch.save and safetensors write after one step into one
    folder are one save. Saves of several kinds at different intervals are treated as one kind.
    """

    code: ClassVar[str] = "CKPT001"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        save_stages.saves,
        save_stages.step_times,
        save_stages.save_spans,
        breakdown.by_step,
        host_stalls.io_calls,
        workload.marks,
    )

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run without a manifest, a checkpoint log and save spans cannot be judged."""
        if run.manifest or run.table(save_stages.saves).height or run.table(save_stages.save_spans).height:
            return None
        if workload.program(run) is Program.OTHER:
            return "saves were not judged, because the recording has no range that is named like a save."
        return (
            "saves were not judged, because the run has no checkpoint log and no span that is named like a save; "
            "record saves with tracekit.capture.record_save."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all blocking saves of the run."""
        logged = run.table(saves.stages).filter("blocking").drop("checkpoint").rename({"save": "checkpoint"})
        moved = pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()).alias("bytes")
        # One row per save that blocked training, rank and stage.
        stages = logged.group_by("window", "rank", "checkpoint", "stage", maintain_order=True).agg(
            pl.col("step", "start_ns").min(), pl.col("dur_ns").sum(), moved
        )
        if stages.filter(pl.col("stage") == conventions.TOTAL).height:
            yield self._by_log(run, stages)
        elif run.table(save_stages.save_spans).height:
            yield self._by_spans(run)

    def _by_log(self, run: Run, stages: pl.DataFrame) -> Finding:
        totals = largest_first(stages.filter(pl.col("stage") == conventions.TOTAL), "dur_ns", "rank")
        longest = totals.unique("checkpoint", keep="first", maintain_order=True).sort("start_ns")  # of each save
        blocking = run.table(saves.by_save).filter(pl.col("save").is_in(longest["checkpoint"].to_list()))
        after_steps = saves.by_training_step(blocking, run.table(saves.by_rank))
        median_save = median_row(after_steps, "blocked_ns", "start_ns")
        (quoted,) = longest.filter(pl.col("checkpoint") == median_save["save"]).iter_rows(named=True)
        quoted_stages = stages.filter(pl.col("checkpoint") == quoted["checkpoint"])
        path = stalls.critical_path(quoted_stages)
        critical = path.row(0, named=True) if path.height else {}
        median = saves.median_cost(run)
        blocked_ns, steps = median["blocked_ns"] or 0.0, median["interval_steps"]
        is_known, overhead = median["overhead_ratio"] is not None, median["overhead_ratio"] or 0.0
        over = f", {units.share(overhead)} of training time" if is_known else ""
        other_saves = median_save["saves"] - 1
        more = f" and {other_saves} more after that step" if other_saves else ""
        quoted_save = f"{median_save['save']}{more}"
        saved_often = median["saves"] > 1
        which = f"median of {median['saves']} saves" if saved_often else quoted_save
        stage = _slowest_stage(critical, quoted_stages, quoted_save if saved_often else "")
        # Of a save that dcp.async_save made already, only the longest stage can be shorter.
        logged = run.table(saves.stages).filter(pl.col("save") == quoted["checkpoint"])
        is_background = logged.filter(~pl.col("blocking") | (pl.col("call") == "dcp.async_save")).height > 0
        fixes = ([] if is_background else [_BACKGROUND_FIX]) + ([_FIXES[critical["stage"]]] if critical else [])
        rank = critical.get("rank", quoted["rank"])
        of_rank = quoted_stages.filter(pl.col("stage") == conventions.TOTAL, pl.col("rank") == rank)
        io_calls = io_sentence(run, rank, intervals.from_table(of_rank), "the save")
        return Finding(
            self.code,
            Severity.WARNING,
            f"A checkpoint blocks training for {units.duration(blocked_ns)}{over} ({which}){stage}{io_calls}",
            " ".join(fixes) or "Wait for the future of dcp.async_save only before the next save.",
            impact=overhead,
            is_of_training=True,
            cost_ns=int(blocked_ns / steps) if steps else 0,
            confidence=0.9 if is_known else 0.6,
            ranks=(critical["rank"],) if critical else (quoted["rank"],),
            steps=distinct(longest, "step"),
            evidence=_evidence(stages, quoted_stages, quoted, critical),
            claim="Saving a checkpoint blocks training" + (f", longest in {critical['stage']}" if critical else ""),
        )

    def _by_spans(self, run: Run) -> Finding:
        spans, costs = run.table(save_stages.save_spans), run.table(save_stages.save_costs)
        by_rank = largest_first(spans.group_by("rank").agg(pl.col("dur_ns").sum()), "dur_ns", "rank")
        of_rank = pl.col("rank") == by_rank["rank"][0]
        rank_spans = spans.filter(of_rank).sort("start_ns")
        longest = largest_first(rank_spans, "dur_ns").row(0, named=True)
        lost_ns, window_ns, steps = (int(costs[name].sum()) for name in ("lost_ns", "window_ns", "steps"))
        share = min(1.0, lost_ns / window_ns) if window_ns else 0.0
        is_single = rank_spans.height == 1
        counted = "1 save" if is_single else f"{rank_spans.height} saves"
        block, take = ("blocks", "takes") if is_single else ("block", "take")
        of_steps = f" and {take} {units.share(share)} of the {steps} profiled steps" if share else ""
        parts = {name: int(rank_spans[column].sum()) for name, column in _SPAN_PARTS.items()}  # 0 if the trace has none
        part_texts = [f"{units.duration(ns)} {name}" for name, ns in parts.items() if ns]
        inside = f", of which {', '.join(part_texts)}" if part_texts else ""
        has_stacks = rank_spans["fsync_ns"].is_not_null().any()
        hidden = "serializing is" if has_stacks else "serializing, writing and syncing are"
        # One save does not show how often the run saves: the window may have been placed around it.
        often = rank_spans["step"].count() > 1
        return Finding(
            self.code,
            Severity.WARNING,
            f"{counted} in the trace of rank {longest['rank']} {block} training for "
            f"{units.duration(int(rank_spans['dur_ns'].sum()))}{of_steps}, by spans such as {longest['name']}"
            f"{inside} ({hidden} not in the trace)"
            + ("." if often else "; the trace does not show how often the run saves, so it may be rare.")
            + io_sentence(run, longest["rank"], intervals.from_table(rank_spans), "that time"),
            f"{_BACKGROUND_FIX} Record saves with tracekit.capture.record_save to measure the stages.",
            impact=share,
            cost_ns=lost_ns // steps if steps else 0,
            confidence=0.6 if often else 0.5,
            ranks=distinct(spans, "rank"),
            steps=distinct(spans, "step"),
            evidence=pl.concat([rank_spans, spans.filter(~of_rank)]).head(_EVIDENCE_ROWS),
            what_if=WhatIf(CHECKPOINT, 0.0) if rank_spans["idle_ns"].is_not_null().any() else None,
            claim=f"Saving a checkpoint blocks training on rank {longest['rank']}",
        )


_SPAN_PARTS = {
    "copying from the device": "copied_ns",
    "in collectives": "collective_ns",
    "writing": "write_ns",
    "in fsync": "fsync_ns",
}


def _slowest_stage(critical: dict[str, Any], stages: pl.DataFrame, save: str) -> str:
    """Sentence on the longest stage; `save` is the name of the save that it is of, '' where that was said."""
    if not critical:
        return "."
    longest = f". In {save}, the longest stage" if save else ". The longest stage"
    stage_ns, leg_ns = critical["dur_ns"], critical["leg_ns"]
    share = f" ({units.share(stage_ns / leg_ns)} of its work)" if leg_ns > stage_ns else ""
    waits = stages.filter(pl.col("stage") == conventions.WAIT, pl.col("rank") != critical["rank"])
    wait = largest_first(waits, "dur_ns", "rank").head(1)
    waiting = [f"; rank {r} waits {units.duration(ns)} in total" for r, ns in wait.select("rank", "dur_ns").rows()]
    return (
        f"{longest} is {critical['stage']} on rank {critical['rank']}, "
        f"{units.duration(stage_ns)}{share}{''.join(waiting)}."
    )


def _evidence(
    stages: pl.DataFrame, quoted_stages: pl.DataFrame, quoted: dict[str, Any], critical: dict[str, Any]
) -> pl.DataFrame:
    """Return the quoted total, the longest stage, the rest of that save, then the other saves."""
    is_total = (pl.col("rank") == quoted["rank"]) & (pl.col("stage") == conventions.TOTAL)
    slowest = (pl.col("rank") == critical.get("rank", -1)) & (pl.col("stage") == critical.get("stage", ""))
    first = pl.when(is_total).then(0).when(slowest).then(1).otherwise(2)
    other_stages = stages.filter(pl.col("checkpoint") != quoted["checkpoint"])
    order = ("rank", "start_ns", "stage")
    rows = pl.concat([quoted_stages.sort(first, *order), other_stages.sort("checkpoint", *order)])
    return rows.head(_EVIDENCE_ROWS)


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
        claim=f"A background save slows the steps of {units.numbers('rank', distinct(slow_saves, 'rank'))}",
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
            evidence=_stages_of_save(run, row["save"]),
            subject="staging",
            claim="The call of a background save blocks training" + (f", in {part['kind']}" if part else ""),
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
            evidence=_stages_of_save(run, row["save"]),
            subject="upload",
            claim="Saves start before the upload of the previous save ends",
        )


def _stages_of_save(run: Run, save: str) -> pl.DataFrame:
    save_stages = run.table(saves.stages).filter(pl.col("save") == save)
    return save_stages.sort(~pl.col("blocking"), "rank", "start_ns", "stage").drop("whole_bytes").head(_EVIDENCE_ROWS)
