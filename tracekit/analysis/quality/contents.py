"""Contents of each trace, and what was not recorded: the consequence, and how to record it."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.memory import snapshot_files
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.model import environment, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

COLUMNS = schema.columns(
    "on_device steps first_step last_step span_ns activities linked phased ops operators shaped stacked collectives "
    "sized sent received grouped sequenced syncs allocations totals checkpoints metrics step_times",
    on_device=pl.Boolean,
)
MISSING_COLUMNS: dict[str, pl.DataType | type[pl.DataType]] = {
    "missing": pl.String, "ranks": pl.List(pl.Int64), "consequence": pl.String, "how_to_record": pl.String,
}  # fmt: skip


@trace_fact
def contents(trace: Trace) -> pl.DataFrame:
    """Number of rows of each kind in a trace. Columns COLUMNS; one row.

    span_ns is from the first activity's start to the last one's end. Counts: activities, linked (with a launch), phased
    (launched in a known phase); ops, operators among them, shaped (with input shapes), stacked (Python frames);
    collectives, sized (sent or received), sent, received (with that size), grouped (of a group whose ranks are known),
    sequenced (with a number within the group); allocations, totals (those that state all allocated bytes); metrics,
    step_times among them; and rows of the other tables.
    """
    work, ops, calls = trace.activities, trace.ops, trace.collectives
    steps = trace.steps["step"].drop_nulls()
    known_groups = trace.groups.filter(pl.col("ranks").list.len() > 0)["group"]
    start_ns, end_ns = work["start_ns"].min(), (work["start_ns"] + work["dur_ns"]).max()
    row = {
        "on_device": trace.on_device,
        "steps": steps.n_unique(),
        "first_step": steps.min(),
        "last_step": steps.max(),
        "span_ns": None if work.is_empty() else int(str(end_ns)) - int(str(start_ns)),
        "activities": work.height,
        "linked": work["launch_id"].count(),
        "phased": work["phase"].count(),
        "ops": ops.height,
        "operators": int((ops["kind"] == "cpu_op").sum()),
        "shaped": ops["shapes"].count(),
        "stacked": int((ops["kind"] == "python").sum()),
        "collectives": calls.height,
        "sized": calls.select(pl.max_horizontal("sent_bytes", "received_bytes").count()).item(),
        "sent": calls["sent_bytes"].count(),
        "received": calls["received_bytes"].count(),
        "grouped": int(calls["group"].is_in(known_groups.implode()).sum()),
        "sequenced": calls["seq"].count(),
        "totals": trace.allocations["allocated_bytes"].count(),
        "step_times": int((trace.metrics["name"] == conventions.STEP_TIME_METRIC).sum()),
        **{name: getattr(trace, name).height for name in ("syncs", "allocations", "checkpoints", "metrics")},
    }
    return pl.DataFrame([row], schema=COLUMNS)


FACTS: tuple[TraceFact, ...] = (contents, workload.marks)
"""The facts that the run tables of this module read."""

_CONSEQUENCES = {
    "steps": (
        pl.lit(value=True),
        "No step times, no variation over steps, no representative step.",
        "profiler.step() once per training step, or tracekit record",
    ),
    "linked": (
        pl.col("on_device") & (pl.col("activities") > 0),
        "Step, phase and cause of device work are unknown.",
        "ProfilerActivity.CPU, which records operators and launches",
    ),
    "operators": (
        pl.lit(value=True),
        "Time of the host in operators counts as time in Python, and phases are unknown.",
        "ProfilerActivity.CPU",
    ),
    "phased": (
        pl.lit(value=True),
        "Forward, backward and optimizer cannot be separated.",
        'record_function("tracekit::forward") around each phase, or tracekit record',
    ),
    "shaped": (
        pl.lit(value=True),
        "GEMMs with the same kernel name cannot be distinguished, and FLOPs are not counted.",
        "record_shapes=True",
    ),
    "stacked": (pl.lit(value=True), "The code location that launched an op is unknown.", "with_stack=True"),
    "sized": (
        pl.col("collectives") > 0,
        "No bandwidth, and messages of different sizes cannot be distinguished.",
        "PyTorch 2.2 or newer for NCCL; record_shapes=True for gloo",
    ),
    "sent": (
        pl.col("sized") > 0,
        "Bandwidths are those of what collectives receive.",
        "PyTorch 2.2 or newer for NCCL; record_shapes=True for gloo",
    ),
    "received": (
        pl.col("sized") > 0,
        "Bandwidths are those of what collectives send.",
        "PyTorch 2.2 or newer for NCCL; record_shapes=True for gloo",
    ),
    "grouped": (
        pl.col("collectives") > 0,
        "Process groups and their ranks are inferred from what ranks do together.",
        "PyTorch 2.2 or newer, with torch.distributed initialized before the profiler starts",
    ),
    "sequenced": (
        pl.col("collectives") > 0,
        "Collectives of different ranks are matched by order.",
        "PyTorch 2.7 or newer, which numbers the collectives of a group",
    ),
    "syncs": (
        pl.col("on_device"),
        "The events that streams wait for are inferred from times.",
        "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True)",
    ),
    "allocations": (pl.lit(value=True), "Memory usage over time is unknown.", "profile_memory=True"),
    "totals": (
        pl.col("allocations") > 0,
        "Memory that was allocated before the recording is not counted.",
        "PyTorch 1.11 or newer",
    ),
    "checkpoints": (
        pl.lit(value=True),
        "Checkpoint saves and loads are not recognized.",
        "tracekit record, or tracekit.capture.record_save around a save",
    ),
    "metrics": (
        pl.lit(value=True),
        "Loss, tokens and step times outside the profiled steps are unknown.",
        "tracekit record, or tracekit.capture.Recorder in the loop",
    ),
    "step_times": (
        pl.col("metrics") > 0,
        "Step times outside the profiled steps are unknown: saves are compared with profiled steps.",
        "step_time_ns in each line of the metrics log",
    ),
}
_LABELS = {
    "steps": "steps", "linked": "launches", "operators": "operators", "phased": "phases", "shaped": "input shapes",
    "stacked": "Python stacks", "sized": "message sizes",
    "sent": "sizes of sent messages", "received": "sizes of received messages", "grouped": "process groups",
    "sequenced": "collective sequence numbers", "syncs": "synchronization events", "allocations": "memory events",
    "totals": "allocated bytes", "checkpoints": "checkpoint log", "metrics": "metrics log", "step_times": "step times",
}  # fmt: skip


_WITHOUT_PYTORCH = {
    "steps": "an NVTX range around each iteration, or --step-name with the name of such a range",
    "linked": "nsys profile --trace cuda, or rocprofv3 --sys-trace: calls of the runtime as well as kernels",
}
"""How to record, in programs without PyTorch, what they can have."""


@run_fact
def missing(run: Run) -> pl.DataFrame:
    """Data that some ranks did not record at all; use ``run.table``.

    Columns missing, ranks (that lack it), consequence (what remains unknown), how_to_record.
    """
    table = run.table(contents)
    if workload.program(run) is Program.OTHER:
        rows = [
            (_LABELS[name], ranks, _CONSEQUENCES[name][1], how_to_record)
            for name, how_to_record in _WITHOUT_PYTORCH.items()
            if (ranks := _ranks_without(table, name))
        ]
        return pl.DataFrame(rows, schema=MISSING_COLUMNS, orient="row")
    rows = [
        (_LABELS[name], ranks, consequence, how_to_record)
        for name, (_, consequence, how_to_record) in _CONSEQUENCES.items()
        if (ranks := _ranks_without(table, name))
    ]
    with_snapshot = {file.rank for file in snapshot_files.files(run)}
    on_device = table.filter("on_device")["rank"].unique().sort().to_list()
    if lack := [rank for rank in on_device if rank not in with_snapshot]:
        consequence = "No memory map of the device; allocator settings can be replayed by inference only."
        rows.append(("memory snapshot", lack, consequence, "tracekit record --memory-snapshot, or _dump_snapshot"))
    communicating = table.filter(pl.col("collectives") > 0)["rank"].unique().sort().to_list()
    if communicating and environment.stated_rank_count(run) is None:
        consequence = "Whether ranks have no trace is not known; a collective without a peer may wait for it."
        how_to_record = "torch.distributed initialized before the profiler starts, or tracekit record"
        rows.append(("number of ranks", communicating, consequence, how_to_record))
    return pl.DataFrame(rows, schema=MISSING_COLUMNS, orient="row")


def _ranks_without(table: pl.DataFrame, name: str) -> list[int]:
    """Ranks that recorded none of what column `name` of `contents` counts, although it applies to them."""
    return table.filter(_CONSEQUENCES[name][0], pl.col(name) == 0)["rank"].unique().sort().to_list()
