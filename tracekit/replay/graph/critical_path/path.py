"""The critical path of one step of a run: its parts, which tile the step, and the slack of everything else."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.errors import InputError
from tracekit.model import schema, units
from tracekit.model.fact import run_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import TraceFact
from tracekit.replay.graph import dependency_graph, savings
from tracekit.replay.graph.critical_path import owners
from tracekit.replay.graph.critical_path.walk import NEVER, RecordedTimes, Span, latest_ends, recorded_times, walk
from tracekit.replay.graph.dependency_graph import Graph
from tracekit.replay.graph.nodes import HOST, WORK
from tracekit.sync import alignment

FACTS: tuple[TraceFact, ...] = (*dependency_graph.FACTS, *save_stages.FACTS)
"""The facts of a critical path, measured in one pass over the traces."""
SHARES = schema.columns("rank kind name unit state count dur_ns step_ratio", state=pl.String)
SLACK = schema.columns("rank kind name module unit count dur_ns slack_ns", module=pl.String)
HOST_CALLS = "host calls"
"""The name in `slack` of a host's calls to the device, which have no name in the graph."""
_MIN_RATIO = 0.01


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The chain of waits that ends with a step.

    The step is the device window of `rank`, on which it took longest: from `start_ns` on the run's clock, `step_ns`
    long. `parts` (columns `owners.PARTS`) tile it exactly, in time order. `slack` has the work of all ranks in this
    time that is not on the path (columns SLACK). `doubts` are sentences on what the traces do not show.
    """

    window: int
    step: int | None
    rank: int
    start_ns: int
    step_ns: int
    parts: pl.DataFrame
    slack: pl.DataFrame
    doubts: tuple[str, ...]

    @property
    def compact(self) -> pl.DataFrame:
        """Return the parts with neighbours of one rank, kind, name and unit joined: they tile the step too.

        Columns rank, kind, name (of the host: its operator, if it runs one), unit, state, start_ns, dur_ns.
        """
        label = pl.when(pl.col("kind") == owners.HOST_KIND).then(pl.coalesce("operator", "name")).otherwise("name")
        labelled = self.parts.select("rank", "kind", label.alias("name"), "unit", "state", "start_ns", "dur_ns")
        return owners.merge_parts(labelled, ("rank", "kind", "name", "unit"))

    @property
    def shares(self) -> pl.DataFrame:
        """Return the owners of the path, the largest first. Columns SHARES; dur_ns adds up to the step."""
        keys = ["rank", "kind", "name", "unit", "state"]
        sums = self.compact.group_by(keys, maintain_order=True).agg(
            pl.len().cast(pl.Int64).alias("count"), pl.col("dur_ns").sum()
        )
        shares = sums.with_columns(step_ratio=pl.col("dur_ns") / max(self.step_ns, 1))
        return schema.select(shares.sort("dur_ns", descending=True, maintain_order=True), SHARES)

    @property
    def has_modules(self) -> bool:
        """Return whether the torch.nn.Module of some part is known."""
        return self.parts["module"].null_count() < self.parts.height

    def shares_by(self, *keys: str) -> pl.DataFrame:
        """Return the time of the path by columns of its parts: those, dur_ns and step_ratio; the largest first."""
        sums = self.parts.group_by(keys, maintain_order=True).agg(pl.col("dur_ns").sum())
        shares = sums.with_columns(step_ratio=pl.col("dur_ns") / max(self.step_ns, 1))
        return shares.sort("dur_ns", descending=True, maintain_order=True)


@dataclass(frozen=True, eq=False)
class Chain:
    """The walk behind a critical path: from the node `last`, with which the step ends, back to the step's start.

    `step` is the row of the graph's windows (columns of `trace_graph.windows`, window and rank). Times are in ns since
    the window's origin.
    """

    times: RecordedTimes
    step: dict[str, int]
    last: int
    start_ns: int
    end_ns: int
    spans: list[Span]

    @property
    def on_path(self) -> Ints:
        """Return the nodes with own time on the path."""
        return np.unique([span.node for span in self.spans if span.wait < 0])


PATHS = schema.table(
    "critical_paths",
    "part of the critical path of a step: the parts tile it",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("step", "Step whose path it is; null where the trace has no steps and is taken as one window."),
    schema.column("step_rank", "Rank on which the step took longest: its device window is the step."),
    schema.column("rank", "Rank that owns the time."),
    schema.column("kind", "compute, communication, memcpy, memset, host, idle or unrecorded.", pl.String()),
    schema.column("name", "Kernel or collective, innermost slice of the host, or why a device is idle.", pl.String()),
    schema.column("operator", "Innermost framework op around the launch, or on the host.", pl.String()),
    schema.column("module", "Path of its torch.nn.Module, or FSDP unit; null where none is known.", pl.String()),
    schema.column("unit", "FSDP unit (layer) by module path, '' for the root.", pl.String()),
    schema.column(
        "phase", "forward, backward, clip, optimizer, data or checkpoint; null where not known.", pl.String()
    ),
    schema.column("state", "What the host does: op, python, data, allocator, synchronize, ….", pl.String()),
    schema.column("lane", "Stream or thread, as lanes.lane of the rank."),
    schema.column("start_ns", "Start, on the run's clock."),
    schema.column("dur_ns", "Duration; those of a step add up to it."),
)


@run_fact(table=PATHS)
def critical_paths(run: Run) -> pl.DataFrame:
    """Return the critical path of every step: columns as PATHS, one row per part, in time order within a step.

    Empty where no step has work that can be replayed.
    """
    run.measure(FACTS)
    windows = [graph.windows for graph in savings.graphs_of(run)]
    if not any(table.height for table in windows):
        return PATHS.empty()
    steps = pl.concat(windows).select("window", "step").unique().sort("window", "step").iter_rows()
    rows = []
    for window, step in steps:
        step_chain = _chain_of(run, pl.concat(windows).filter(window=window), step)
        parts = owners.parts(run, step_chain.times, step_chain.spans)
        place = {"window": window, "step": step, "step_rank": step_chain.step["rank"]}
        rows.append(parts.with_columns(pl.lit(value, pl.Int64).alias(name) for name, value in place.items()))
    return PATHS.conform(pl.concat(rows))


def critical_path(run: Run, step: int | None = None) -> CriticalPath:
    """Return the critical path of a step, by default of the representative one.

    Without marked steps, the profiled window is the step. Raises InputError if the run has no such step, or none with
    work.
    """
    step_chain = chain(run, step)
    graph = step_chain.times.graph
    table = owners.parts(run, step_chain.times, step_chain.spans)
    return CriticalPath(
        graph.window,
        step_chain.step["step"],
        step_chain.step["rank"],
        step_chain.start_ns + graph.origin_ns,
        step_chain.end_ns - step_chain.start_ns,
        table,
        _slack(run, step_chain),
        doubts(run, graph, step_chain.spans, table, is_step=step_chain.step["step"] is not None),
    )


def placed_parts(run: Run, path: CriticalPath) -> pl.DataFrame:
    """Compact parts of a path with window and trace_start_ns, their start on the clock of their trace."""
    rows = path.compact.with_columns(window=pl.lit(path.window, pl.Int64), trace_start_ns="start_ns")
    return alignment.on_trace_clock(rows, run.offsets, ("trace_start_ns",))


def chain(run: Run, step: int | None = None) -> Chain:
    """Return the chain of waits that ends with a step, as `critical_path` explains it."""
    run.measure(FACTS)
    windows = [graph.windows for graph in savings.graphs_of(run)]
    return _chain_of(run, pl.concat(windows) if windows else pl.DataFrame(), step)


def doubts(run: Run, graph: Graph, spans: list[Span], parts: pl.DataFrame, *, is_step: bool) -> tuple[str, ...]:
    """Return, as sentences, what limits a critical path: its spans, and their owners `parts`."""
    sentences = [
        None if is_step else "No steps are marked: the whole profiled window is shown as one step.",
        _launches(graph),
        *_ranks(run, graph),
        _unmatched_calls(graph, spans),
        _waits(run, graph),
        _unexplained_time(parts),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _chain_of(run: Run, windows: pl.DataFrame, step: int | None) -> Chain:
    graphs = {graph.window: graph for graph in savings.graphs_of(run)}
    step_row = _chosen_step(run, windows, step)
    times = recorded_times(graphs[step_row["window"]])
    start_ns = int(times.begin_ns[step_row["first"]])
    end_ns = start_ns + step_row["end_ns"] - step_row["start_ns"]
    last = _last_node(times, step_row, end_ns)
    return Chain(times, step_row, last, start_ns, end_ns, walk(times, last, start_ns=start_ns, end_ns=end_ns))


def _chosen_step(run: Run, windows: pl.DataFrame, step: int | None) -> dict[str, int]:
    """Return the row of the graph's windows to explain: of the step, the one on the rank on which it took longest."""
    if windows.is_empty():
        raise InputError(
            f"{run.path}: no step has work that can be replayed: no kernels, and no ops of a CPU run; "
            "record with activities=[CPU, CUDA]"
        )
    timed = windows.with_columns(duration_ns=pl.col("end_ns") - pl.col("start_ns"))
    of_step = timed.filter(pl.col("step") == step) if step is not None else timed
    if of_step.is_empty():
        step_ranges = units.ranges(timed["step"].drop_nulls().unique()) or "none"
        raise InputError(f"--step {step}: no such step; the traces have {step_ranges}")
    if step is None:
        typical = save_stages.representative_step(run, timed)
        assert typical is not None
        of_step = timed.filter(pl.col("step").eq_missing(pl.lit(typical["step"], pl.Int64)))
        of_step = of_step.filter(pl.col("window") == typical["window"])
    longest = of_step.sort("window", -pl.col("duration_ns"), "rank", "device", nulls_last=True)
    return longest.row(0, named=True)


