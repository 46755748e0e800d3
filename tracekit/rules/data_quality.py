"""The rule on data quality: which recordings can be trusted, and how far."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import polars as pl

from tracekit.analysis.host import host_phases
from tracekit.analysis.parallelism import outlier_steps, stragglers
from tracekit.analysis.quality import trace_quality, undecided_kernels
from tracekit.analysis.time import breakdown
from tracekit.model import environment, schema, units
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.trace import TraceFact
from tracekit.replay.allocator import run_snapshots
from tracekit.rules.advice import Advice, AnyProgramText
from tracekit.rules.host_phases import judged_phases
from tracekit.rules.outlier_steps import is_first_use
from tracekit.rules.rule import Finding, Rule, Severity, distinct
from tracekit.rules.stragglers import OccasionalStraggler
from tracekit.sync import alignment, collective_matching


class _Kind(NamedTuple):
    severity: Severity
    fix: str
    can_be_error: bool = False
    """Whether it becomes an error if more than `error_affected_ratio` of the data is affected."""


def _degrading(fix: str) -> _Kind:
    return _Kind(Severity.WARNING, fix, can_be_error=True)


_INFO, _WARNING, _ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
_RECORD_AGAIN = "Record that rank again, or copy its file again. "
_STEP = "Call profiler.step() once per training step, or record with tracekit.capture.Recorder."
_MARK_STEPS = Advice(
    f"{_STEP} Or name a span around each step (--step-name NAME).",
    "If there are iterations, name a span around each (--step-name NAME), or call profiler.step() once in each.",
    "If there are iterations, name a range around each (--step-name NAME), or call the ranges step 1, step 2, ….",
)
_STEP_KINDS = ("no_steps", "one_pass", "steps_from_optimizer", "steps_from_repetition")
_WARM_UP = (
    "Skip the first steps: schedule(wait=…, warmup=2, …), or Recorder(warmup=2). In this recording, use only the other "
    "steps."
)
_KINDS = {
    # Damaged or incomplete files.
    "damaged_archive": _degrading("Copy the archive again, or unpack it and name the folder."),
    "unreadable": _degrading(_RECORD_AGAIN + "The other ranks were judged without it."),
    "truncated": _degrading(_RECORD_AGAIN + "The events before the cut were judged."),
    "bad_times": _degrading("Record again with a newer PyTorch: events with invalid times were left out."),
    "bad_durations": _degrading("Record again with a newer PyTorch: events with wrong durations were left out."),
    "duration_unit": _Kind(
        _WARNING, "Write durations in µs, as times are: the unit was inferred from how slices nest."
    ),
    "device_times": _Kind(
        _ERROR, "Write times and durations of the device in µs and on the host's clock, as PyTorch's profiler does."
    ),
    "category_unit": _Kind(
        _WARNING, "Write all times in µs: the unit was inferred from where all other events of the recording lie."
    ),
    "time_unit": _Kind(_ERROR, "Write all times and durations in µs, as PyTorch's profiler does."),
    "unplaced_allocations": _degrading("Record with a newer PyTorch: events of the allocator state their device."),
    "unrecorded_collectives": _degrading(
        "Record with a backend whose collectives the profiler records, such as gloo, and keep its annotations: until "
        "then, waiting in these collectives counts as idle or compute."
    ),
    "duplicate_events": _Kind(
        _INFO, "No action needed: each event counts once. Write each trace to its own file, with one profiler."
    ),
    "damaged_events": _degrading(_RECORD_AGAIN + "The readable events were judged."),
    "repeated_events": _degrading("Write each trace to its own file: only the first one was judged."),
    "rankless_events": _degrading("Merge the ranks' files again so that each event names its rank."),
    "several_ranks": _Kind(_ERROR, "Pass one trace file per rank, or a folder with all of them."),
    "unmatched_pairs": _degrading("Stop the profiler after the profiled work has ended."),
    "part_of_run": _Kind(_INFO, "Export the run without --step to judge all of it."),
    "unknown_kinds": _degrading("Report this trace to tracekit's authors: the profiler that wrote it is unknown."),
    "unknown_device": _Kind(
        _INFO, "No action needed if the named processes are a device; else report this trace to tracekit's authors."
    ),
    "undecided_ending_together": _Kind(
        _WARNING, "Report the names to us; until then, add this time to the exposed communication of COMM001."
    ),
    "undecided_communication": _Kind(
        _INFO,
        "If these kernels exchange data between devices, more communication is exposed than reported: "
        "report their names to tracekit's authors.",
    ),
    "damaged_header": _Kind(_WARNING, _RECORD_AGAIN + "The rank was taken from the file name."),
    "stray_bytes": _Kind(
        _INFO,
        "Of a name only the marked characters are lost, of a key its value: record the trace again if it matters.",
    ),
    "bad_manifest": _Kind(_WARNING, "Write run.json again, or remove it: the traces alone are enough."),
    "bad_log": _Kind(_WARNING, "Check the lines in the evidence: their metrics or checkpoint stages are missing."),
    "growing_log": _Kind(
        _INFO, "If the training has ended, look in its output and the system's log for what killed this rank."
    ),
    "bad_companion": _Kind(
        _WARNING, "Record the named file again, or remove it: the profiler's trace was judged without the rest of it."
    ),
    "unmatched_companion": _Kind(
        _INFO, "Record both files in one process and window; put rank and number into the names, such as rank3."
    ),
    "not_a_trace": _Kind(_INFO, "No action needed: other JSON files in the folder were not read."),
    "unused_log": _Kind(_INFO, "Name the log, or its folder, to have it judged by itself."),
    # Which ranks there are.
    "missing_ranks": _Kind(
        _WARNING,
        "Collect the traces of all ranks in one folder. If the training is running, check again when they are written.",
    ),
    "partial": _Kind(_INFO, "Check again when the rank has written it. If the training has ended, remove the file."),
    "duplicate_rank": _Kind(_WARNING, "Keep one trace per rank and window, or put each window into its own folder."),
    "world_size": _Kind(
        _INFO,
        "Start all ranks with one WORLD_SIZE, as torchrun does, or correct distributedInfo in the files.",
    ),
    "rank_guessed": _Kind(_INFO, "Record with torch.distributed initialized, so that the trace states its rank."),
    "copied_rank": _Kind(
        _ERROR, "Copy the file of the rank that is missing: differences between these ranks mean nothing."
    ),
    "mixed_jobs": _Kind(
        _ERROR, "Pass the folder of one run, or several folders: check RUNS/*. Give each job its own folder."
    ),
    "roles": _Kind(_INFO, "No action needed: each role is judged as a run of its own, and compared by ROLE001."),
    "windows_assumed": _Kind(_INFO, "No action needed if these are windows of one job; else load each job separately."),
    "mixed_versions": _Kind(_WARNING, "Run all ranks with the same software on the same kind of device."),
    # What the profiler did not record.
    "profiler_diagnostic": _Kind(_WARNING, "Look the message up in the profiler's documentation; record again."),
    "no_work": _Kind(
        _ERROR,
        "Record with ProfilerActivity.CPU, and ProfilerActivity.CUDA where there is a device (nsys: --trace cuda).",
    ),
    "no_device_activity": _Kind(
        _ERROR, "Record with ProfilerActivity.CUDA (on AMD too), with no other profiler using CUPTI on the device."
    ),
    "no_host_activity": _degrading(
        "Record with ProfilerActivity.CPU and ProfilerActivity.CUDA in one profiler, and keep the events of category "
        "cuda_runtime where a tool filters events. Rules on the host were not judged."
    ),
    "no_launch_calls": _Kind(
        _INFO,
        "No action needed if the device's profiler cannot record launches: rules on them were not judged. Otherwise "
        "record the calls of its runtime, with numbers that its work states as correlation.",
    ),
    "unlaunched_device": _Kind(
        _INFO, "No action needed if that device's profiler cannot record launches: idle time of it has no known cause."
    ),
    "no_operators": _Kind(
        _ERROR, "Record with ProfilerActivity.CPU, and keep the events of category cpu_op where a tool filters events."
    ),
    schema.COLLECTIVES_ONLY: _Kind(
        _INFO, "For compute, memory and the host, record a window with the profiler: tracekit record -- python train.py"
    ),
    schema.COMPILED_PROGRAM: _Kind(
        _INFO, "No action needed: look for waits of the device in its idle time, and for the input in the host's lines."
    ),
    schema.SPANS_ONLY: _Kind(
        _INFO, "For operators, memory and the device, record a window with the profiler (torchtitan: enable_profiling)."
    ),
    schema.WRITE_TIMES: _Kind(
        _INFO,
        "For when each ran: NCCL_INSPECTOR_DUMP_VERBOSE=1 (NCCL Inspector), or record a window with the profiler.",
    ),
    "host_only": _Kind(_INFO, "If training ran on the device, record with ProfilerActivity.CUDA (on AMD too)."),
    "sampled": _Kind(
        _WARNING, "Use the complete trace: where launches are missing, an idle device says nothing about the host."
    ),
    "unnumbered_ops": _Kind(
        _INFO,
        "If a tool filtered the events, use the complete trace, or keep the argument External id of ops: idle time may "
        "be work that was not recorded.",
    ),
    "unmarked_steps": _Kind(_INFO, "No action needed, if each of these steps is between the others without a pause."),
    **dict.fromkeys(_STEP_KINDS, _Kind(_INFO, _MARK_STEPS.training)),
    "steps_from_ranges": _Kind(_INFO, AnyProgramText("If others are the steps, name their range (--step-name NAME).")),
    "iterations_differ": _Kind(_WARNING, "Compare ranks by collectives, not by step. " + _STEP),
    "unlinked": _degrading(
        "Call torch.cuda.synchronize() before the step that starts the recording, as tracekit record does: the host "
        "runs ahead of the device, so what it queued before, also in the profiler's warm-up, runs within the recording."
    ),
    "lost_launches": _degrading(
        "Profile fewer steps or without stacks and shapes: the profiler drops what it cannot store."
    ),
    "outside_steps": _degrading("Start and stop the profiler at step boundaries. " + _STEP),
    "dropped_events": _degrading("Profile fewer steps or without stacks and shapes, and synchronize before stopping."),
    "warm_up_inside": _Kind(_WARNING, _WARM_UP),
    "cut_step": _Kind(_WARNING, "Start and stop the profiler at step boundaries: schedule(…) with profiler.step()."),
    "unreadable_snapshot": _Kind(_WARNING, "Dump the snapshot again: torch.cuda.memory._dump_snapshot."),
    # Clocks and times.
    "clock_resolution": _Kind(
        _INFO, "Record with a newer PyTorch, which writes times relative to baseTimeNanoseconds."
    ),
    "clock_skew": _Kind(
        _INFO, "Ignore differences between ranks below the clock error; synchronize clocks with PTP or chrony."
    ),
    "clock_rate": _Kind(
        _ERROR, "Write the times of all ranks in the same unit, or load each of these ranks by itself."
    ),
    "device_clock": _degrading(
        "Update the driver and PyTorch and record again: device times are converted to the host's clock by the "
        "profiler. Until then, ignore launch delays and causes of idle time."
    ),
    "clock_unaligned": _Kind(_WARNING, "Profile the same steps on all ranks, with at least three shared collectives."),
    "overlapping_slices": _degrading("No action needed: overlapping time is counted once."),
}
_OTHER = _degrading("Check the evidence, and record again if it matters.")
_MEASURED = ("unlinked", "lost_launches", "outside_steps", "dropped_events", "overlapping_slices", "device_clock")
_LEAST_COPIED = 100
"""Activities: in short windows of simulated runs, ranks may have the same times by chance."""


@dataclass(frozen=True)
class DoubtfulTrace(Rule):
    """Recordings that can only be trusted in part.

    What it does: reports files that are unreadable or truncated, ranks that are missing, duplicated or different from
    the others, data that the profiler did not record (steps, device activity, launches, dropped events), steps that
    were recorded in part, warm-up inside the window, and clock errors; each with the share of time or data that it
    affects.

    Why it costs: a verdict on bad data leads to the wrong fix.

    How it is measured: while reading and aligning, and from the tables: device work without a launch or launched
    outside steps or by a call that begins 50 µs later, launches without device work, slices that overlap on one stream,
    ranks with the same times or with clocks whose rates differ by a factor of ten, a first step that takes more than
    twice the median of the others (unless single stalls make it long, which STEP001 reports), steps with only the
    optimizer or with backward ops whose forward ops are missing, versions and devices that differ between ranks. Shares
    below `min_affected_ratio` are not reported. There is one finding per kind; an issue that makes data unusable is an
    error if its share exceeds `error_affected_ratio`. Times of ranks whose file is truncated, or lacks most ops, and of
    cut steps are information in all rules.

    How to fix: record again; each finding states how.

    Blind spots: a well-formed trace with wrong content looks sound.
    """

    code: ClassVar[str] = "DATA001"
    fix_without_pytorch: ClassVar[str] = (
        "Record again, whole iterations on all ranks: nsys profile --trace cuda,nvtx,osrt."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        trace_quality.data_quality, environment.versions, trace_quality.recorded_times, breakdown.by_step,
        collective_matching.calls, undecided_kernels.undecided_kernels, *OccasionalStraggler.facts,
    )  # fmt: skip
    min_affected_ratio: float = 0.01
    error_affected_ratio: float = 0.5

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per kind of data-quality issue."""
        issues = pl.concat([
            RUN_DATA_QUALITY.conform(run.data_quality),
            RUN_DATA_QUALITY.conform(_measured_quality(run)),
            _mixed_versions(run.table(environment.versions)),
            alignment.data_quality(run),
            _copied_ranks(run.table(trace_quality.recorded_times)),
            undecided_kernels.data_quality(run),
            _unequal_iterations(run),
            run_snapshots.data_quality(run),
        ])  # fmt: skip
        issues = _with_size_of_cut(issues, run)
        small = pl.col("kind").is_in(_MEASURED) & (pl.col("affected_ratio") < self.min_affected_ratio)
        for (kind,), rows in issues.filter(~small).group_by("kind", maintain_order=True):
            yield self._finding(run, str(kind), rows.sort("affected_ratio", descending=True, nulls_last=True))

    def _finding(self, run: Run, kind: str, rows: pl.DataFrame) -> Finding:
        issue_kind = _KINDS.get(kind, _OTHER)
        ratio = float(rows["affected_ratio"][0] or 0)
        more = f" There are {rows.height:,} issues of this kind." if rows.height > 1 else ""
        message = str(rows["message"][0])
        affected = f" Affected: {units.share(ratio)}." if ratio and units.share(ratio) not in message else ""
        return Finding(
            self.code,
            _ERROR if issue_kind.can_be_error and ratio > self.error_affected_ratio else issue_kind.severity,
            message + affected + more,
            _MARK_STEPS.suited_to(run) if kind in _STEP_KINDS else issue_kind.fix,
            ranks=distinct(rows, "rank"),
            evidence=rows,
            subject=kind,
        )


