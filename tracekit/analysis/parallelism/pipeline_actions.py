"""Actions of a pipeline schedule on one rank: which stage runs forward or backward of which micro-batch, and when.

Sources of names: torch.distributed.pipelining, schedules.py (`PP:<stage><action><micro-batch>` of every schedule that
the runtime executes, `Forward i` and `Backward i` of GPipe); Megatron-LM, core/pipeline_parallel/schedules.py
(forward_step, backward_step); DeepSpeed, runtime/pipe/engine.py (_exec_forward_pass, _exec_backward_pass).
"""

import polars as pl

from tracekit.analysis.time import breakdown, launched_work, trace_columns
from tracekit.conventions.strategies import CP, EP, TP, axis_of_description
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags
from tracekit.model.trace import Trace

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = COMPUTE_ACTIONS = (
    "forward", "backward", "input_gradient", "weight_gradient",
)  # fmt: skip
SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = TRANSFER_ACTIONS = (
    "send_forward", "receive_forward", "send_backward", "receive_backward",
)  # fmt: skip
_BY_CODE = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": INPUT_GRADIENT,
    "W": WEIGHT_GRADIENT,
    "SEND_F": SEND_FORWARD,
    "RECV_F": RECEIVE_FORWARD,
    "SEND_B": SEND_BACKWARD,
    "RECV_B": RECEIVE_BACKWARD,
    "Forward": FORWARD,
    "Backward": BACKWARD,
    "forward_step": FORWARD,
    "backward_step": BACKWARD,
    "forward-compute": FORWARD,
    "backward-compute": BACKWARD,
    "_exec_forward_pass": FORWARD,
    "_exec_backward_pass": BACKWARD,
}
POINT_TO_POINT = ("send", "recv", "send_recv")

ACTIONS = schema.table(
    "pipeline_actions",
    "action of the pipeline schedule: forward or backward of a micro-batch on a stage, or its send or receive",
    schema.column("step", "Training step."),
    schema.column("stage", "Stage of the pipeline as the span names it; null where the span does not."),
    schema.column("micro_batch", "Number of the micro-batch in the step."),
    schema.column(
        "action",
        "forward, backward, input_gradient, weight_gradient, send_forward, receive_forward, send_backward or "
        "receive_backward.",
        pl.String(),
    ),
    schema.column("start_ns", "Start: on a device of the first kernel of its layers in the span, else of the span."),
    schema.column("end_ns", "End: on a device of the last kernel of its layers in the span, else of the span."),
    schema.column("host_start_ns", "Start of the span on the host."),
    schema.column("host_end_ns", "End of the span on the host."),
    schema.column("source", "span (a schedule's span) or inferred (from sends, receives and phases).", pl.String()),
)

# [0-9], not \d: of other scripts, which \d matches too, Polars makes no integer.
_TORCH = r"^PP:(?P<stage>[0-9]{1,9})(?P<code>SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(?P<micro_batch>[0-9]{1,9})$"
_OVERLAPPED = r"^PP:\(([0-9]{1,9})F([0-9]{1,9});([0-9]{1,9})(B|I)([0-9]{1,9})\)OVERLAP_F_B$"
_BY_LOOP = r"^(?P<code>Forward|Backward) (?P<micro_batch>[0-9]{1,9})$"
_FRAMEWORK = (
    r"(?:^|[:. ])(?P<code>forward_step|backward_step|_exec_forward_pass|_exec_backward_pass|"
    r"forward-compute|backward-compute)$"
)
_MIN_SEGMENT_RATIO = 0.25
"""Compute between two sends or receives with less than this share of the most ops is no forward or backward."""


@trace_fact(table=ACTIONS)
@memoize
def pipeline_actions(trace: Trace) -> pl.DataFrame:
    """Return the actions of the pipeline schedule on this rank: columns as ACTIONS, by start on the host.

    Empty without a pipeline. On a device, an action lasts from its first compute kernel to its last, collectives of its
    layers included; actions without device work are left out. Where no span marks the actions of a trace that sends and
    receives, they are inferred: compute between two sends or receives, forward or backward by its phase (source
    inferred).
    """
    marked = _span_actions(trace)
    if marked.is_empty():
        marked = _infer_actions(trace)
    if marked.is_empty():
        return ACTIONS.empty()
    return ACTIONS.conform(_with_device_times(trace, marked).sort("host_start_ns"))


