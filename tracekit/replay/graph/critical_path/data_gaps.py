"""What the traces of a run do not show about its critical path."""

from collections.abc import Iterator

import polars as pl

from tracekit.model import units
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.replay.graph import savings
from tracekit.replay.graph.critical_path import owners
from tracekit.replay.graph.critical_path.walk import Span
from tracekit.replay.graph.dependency_graph import Graph
from tracekit.replay.graph.nodes import HOST, WORK

_MIN_RATIO = 0.01


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
            f"{units.numbered('Rank', unaligned)} {'shares' if unaligned.len() == 1 else 'share'} too few collectives "
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