def cause_order(finding: Finding) -> tuple[int, int]:
    """Key that sorts findings of this rule by severity, then those on files before what may follow from them."""
    kinds = list(_KINDS)
    return -finding.severity, kinds.index(finding.subject) if finding.subject in _KINDS else len(kinds)


def _with_size_of_cut(issues: pl.DataFrame, run: Run) -> pl.DataFrame:
    """Issues, of which those of truncated files begin with their size as a share of the whole files of other ranks.

    Unchanged where no other rank has a whole file: a file alone does not show how much it lacks.
    """
    cut_ranks = issues.filter(kind="truncated")["rank"].drop_nulls().unique()
    files = pl.DataFrame([(source.rank, source.size_bytes) for source in run.sources], ["rank", "bytes"], orient="row")
    by_rank = files.group_by("rank").agg(pl.col("bytes").sum())  # of all windows
    is_cut = pl.col("rank").is_in(cut_ranks.implode())
    whole_bytes = by_rank.filter(~is_cut)["bytes"].median()
    if cut_ranks.is_empty() or whole_bytes is None:
        return issues
    smaller = by_rank.filter(is_cut, pl.col("bytes") < whole_bytes)
    percent = (100 * pl.col("bytes") / whole_bytes).round().cast(pl.Int64)
    joined = issues.join(smaller.select("rank", percent=percent), on="rank", how="left", maintain_order="left")
    begin = pl.format("Truncated at about {}% of the size of whole files: ", "percent")
    is_known = (pl.col("kind") == "truncated") & pl.col("percent").is_not_null()
    message = pl.when(is_known).then(begin + pl.col("message").str.strip_prefix("Truncated: ")).otherwise("message")
    return joined.with_columns(message=message).drop("percent")