def _last_node(times: RecordedTimes, step_row: dict[str, int], end_ns: int) -> int:
    """Return the node with which the step ends: the first of the next step, else the last work that ended."""
    graph = times.graph
    place = ("rank", "device")
    following = graph.windows.filter(
        *(pl.col(name).eq_missing(pl.lit(step_row[name], pl.Int64)) for name in place),
        pl.col("start_ns") == step_row["end_ns"],
    )
    if following.height:
        return int(following["first"][0])
    is_here = graph.frame.select(
        pl.all_horizontal(pl.col(name).eq_missing(pl.lit(step_row[name], pl.Int64)) for name in place)
        & pl.col("kind").is_not_null()
    ).to_series()
    rows = np.flatnonzero(is_here.to_numpy())
    ended_ns = graph.column("end_ns")[rows] - graph.origin_ns
    return int(graph.done[rows[np.argmin(np.abs(ended_ns - end_ns))]])


def _slack(run: Run, step_chain: Chain) -> pl.DataFrame:
    """Return the work in the step that is not on the path: columns SLACK, one row per owner (rank to unit).

    slack_ns is the least of its pieces: the time by which it can end later without delaying the end of the step.
    """
    times, graph = step_chain.times, step_chain.times.graph
    count, start_ns, end_ns = graph.count, step_chain.start_ns, step_chain.end_ns
    latest = latest_ends(times, end_ns)[:count]
    slack_ns = np.maximum(latest - times.end_ns[:count], 0)
    on_path = np.isin(graph.done, step_chain.on_path) | np.isin(np.arange(count), step_chain.on_path)
    has_slack = (latest < NEVER) & ~on_path
    began, ended = (graph.column(name) - graph.origin_ns for name in ("start_ns", "end_ns"))
    inside_ns = np.minimum(ended, end_ns) - np.maximum(began, start_ns)
    nodes = graph.frame.select(
        "rank",
        "ref",
        pl.col("kind").is_not_null().alias("is_activity"),
        pl.coalesce("kind", pl.when(pl.col("what") == HOST).then(pl.lit(owners.HOST_KIND))).alias("kind"),
        pl.coalesce("name", pl.lit(HOST_CALLS)).alias("name"),
        "unit",
        pl.Series("dur_ns", inside_ns),
        pl.Series("slack_ns", slack_ns),
    )
    off_path = nodes.filter(pl.Series(has_slack & (inside_ns > 0))).drop_nulls("kind")
    keys = ["rank", "kind", "name", "module", "unit"]
    off_path = off_path.join(
        owners.activity_modules(run, graph.window, off_path["rank"].unique().sort().to_list()),
        on=["rank", "ref", "is_activity"],
        how="left",
        maintain_order="left",
    )
    sums = off_path.group_by(keys, maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("count"), pl.col("dur_ns").sum(), pl.col("slack_ns").min()
    )
    return schema.select(sums.sort("slack_ns", "dur_ns", descending=[False, True], maintain_order=True), SLACK)


