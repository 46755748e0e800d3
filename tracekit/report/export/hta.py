"""A loaded run as a ``TraceAnalysis`` of HolisticTraceAnalysis (``traceinsight`` on PyPI, ``import hta``).

Its users keep their notebooks, and a run that its own loader cannot open, or opens in minutes, is theirs to analyse.
The frames have the columns that its loader makes by default. What tracekit's tables do not hold has its default value:
external ids, Python ids, sequence numbers, shapes and strides. Device annotations, CUPTI counters and CUDA
synchronization events have no rows. Correlation numbers are generated from the links that tracekit knows.
"""

import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from tracekit.errors import InputError, MissingExtraError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    from hta.common.trace_symbol_table import TraceSymbolTable
    from hta.trace_analysis import TraceAnalysis

_HOST_CATEGORIES = {
    "cpu_op": "cpu_op",
    "annotation": "user_annotation",
    "runtime": "cuda_runtime",
    "python": "python_function",
    "overhead": "overhead",
    "os_call": "os_call",
}
_DEVICE_CATEGORIES = {"compute": "kernel", "communication": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_DRIVER_CALL = "^cu[A-Z]"
_MISSING = {
    "stream": -1, "bytes": -1, "memory_bw_gbps": 0.0, "wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1,
    "input_dims": "-1", "input_type": "-1", "input_strides": "-1", "external_id": -1, "python_id": -1,
    "python_parent_id": -1, "collective_name": "", "in_msg_nelems": 0, "out_msg_nelems": 0, "msg_dtype": "",
    "group_size": 0, "process_rank": -1, "in_split_size": "[]", "out_split_size": "[]",
}  # fmt: skip


def to_hta(
    run: Run, *, window: int | None = None, ranks: Iterable[int] | None = None, include_last_profiler_step: bool = False
) -> "TraceAnalysis":
    """Return a ``TraceAnalysis`` over the traces of a run, as its own loader would make it, without parsing a file.

    HTA knows one window: that numbered `window`, by default the first. A rank without device activity breaks most of
    its analyses for all ranks, so where other ranks have some it is left out, with a warning, unless in `ranks`. As its
    loader does, it leaves out the last profiled step by default, and rounds times to whole µs unless
    ``HTA_DISABLE_NS_ROUNDING`` is set. Raises InputError if the run has no such window or rank, MissingExtraError if
    HTA is not installed.
    """
    if find_spec("hta") is None:
        raise MissingExtraError("HTA is not installed: pip install 'torch-tracekit[hta]'")
    from hta.common.trace import Trace as HtaTrace
    from hta.common.trace_parser import infer_gpu_type
    from hta.trace_analysis import TraceAnalysis

    traces = _select_traces(_window(run, window), None if ranks is None else set(ranks))
    handed = HtaTrace(trace_files={}, trace_dir=run.path)
    # The zero of the times in the first file, so that rounding to µs falls as it does on the file's own.
    zero_ns = next((int(base) for t in traces if (base := t.header.get("baseTimeNanoseconds"))), 0)
    for trace in traces:
        frame = _frame(trace, zero_ns, handed.symbol_table)
        handed.trace_files[trace.rank] = trace.path
        handed.traces[trace.rank] = frame
        device_type = infer_gpu_type(trace.header, handed.symbol_table.get_sym_id_map())
        handed.meta_data[trace.rank] = {**trace.header, "device_type": device_type}
    handed.align_and_filter_trace(include_last_profiler_step)
    for rank, frame in handed.traces.items():
        indexed = frame.set_index("index", drop=False)
        indexed.index.names = [None]
        handed.traces[rank] = indexed
    handed.is_parsed = True
    analysis = TraceAnalysis.__new__(TraceAnalysis)  # its __init__ would parse the files
    analysis.t = handed
    return analysis


def _select_traces(traces: list[Trace], ranks: set[int] | None) -> list[Trace]:
    if ranks is not None:
        missing = sorted(ranks - {trace.rank for trace in traces})
        if missing:
            raise InputError(f"no trace of rank {units.ranges(missing)} to hand to HTA; see the run's ranks")
        return [trace for trace in traces if trace.rank in ranks]
    host_only = [trace.rank for trace in traces if not trace.on_device]
    if len(host_only) in (0, len(traces)):
        return traces
    message = (
        f"rank {units.ranges(host_only)} has no device activity, which HTA cannot analyze: left out; name it in ranks="
    )
    warnings.warn(message, stacklevel=3)
    return [trace for trace in traces if trace.on_device]


def _window(run: Run, window: int | None) -> list[Trace]:
    windows = sorted({source.window for source in run.sources})
    number = windows[0] if window is None else window
    if number not in windows:
        raise InputError(f"{run.path}: no window {number}; there are {', '.join(map(str, windows))}")
    ranks = {source.rank for source in run.sources if source.window == number}
    return [run.trace(rank, number) for rank in run.ranks if rank in ranks]


def _frame(trace: Trace, zero_ns: int, symbols: "TraceSymbolTable") -> "pd.DataFrame":
    """Return one rank's frame: a row per host slice and per activity of a device, in order of start."""
    events = pl.concat([_host(trace), _device(trace)], how="diagonal").sort("start_ns", maintain_order=True)
    events = _link_launches(events.with_row_index("index", offset=1).with_columns(pl.col("index").cast(pl.Int64)))
    filled = events.with_columns(
        pl.col(name).fill_null(value) if name in events.columns else pl.lit(value).alias(name)
        for name, value in _MISSING.items()
    )
    # Ts, dur and end in µs: whole ones where HTA would have them so, in the very arithmetic it uses.
    import hta.configs.env_options as options

    starts, durations = (filled["start_ns"] - zero_ns).to_numpy(), filled["dur_ns"].to_numpy()
    ts_us, dur_us = starts / 1000, durations / 1000
    end_us = ts_us + dur_us
    if not (starts % 1000).any() and not (durations % 1000).any():
        ts_us, dur_us, end_us = starts // 1000, durations // 1000, (starts + durations) // 1000
    elif not options.disable_ns_rounding():
        ts_us, end_us = np.ceil(ts_us).astype(np.int64), np.floor(end_us).astype(np.int64)
        dur_us = end_us - ts_us
    times = (pl.Series("ts", ts_us), pl.Series("dur", dur_us), pl.Series("end", end_us))
    frame = filled.select(
        pl.exclude("start_ns", "dur_ns", "op_id", "activity_id", "launch_id", "number"), *times
    ).to_pandas()
    for name in ("pid", "tid"):
        frame[name] = _numeric_ids(events[name]).to_pandas()
    for name in ("cat", "name"):
        frame[name] = _encode(events[name], symbols)
    return frame


def _host(trace: Trace) -> pl.DataFrame:
    is_driver = (pl.col("kind") == "runtime") & pl.col("name").str.contains(_DRIVER_CALL)
    return trace.ops.join(trace.lanes.select("lane", "pid", "tid"), on="lane", maintain_order="left").select(
        pl.col("id").alias("op_id"),
        pl.when(is_driver)
        .then(pl.lit("cuda_driver"))
        .otherwise(pl.col("kind").replace_strict(_HOST_CATEGORIES))
        .alias("cat"),
        "name", "pid", "tid", "start_ns", "dur_ns",
        pl.col("step").fill_null(-1).alias("iteration"),
        pl.when(pl.col("kind") == "runtime").then("id").alias("number"),
    )  # fmt: skip


def _device(trace: Trace) -> pl.DataFrame:
    lanes = trace.lanes.drop_nulls("device").select("lane", "stream", "pid", "tid")
    details = trace.collectives.select("group_size", id="activity_id", collective_name="op", msg_dtype="dtype")
    rows = trace.activities.join(lanes, on="lane", maintain_order="left")
    rows = rows.join(details, on="id", how="left", maintain_order="left")
    unlinked = trace.ops.height + pl.col("id")  # a number that no launch has
    return rows.select(
        pl.col("id").alias("activity_id"),
        "launch_id",
        pl.col("kind").replace_strict(_DEVICE_CATEGORIES).alias("cat"),
        "name", "pid", "tid", "start_ns", "dur_ns", "stream",
        pl.col("step").fill_null(-1).alias("iteration"),
        pl.coalesce("launch_id", unlinked).alias("number"),
        "bytes",
        (pl.col("bytes") / pl.col("dur_ns")).alias("memory_bw_gbps"),
        "collective_name", "msg_dtype", "group_size",
    )  # fmt: skip


def _link_launches(events: pl.DataFrame) -> pl.DataFrame:
    """Add correlation, and as index_correlation the row at its other end: 0 where that is not there, else -1."""
    launches = events.drop_nulls("op_id").select(launch_id="op_id", launch="index")
    launched = events.drop_nulls("launch_id").group_by(op_id="launch_id").agg(launched=pl.col("index").last())
    correlation = pl.col("number").fill_null(-1)
    return (
        events.join(launches, on="launch_id", how="left", maintain_order="left")
        .join(launched, on="op_id", how="left", maintain_order="left")
        .with_columns(
            correlation.alias("correlation"),
            pl.coalesce("launch", "launched", pl.min_horizontal(correlation, 0)).alias("index_correlation"),
        )
        .drop("launch", "launched")
    )


def _numeric_ids(ids: pl.Series) -> pl.Series:
    numbers = ids.cast(pl.Int64, strict=False)
    return ids if numbers.null_count() > ids.null_count() else numbers.fill_null(-1)


def _encode(texts: pl.Series, symbols: "TraceSymbolTable") -> Any:
    distinct = texts.unique(maintain_order=True).to_list()
    symbols.add_symbols(distinct)
    numbers: Mapping[str, int] = symbols.get_sym_id_map()
    return texts.replace_strict(distinct, [numbers[text] for text in distinct], return_dtype=pl.Int64).to_numpy()