def _span_actions(trace: Trace) -> pl.DataFrame:
    annotations = trace_columns.is_kind(trace, "annotation")
    ours = annotations & trace_columns.is_named(trace, "^PP:")
    actions = _of_torch(trace, _spans(trace, ours)) if ours.any() else ACTIONS.empty()
    if actions.height or not _sends(trace).height:
        return actions
    framework = annotations | trace_columns.is_kind(trace, "python")
    for pattern in (_BY_LOOP, _FRAMEWORK):
        is_action = framework & trace_columns.is_named(trace, pattern)
        if is_action.any():
            # Actions without those inside another of their kind: Megatron-LM's forward_step calls the user's own.
            ordered = _parse_names(_spans(trace, is_action), pattern).sort(
                "host_start_ns", "host_end_ns", descending=[False, True]
            )
            before_ns = pl.col("host_end_ns").cum_max().shift().over("step", "action")
            return _with_micro_batches(ordered.filter((before_ns <= pl.col("host_start_ns")).fill_null(value=True)))
    return actions


def _spans(trace: Trace, which: Flags) -> pl.DataFrame:
    return trace.ops.select("name", "step", "start_ns", "dur_ns").filter(pl.Series(which))


def _of_torch(trace: Trace, ours: pl.DataFrame) -> pl.DataFrame:
    actions = _parse_names(ours, _TORCH)
    both = ours.filter(pl.col("name").str.contains(_OVERLAPPED))
    return pl.concat([actions, _split_overlapped(trace, both)]) if both.height else actions


def _parse_names(spans: pl.DataFrame, pattern: str) -> pl.DataFrame:
    names = spans.select(pl.col("name").unique()).with_columns(pl.col("name").str.extract_groups(pattern).alias("of"))
    parts = [part for part in ("stage", "code", "micro_batch") if f"<{part}>" in pattern]
    parsed = names.select("name", *(pl.col("of").struct.field(part) for part in parts)).drop_nulls("code")
    parsed = parsed.with_columns(
        pl.lit(None, pl.String).alias(part) for part in ("stage", "micro_batch") if part not in parts
    )
    return spans.join(parsed, on="name", maintain_order="left").select(
        "step",
        pl.col("stage", "micro_batch").cast(pl.Int64),
        pl.col("code").replace_strict(_BY_CODE, return_dtype=pl.String).alias("action"),
        pl.col("start_ns").alias("host_start_ns"),
        (pl.col("start_ns") + pl.col("dur_ns")).alias("host_end_ns"),
        pl.lit("span").alias("source"),
    )


def _with_micro_batches(actions: pl.DataFrame) -> pl.DataFrame:
    """Return actions with the micro-batch counted per action and step, where the span does not name it."""
    ordered = actions.sort("host_start_ns")
    counted = pl.int_range(pl.len()).over("step", "action").cast(pl.Int64)
    return ordered.with_columns(pl.coalesce("micro_batch", counted).alias("micro_batch"))