def _launches(graph: Graph) -> str | None:
    if not graph.on_device:
        return None
    work = (graph.column("what") == WORK) & ~graph.matches("kind", "memset")
    unknown = work & (graph.launch[: graph.count] < 0)
    if not (graph.column("what") == HOST).any():
        return "No launches are recorded: the host cannot be on the path, and idle time of a device has no owner."
    share = unknown.sum() / max(work.sum(), 1)
    if share < _MIN_RATIO:
        return None
    return f"The launches of {units.share(float(share))} of the device work are not recorded."


def _ranks(run: Run, graph: Graph) -> Iterator[str]:
    """Yield which ranks the path cannot contain, and whose clocks are unknown."""
    traced = graph.frame["rank"].n_unique()
    size = Manifest.of(run.manifest).world_size or int(graph.parts["group_size"].max() or 0)  # type: ignore[arg-type]
    missing = run.data_quality.filter(pl.col("kind") == "missing_ranks")["message"].to_list()
    messages = [message.partition(" (")[0] for message in missing]
    few = [f"{traced} of {size} ranks have a trace"] if size > traced else messages
    if few:
        yield f"{few[0]}: waiting for the others is shown as communication, as if they had arrived last."
    unaligned = run.offsets.filter(pl.col("window") == graph.window, pl.col("residual_ns").is_null())["rank"]
    if traced > 1 and unaligned.len():
        yield (
            f"{units.numbers('Rank', unaligned)} {'shares' if unaligned.len() == 1 else 'share'} too few collectives "
            "to align clocks: waits between them and other ranks are not known."
        )