def _measured_quality(run: Run) -> pl.DataFrame:
    """Issues that traces show of their quality, without warm-up in windows whose first step is long for other reasons.

    STEP001 reports stalls that are no first use, HOST005 and HOST006 what recurs in later steps, RANK005 the additional
    work of one rank, such as an evaluation.
    """
    lengths = run.table(breakdown.by_step).drop_nulls("step")
    is_first = pl.col("step") == pl.col("step").min().over("window")
    firsts = lengths.filter(is_first).group_by("window", "step").agg(pl.col("duration_ns").median())
    medians = lengths.filter(~is_first).group_by("window").agg(pl.col("duration_ns").median().alias("median_ns"))
    # The device idles in gap_step; what the host launches late there may belong to the next step.
    stalled = run.table(outlier_steps.outlier_steps).filter(~is_first_use())
    recurring = run.table(host_phases.host_phases).filter(pl.col("phase").is_in(judged_phases(run, is_repeated=True)))
    of_ranks = recurring.group_by("window", "rank", "step").agg(pl.col("dur_ns").sum())
    in_phases = of_ranks.group_by("window", "step").agg(
        lost_ns=pl.col("dur_ns").max(), reference_ns=pl.lit(0, pl.Int64)
    )
    worked = run.table(stragglers.occasional_stragglers).filter(pl.col("ops_ratio") >= trace_quality.MORE_OPS_RATIO)
    columns = ("lost_ns", "reference_ns")
    events = pl.concat([
        stalled.select("window", *columns, step="gap_step"), worked.select("window", *columns, "step"),
        in_phases.select("window", *columns, "step"),
    ])  # fmt: skip
    stalls = firsts.join(events, on=["window", "step"])
    by_window = stalls.group_by("window").agg(
        pl.col("duration_ns").first(), pl.col("lost_ns").sum(), pl.col("reference_ns").max()
    )
    compared = by_window.join(medians, on="window", how="left")
    rest_ns = pl.col("duration_ns") - pl.col("lost_ns")
    usual_ns = pl.max_horizontal("reference_ns", "median_ns")
    explained = compared.filter(rest_ns <= trace_quality.WARM_UP_RATIO * usual_ns)["window"]
    is_explained = (pl.col("kind") == "warm_up_inside") & pl.col("window").is_in(explained.implode())
    return run.table(trace_quality.data_quality).filter(~is_explained)


