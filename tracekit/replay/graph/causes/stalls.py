"""Single stalls of a finding as causes, and removals: a cause, the ranks and the stalls that it is removed on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import polars as pl

from tracekit.model.columns import rows_by_key
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.replay.graph.causes.cause import COMPARES, Cause, Kind, Pricing, Transform
from tracekit.replay.graph.causes.host import gap_ns, with_shorter_gaps, without_waits
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import GAP_COLUMNS, HOST, WAIT, HostSpan

STOPPED = "stopped"
"""The `stall` of a span in which the process of a rank did not run."""


@dataclass(frozen=True)
class Removal:
    """A cause to remove from a replay: on these ranks; without ranks, on all. The host time in `stalls` stays.

    Of a cause of findings, `stalls` are what is removed, or `steps` (window and step) those in which it is removed. Of
    late ranks, `ranks` are those that nobody shall wait for: without ranks, those that the others wait for most.
    """

    cause: Cause
    ranks: tuple[int, ...] = ()
    stalls: tuple[HostSpan, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def code(self) -> str:
        """Code of the rule that speaks of this cause on these ranks."""
        return self.cause.code(self.ranks)

    def union(self, other: "Removal | None") -> "Removal":
        """Removal of a cause on the ranks of both; the stalls that stay are those of both."""
        if other is None:
            return self
        stalls = tuple(stall for stall in self.stalls if stall in other.stalls)
        ranks = tuple(sorted({*self.ranks, *other.ranks})) if self.ranks and other.ranks else ()
        return Removal(self.cause, ranks, stalls, tuple(sorted({*self.steps, *other.steps})))

    def apply(self, graph: Graph) -> Graph:
        """Graph without the cause. Raises InsufficientDataError where the graph lacks what that needs."""
        if self.steps:
            return as_in_other_steps(graph, self.ranks, self.steps)
        if self.cause.is_of_finding:
            return self.cause.transform(replace(graph, stalls=self.stalls))
        transform = self.cause.transform
        if self.ranks and self.cause.pricing is Pricing.LATE_RANKS:
            graph = replace(graph, late_ranks=self.ranks)
        elif self.ranks:
            transform = partial(_on_ranks, ranks=self.ranks, transform=transform)
        return _outside_stalls(graph, self.stalls, transform) if self.stalls else transform(graph)


def without_stalls(graph: Graph) -> Graph:
    """Remove the host time in the stalls of the graph: pauses, calls, and the waits of these calls.

    What a pause takes at the same place of other steps remains.
    """
    in_stall, excess_ns = _stalled_time(graph, graph.stalls)
    return without_waits(with_shorter_gaps(graph, excess_ns), in_stall)


def without_excess(graph: Graph) -> Graph:
    """Make the collectives that end with stalls of their ranks shorter by these.

    Of a rank that was STOPPED in a span, its host's time in the span is removed, too.
    """
    stopped = tuple(span for span in graph.stalls if span.stall == STOPPED)
    own_ns = graph.own_ns.copy()
    start, end, rank = (graph.column(name) for name in ("start_ns", "end_ns", "rank"))
    calls = np.flatnonzero(graph.matches("kind", "communication"))
    for span in graph.stalls:
        if span.window != graph.window or span in stopped:
            continue
        rank_calls = calls[(rank[calls] == span.rank) & (start[calls] <= span.start_ns + 1)]
        stalled = rank_calls[np.abs(end[rank_calls] - span.end_ns) <= 1]  # clocks are converted to whole ns
        done = distinct(graph.done[stalled])
        own_ns[done] = np.maximum(own_ns[done] - (span.end_ns - span.start_ns), 0)
    return without_stalls(replace(graph, own_ns=own_ns, stalls=stopped))


SINGLE_STALL = Cause(
    name="single-stall", codes=("STEP001",), kind=Kind.HOST, transform=without_stalls, confidence=0.8,
    is_of_finding=True,
    summary="no host stalls once for longer than in the other steps",
    basis="host time in the stalls of one finding",
)  # fmt: skip
STALLED_COLLECTIVE = Cause(
    name="stalled-collective", codes=("STEP004",), kind=Kind.COMMUNICATION, transform=without_excess, place=COMPARES,
    confidence=0.8, is_of_finding=True,
    summary="no single collective takes far longer than usual",
    basis="the excess of the collectives of one finding",
)  # fmt: skip


def as_in_other_steps(graph: Graph, ranks: Iterable[int], steps: Iterable[tuple[int, int]]) -> Graph:
    """Let ranks take no longer in some steps (window and step) than at the same places of their other steps.

    What these do not have, such as the work of an evaluation, takes no time. Transfers stay as they are. Raises
    InsufficientDataError where a rank has no other step.
    """
    slow_steps = [step for window, step in steps if window == graph.window]
    names = ["rank", "what", "lane", "name", "call"]
    times = {"own": graph.own_ns, "chain": graph.chain_ns, "lag": graph.launch_ns}
    nodes = graph.frame.select(*names, "step", "kind").with_columns(
        *(pl.Series(name, values[: graph.count]) for name, values in times.items()),
        pl.int_range(pl.len()).over(*names, "step").alias("nth"),
        is_slow=pl.col("step").is_in(slow_steps),
    )
    of_ranks = nodes.filter(pl.col("rank").is_in(list(ranks)), pl.col("step").is_not_null())
    medians = (pl.col(name).median().cast(pl.Int64).alias(f"usual_{name}") for name in times)
    usual = of_ranks.filter(~pl.col("is_slow")).group_by(*names, "nth").agg(medians)
    if usual.is_empty():
        raise InsufficientDataError("the rank has no other step to compare with")
    compared = nodes.join(usual, on=[*names, "nth"], how="left", nulls_equal=True, maintain_order="left")
    is_late = pl.col("is_slow") & pl.col("rank").is_in(list(ranks)) & pl.col("kind").ne_missing("communication")
    shorter = compared.select(
        pl.when(is_late & (pl.col("what") != WAIT))
        .then(pl.min_horizontal(name, pl.col(f"usual_{name}").fill_null(0)))
        .otherwise(name)
        for name in times
    )
    changed = {name: values.copy() for name, values in times.items()}
    for name, values in changed.items():
        values[: graph.count] = shorter[name].to_numpy()
    shorter_work = replace(graph, own_ns=changed["own"], launch_ns=changed["lag"])
    return shorter_work.with_chain(changed["chain"])


OCCASIONAL_STRAGGLER = Cause(
    name="occasional-straggler", codes=("RANK005",), kind=Kind.STRAGGLERS, confidence=0.8, is_of_finding=True,
    transform=partial(as_in_other_steps, ranks=(), steps=()), place=COMPARES, pricing=Pricing.CONSEQUENCE,
    summary="a rank that is slower in some steps takes no longer there than in its others",
    basis="the same kernels and host calls of the other steps of the rank",
)  # fmt: skip


def _on_ranks(graph: Graph, ranks: tuple[int, ...], transform: Transform) -> Graph:
    """Return the graph after a transform of host time or device stalls that is applied to some ranks."""
    is_on_ranks = graph.frame["rank"].is_in(list(ranks)).to_numpy()
    device_times = pl.col("stall_ns", "paused_ns", "slowed_ns", "avoidable_ns") * pl.lit(pl.Series(is_on_ranks))
    hidden = graph.frame.with_columns(
        _host_state_of(graph, is_on_ranks),
        _gaps() * pl.lit(pl.Series(is_on_ranks)),
        device_times,
        pl.when(pl.lit(pl.Series(is_on_ranks))).then("phase").alias("phase"),
    )
    return replace(transform(replace(graph, frame=hidden)), frame=graph.frame)


def _outside_stalls(graph: Graph, stalls: tuple[HostSpan, ...], transform: Transform) -> Graph:
    """Return the graph after a transform that leaves the host time in some stalls as it is."""
    in_stall, excess_ns = _stalled_time(graph, stalls)
    unstalled = pl.lit(pl.Series(1 - excess_ns / np.maximum(gap_ns(graph), 1)))
    hidden = graph.frame.with_columns(_host_state_of(graph, ~in_stall), (_gaps() * unstalled).cast(pl.Int64))
    changed = transform(replace(graph, frame=hidden))
    own_ns, chain_ns = changed.own_ns.copy(), changed.chain_ns.copy()
    nodes = np.flatnonzero(in_stall)
    own_ns[nodes] = graph.own_ns[nodes]
    chain_ns[: graph.count] = np.maximum(chain_ns[: graph.count], np.minimum(excess_ns, graph.chain_ns[: graph.count]))
    return replace(changed, own_ns=own_ns, chain_ns=chain_ns, frame=graph.frame)


def _stalled_time(graph: Graph, stalls: Iterable[HostSpan]) -> tuple[Flags, Ints]:
    """Mark host calls that are at least half in stalls; and the stalled part of the time before each node.

    The device becomes idle only when a pause has lasted for a while: all of it is a stall if half of it is, or if it
    covers half of the stall. What most other steps pause there is no part of a stall.
    """
    in_stall, stalled_ns = np.zeros(graph.count, bool), np.zeros(graph.count, np.int64)
    window_stalls = [stall for stall in stalls if stall.window == graph.window]
    if not window_stalls:
        return in_stall, stalled_ns
    start, end = graph.column("start_ns"), graph.column("end_ns")
    pauses_ns = gap_ns(graph)
    hosts = np.flatnonzero(graph.column("what") == HOST)
    calls_of = {rank: hosts[rows] for rank, rows in rows_by_key(graph.column("rank")[hosts]).items()}
    for stall in window_stalls:
        calls = calls_of.get(stall.rank, hosts[:0])
        begin, until, pause_ns = start[calls], end[calls], pauses_ns[calls]
        inside_ns = np.minimum(until, stall.end_ns) - np.maximum(begin, stall.start_ns)
        in_stall[calls] |= (inside_ns > 0) & (2 * inside_ns >= until - begin)
        before_ns = np.minimum(begin, stall.end_ns) - np.maximum(begin - pause_ns, stall.start_ns)
        is_pause = 2 * before_ns >= np.minimum(pause_ns, stall.end_ns - stall.start_ns)
        stalled_ns[calls] += np.where(before_ns > 0, np.where(is_pause, pause_ns, before_ns), 0)
    stalled_ns = np.minimum(stalled_ns, pauses_ns)
    return in_stall, np.maximum(stalled_ns - _usual_ns(graph, stalled_ns > 0), 0)


def _usual_ns(graph: Graph, which: Flags) -> Ints:
    """Return the host time before some launches that most other steps of the rank have there; 0 for other nodes.

    The same place is the same kernel, on a CPU run the same op, with the same number in its step. A step without that
    place, such as one without the copies of a save, pauses for no time there.
    """
    place = ["rank", "name", "nth"]
    is_host = graph.column("what") == HOST
    call = graph.launch[: graph.count] if graph.on_device else np.where(is_host, np.arange(graph.count), -1)
    launched = graph.frame.select("rank", "step", "name", call=pl.Series(call)).filter(pl.col("call") >= 0)
    calls = launched.sort("call").unique("call", keep="first", maintain_order=True)
    pause_ns = gap_ns(graph)[calls["call"].to_numpy()]
    at_place = calls.with_columns(
        pl.int_range(pl.len()).over("rank", "step", "name").alias("nth"), pl.Series("gap_ns", pause_ns, pl.Int64)
    )
    selected = at_place.filter(pl.Series(which[calls["call"].to_numpy()]))
    other_steps = selected.join(at_place, on=place, suffix="_other").filter(pl.col("step") != pl.col("step_other"))
    step_counts = calls.group_by("rank").agg(other_count=pl.col("step").n_unique() - 1)
    at_others = other_steps.join(step_counts, on="rank").group_by("call")
    other_count = pl.col("other_count").first().cast(pl.Int64)
    with_pause = other_count // 2 - (other_count - pl.len().cast(pl.Int64))  # after those that have no such place
    median_ns = pl.col("gap_ns_other").sort().get(with_pause.clip(0))
    usual = at_others.agg(pl.when(with_pause >= 0).then(median_ns).otherwise(0).alias("gap_ns_other"))
    usual_ns = np.zeros(graph.count, np.int64)
    usual_ns[usual["call"].to_numpy()] = usual["gap_ns_other"].to_numpy()
    return usual_ns


def _host_state_of(graph: Graph, which: Flags) -> pl.Series:
    """Return the column of the state of the host in its calls, for some of them only."""
    state = np.where(which, graph.column("host_state"), -1)
    return pl.Series("host_state", state, dtype=graph.frame["host_state"].dtype)


def _gaps() -> pl.Expr:
    return pl.col(*GAP_COLUMNS.values())