def _unmatched_calls(graph: Graph, spans: list[Span]) -> str | None:
    """Sentence on the communication on the path that is of one rank alone although several take part."""
    if graph.frame["rank"].n_unique() < 2:
        return None
    is_unmatched = graph.matches("kind", "communication") & (graph.join_of < 0)
    on_nodes = [span for span in spans if span.wait < 0 and 0 <= span.node < graph.count]
    unmatched_ns = sum(span.end_ns - span.start_ns for span in on_nodes if is_unmatched[span.node])
    share = unmatched_ns / max(spans[-1].end_ns - spans[0].start_ns, 1)
    if share < _MIN_RATIO:
        return None
    return (
        f"{units.share(share)} of the path are collectives or sends that could not be matched across ranks: waiting "
        "in them is shown as communication."
    )


def _waits(run: Run, graph: Graph) -> str | None:
    if not graph.on_device or not savings.infers_waits(run):
        return None
    return "The traces record no event waits of streams: those of this path are inferred from order and times."


def _unexplained_time(parts: pl.DataFrame) -> str | None:
    unknown = parts.filter((pl.col("name") == owners.UNEXPLAINED) | (pl.col("kind") == owners.UNRECORDED))
    share = int(unknown["dur_ns"].sum()) / max(int(parts["dur_ns"].sum()), 1)
    if share < _MIN_RATIO:
        return None
    return f"The traces do not explain {units.share(share)} of the path: nothing recorded runs then."