def _split_overlapped(trace: Trace, both: pl.DataFrame) -> pl.DataFrame:
    """Return the forward and the backward of spans that contain one after the other, split at the first backward op."""
    backward = trace.ops.filter(pl.col("phase") == "backward").select(at_ns="start_ns").sort("at_ns")
    ends = both.sort("start_ns").with_columns((pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"))
    split = ends.join_asof(backward, left_on="start_ns", right_on="at_ns", strategy="forward")
    third = pl.col("start_ns") + pl.col("dur_ns") // 3
    at_ns = pl.when(pl.col("at_ns") < pl.col("end_ns")).then("at_ns").otherwise(third)
    parts = pl.col("name").str.extract_groups(_OVERLAPPED).struct
    split = split.with_columns(at_ns.alias("at_ns"), *(parts.field(str(n)).alias(f"_{n}") for n in range(1, 6)))
    is_full = pl.col("_4") == "B"
    halves = (
        (pl.col("_1"), pl.col("_2"), pl.lit(FORWARD), "start_ns", "at_ns"),
        (
            pl.col("_3"),
            pl.col("_5"),
            pl.when(is_full).then(pl.lit(BACKWARD)).otherwise(pl.lit(INPUT_GRADIENT)),
            "at_ns",
            "end_ns",
        ),
    )
    return pl.concat(
        split.select(
            "step",
            stage.cast(pl.Int64).alias("stage"),
            micro_batch.cast(pl.Int64).alias("micro_batch"),
            action.alias("action"),
            pl.col(start).alias("host_start_ns"),
            pl.col(end).alias("host_end_ns"),
            pl.lit("span").alias("source"),
        )
        for stage, micro_batch, action, start, end in halves
    )


@memoize
def _sends(trace: Trace) -> pl.DataFrame:
    return trace.collectives.filter(pl.col("op").is_in(POINT_TO_POINT))


def _infer_actions(trace: Trace) -> pl.DataFrame:
    """Return forwards and backwards: compute between sends and receives, in steps with as many of both."""
    sends = _sends(trace).drop_nulls("peer")
    if sends.is_empty():
        return ACTIONS.empty()
    calls = trace.activities.join(sends.select(id="activity_id"), on="id", how="semi").select("launch_id", "start_ns")
    edges = with_launches(trace, calls).select(at_ns="launched_ns").sort("at_ns").with_row_index("piece")
    work = trace.activities.filter(pl.col("kind") == "compute", pl.col("phase").ne_missing("optimizer"))
    work = with_launches(trace, work.select("launch_id", "step", "phase", "start_ns", "dur_ns")).sort("launched_ns")
    pieces = work.join_asof(edges, left_on="launched_ns", right_on="at_ns").with_columns(
        pl.when(pl.col("phase") == "backward").then(pl.lit(BACKWARD)).otherwise(pl.lit(FORWARD)).alias("action")
    )
    # Spans of work of one action between two transfers, without those of few ops. Columns step, piece, action,
    # host_start_ns, host_end_ns. Compute after the last backward is of the optimizer.
    place = ["step", "piece", "action"]
    last_ns = pl.col("launched_ns").filter(pl.col("action") == BACKWARD).max().over("step")
    # First, because the ops after the last backward, such as those of the optimizer, may be more than a forward's.
    until_last = pieces.drop_nulls("step").filter(pl.col("launched_ns") <= last_ns)
    segments = until_last.with_columns(pl.struct(place).rle_id().alias("segment"))
    ops = pl.len().over("segment")
    large = segments.filter(ops >= _MIN_SEGMENT_RATIO * ops.max().over("action"))
    end_ns = pl.col("launched_ns") + pl.col("host_dur_ns")
    candidates = (
        large.with_columns(pl.struct(place).rle_id().alias("segment"))
        .group_by("segment", maintain_order=True)
        .agg(
            pl.col(place).first(),
            pl.col("launched_ns").min().alias("host_start_ns"),
            end_ns.max().alias("host_end_ns"),
        )
    ).with_columns(stage=pl.lit(None, pl.Int64), micro_batch=pl.lit(None, pl.Int64), source=pl.lit("inferred"))
    forwards, backwards = ((pl.col("action") == kind).sum().over("step") for kind in (FORWARD, BACKWARD))
    return _with_micro_batches(candidates.filter((forwards == backwards) & (forwards > 1)))


def with_launches(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    """Return work with launched_ns and host_dur_ns: the start and duration of the launching op, else its own."""
    ops = trace.ops.select(launch_id="id", launched_ns="start_ns", host_dur_ns="dur_ns")
    own_dur_ns = pl.col("dur_ns") if "dur_ns" in work.columns else pl.lit(0, pl.Int64)
    return work.join(ops, on="launch_id", how="left").with_columns(
        pl.coalesce("launched_ns", "start_ns").alias("launched_ns"), pl.coalesce("host_dur_ns", own_dur_ns)
    )


def _with_device_times(trace: Trace, actions: pl.DataFrame) -> pl.DataFrame:
    """Return actions with start_ns and end_ns: of the work launched within each on a device, else of the span.

    Collectives of tensor, context and expert parallelism are part of the action, also after its last compute.
    """
    on_host = actions.with_columns(start_ns="host_start_ns", end_ns="host_end_ns")
    if not trace.on_device:
        return _without_waits(trace, on_host)
    computes = pl.col("action").is_in(COMPUTE_ACTIONS)
    spans = actions.filter(computes).sort("host_start_ns").with_row_index("number")
    # Ids of the collectives that layers need, by their groups' descriptions.
    listed = trace.groups.select("group", "description").rows()
    groups = [group for group, description in listed if axis_of_description(description) in (TP, CP, EP)]
    is_within = pl.col("group").is_in(groups) & ~pl.col("op").is_in(POINT_TO_POINT)
    is_work = (pl.col("kind") == "compute") | pl.col("id").is_in(
        trace.collectives.filter(is_within)["activity_id"].implode()
    )
    work = pl.concat(
        launched_work.work(trace, device).filter(is_work).drop_nulls("launched_ns")
        for device in breakdown.devices(trace)
        if device is not None
    )
    times = _extent(spans, work)
    computed = spans.join(times, on="number", maintain_order="left").drop("number")
    return pl.concat([computed, on_host.filter(~computes)], how="diagonal")


def _extent(spans: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Return from when to when the work launched in each span ran. Columns number, start_ns, end_ns."""
    starts = spans.select("number", "host_start_ns", "host_end_ns").sort("host_start_ns")
    inside = (
        work.select("launched_ns", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
        .sort("launched_ns")
        .join_asof(starts, left_on="launched_ns", right_on="host_start_ns")
        .filter(pl.col("launched_ns") <= pl.col("host_end_ns"))
    )
    return inside.group_by("number").agg(pl.col("start_ns").min(), pl.col("end_ns").max())


def _without_waits(trace: Trace, actions: pl.DataFrame) -> pl.DataFrame:
    """Return actions of a CPU run without the wait for a receive before their first op, and a send after their last.

    The runtime of torch.distributed.pipelining posts receives in spans of their own, but waits for them in the span of
    the action: under FSDP2 after it has unpacked the gathered weights of the stage.
    """
    computes = pl.col("action").is_in(COMPUTE_ACTIONS)
    spans = actions.filter(computes).with_row_index("number")
    work = trace.activities.filter(pl.col("kind") == "compute").select("start_ns", "dur_ns", launched_ns="start_ns")
    calls = trace.activities.join(_sends(trace).select("op", id="activity_id"), on="id")
    receives = calls.filter(pl.col("op") == "recv").sort("start_ns")
    receives = receives.select(posted_ns="start_ns", received_ns=pl.col("start_ns") + pl.col("dur_ns"))
    received = receives.with_columns(pl.col("received_ns").cum_max())
    sent = calls.filter(pl.col("op") != "recv").select(sent_ns="start_ns").sort("sent_ns")
    inner = _extent(spans, work).select("number", first_ns="start_ns", last_ns="end_ns")
    # Spans whose first_ns is the first op after the last receive that ends within the span, if there is one.
    ends = pl.DataFrame({"input_ns": receives["received_ns"].sort()})
    starts = pl.DataFrame({"needed_ns": work["start_ns"].sort()})
    matched = (
        spans.join(inner, on="number", how="left")
        .sort("host_end_ns")
        .join_asof(ends, left_on="host_end_ns", right_on="input_ns")
        .with_columns(pl.max_horizontal("input_ns", "first_ns").alias("input_ns"))
        .sort("input_ns")
        .join_asof(starts, left_on="input_ns", right_on="needed_ns", strategy="forward")
    )
    is_inside = pl.col("needed_ns") < pl.col("last_ns")
    inner = matched.with_columns(pl.when(is_inside).then("needed_ns").otherwise("first_ns").alias("first_ns")).drop(
        "input_ns", "needed_ns"
    )
    timed = (
        inner.with_columns(pl.col("first_ns", "last_ns").fill_null(pl.col("host_end_ns")))  # it only waits
        .sort("first_ns")
        .join_asof(received, left_on="first_ns", right_on="posted_ns")
        .sort("last_ns")
        .join_asof(sent, left_on="last_ns", right_on="sent_ns", strategy="forward")
    )
    waits, sends = pl.col("received_ns") >= pl.col("host_start_ns"), pl.col("sent_ns") <= pl.col("host_end_ns")
    tightened = timed.with_columns(
        pl.when(waits).then("first_ns").otherwise("start_ns").alias("start_ns"),
        pl.when(sends).then("last_ns").otherwise("end_ns").alias("end_ns"),
    )
    return pl.concat([tightened.select(actions.columns), actions.filter(~computes)])