def _unequal_iterations(run: Run) -> pl.DataFrame:
    """Return an issue if iterations were found by repetition, and not as many on all ranks of a window."""
    issues = run.table(trace_quality.data_quality).filter(pl.col("kind") == "steps_from_repetition")
    steps = run.table(breakdown.by_step).join(issues.select("window", "rank").unique(), on=["window", "rank"])
    counts = steps.group_by("window", "rank").agg(pl.col("step").n_unique().alias("iterations")).sort("window", "rank")
    usual = counts.with_columns(pl.col("iterations").mode().sort().last().over("window").alias("usual"))
    odd = usual.filter(pl.col("iterations") != pl.col("usual"))
    if odd.is_empty():
        return RUN_DATA_QUALITY.empty()
    first = odd.row(0, named=True)
    message = (
        f"{first['iterations']} iterations were found on rank {first['rank']} and {first['usual']} on most others: "
        "iterations with the same number may not correspond."
    )
    issue = (None, None, "iterations_differ", message, odd.height / counts.height)
    return pl.DataFrame([issue], schema=RUN_DATA_QUALITY.schema, orient="row")


def _copied_ranks(times: pl.DataFrame) -> pl.DataFrame:
    """Return an issue for each set of ranks of a window that have the same activities at the same times."""
    comparable = times.filter(pl.col("activities") >= _LEAST_COPIED)
    copies = (
        comparable.group_by("window", "activities", "times_hash")
        .agg(pl.col("rank").sort())
        .filter(pl.col("rank").list.len() > 1)
    )
    rows = []
    for window, ranks in copies.sort("window", pl.col("rank").list.first()).select("window", "rank").rows():
        message = (
            f"{units.numbers('Rank', ranks)} have the same activities at the same times, to the nanosecond: their "
            "files are copies of one recording."
        )
        rows.append((window, None, "copied_rank", message, len(ranks) / times.height))
    return pl.DataFrame(rows, schema=RUN_DATA_QUALITY.schema, orient="row")


def _mixed_versions(versions: pl.DataFrame) -> pl.DataFrame:
    """Return an issue for each header fact in which ranks differ, with the share of ranks that differ."""
    counts = versions.group_by("name", "value").agg(
        pl.col("rank").unique().sort(), pl.col("rank").n_unique().alias("n")
    )
    rows = []
    for (name,), values in counts.sort("n", "value", descending=[True, False]).group_by("name", maintain_order=True):
        if values.height == 1:
            continue
        differences = ", ".join(
            f"{value} on {units.numbers('rank', ranks)}" for value, ranks in values.select("value", "rank").rows()
        )
        share = 1 - values["n"][0] / values["n"].sum()
        rows.append((None, None, "mixed_versions", f"Ranks differ in {name}: {differences}.", share))
    return pl.DataFrame(rows, schema=RUN_DATA_QUALITY.schema, orient="row")
