"""Contents of each trace, and what was not recorded: the consequence, and how to record it."""

import polars as pl

from tracekit.analysis.memory import snapshot_files
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

COLUMNS = schema.columns(
    "on_device steps first_step last_step span_ns activities linked phased ops shaped stacked collectives sized "
    "grouped sequenced syncs allocations checkpoints metrics",
    on_device=pl.Boolean,
)
MISSING_COLUMNS: dict[str, pl.DataType | type[pl.DataType]] = {
    "missing": pl.String, "ranks": pl.List(pl.Int64), "consequence": pl.String, "how_to_record": pl.String,
}  # fmt: skip


@trace_fact
def contents(trace: Trace) -> pl.DataFrame:
    """Number of rows of each kind in a trace. Columns COLUMNS; one row.

    span_ns is from the first activity's start to the last one's end. Counts: activities, linked (with a launch), phased
    (launched in a known phase); ops, shaped (with input shapes), stacked (Python frames); collectives, sized, grouped
    (of a known group), sequenced (with a number within the group); and rows of the other tables.
    """
    work, ops, calls = trace.activities, trace.ops, trace.collectives
    steps = trace.steps["step"].drop_nulls()
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
        "shaped": ops["shapes"].count(),
        "stacked": int((ops["kind"] == "python").sum()),
        "collectives": calls.height,
        "sized": calls.select(pl.max_horizontal("sent_bytes", "received_bytes").count()).item(),
        "grouped": calls["group"].count(),
        "sequenced": calls["seq"].count(),
        **{name: getattr(trace, name).height for name in ("syncs", "allocations", "checkpoints", "metrics")},
    }
    return pl.DataFrame([row], schema=COLUMNS)


FACTS: tuple[TraceFact, ...] = (contents,)
"""The facts that the run tables of this module read."""

_CONSEQUENCES = {
    "steps": (
        pl.lit(value=True),
        "No step times, no variation over steps, no representative step.",
        "profiler.step() once per training step, or tracekit record",
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
}
_LABELS = {
    "steps": "steps", "phased": "phases", "shaped": "input shapes", "stacked": "Python stacks",
    "sized": "message sizes", "sequenced": "collective sequence numbers", "syncs": "synchronization events",
    "allocations": "memory events", "checkpoints": "checkpoint log", "metrics": "metrics log",
}  # fmt: skip


@run_fact
def missing(run: Run) -> pl.DataFrame:
    """Data that some ranks did not record at all; use ``run.table``.

    Columns missing, ranks (that lack it), consequence (what remains unknown), how_to_record.
    """
    table = run.table(contents)
    rows = []
    for name, (applies, consequence, how_to_record) in _CONSEQUENCES.items():
        ranks = table.filter(applies, pl.col(name) == 0)["rank"].unique().sort().to_list()
        if ranks:
            rows.append((_LABELS[name], ranks, consequence, how_to_record))
    with_snapshot = {file.rank for file in snapshot_files.files(run)}
    on_device = table.filter("on_device")["rank"].unique().sort().to_list()
    if lack := [rank for rank in on_device if rank not in with_snapshot]:
        consequence = "No memory map of the device; allocator settings can be replayed by inference only."
        rows.append(("memory snapshot", lack, consequence, "tracekit record --memory-snapshot, or _dump_snapshot"))
    return pl.DataFrame(rows, schema=MISSING_COLUMNS, orient="row")
