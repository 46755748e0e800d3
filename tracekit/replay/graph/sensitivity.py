"""Sensitivity of a training to host time at each place: measured by injected delays, and predicted by the replay.

`record --perturb` delays one place of one rank in each trial (`tracekit.capture.perturbation`). The sensitivity is the
time that the job loses over the length of the delay: 1 on the critical path, 0 where the delay hides.
"""

import math
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace, TraceFact
from tracekit.replay.graph import dependency_graph, savings
from tracekit.replay.graph.dependency_graph import Graph, Replay
from tracekit.replay.graph.nodes import HOST

Floats: TypeAlias = npt.NDArray[np.float64]

CRITICAL, HIDDEN, UNDECIDED = "on the critical path", "hidden", "undecided"
LIMIT = 0.5
"""Sensitivity between the two: an interval that contains it does not decide."""
MIN_TRIALS = 6
"""With fewer, no two of the ordered means have 95% of all intervals between them."""

_NORMAL_QUANTILE = 1.96
_MOST_SAMPLES = 1000
_MOST_RANKS = 1 << 24
_FLOAT, _TEXT = pl.Float64(), pl.String()
_LOGGED = (
    conventions.STEP_TIME_METRIC,
    conventions.INJECTED_METRIC,
    conventions.INJECTED_PLACE_METRIC,
    conventions.INJECTED_RANK_METRIC,
)
_TRIAL_ROWS = schema.columns(
    "step step_ns delay_ns place delayed_rank", step_ns=pl.Float64, delay_ns=pl.Float64, place=pl.Int64
)

SENSITIVITY = schema.table(
    "sensitivity",
    "place and rank that were delayed during the training (record --perturb)",
    schema.column("place", "Place before which delays were injected, such as forward.", _TEXT),
    schema.column("rank", "Global rank that was delayed."),
    schema.column("trials", "Trials: two steps with a delay, compared with two without next to them."),
    schema.column("delay_ns", "Median length of the delays."),
    schema.column("sensitivity", "Time that the job loses over the delay: 1 on the critical path, 0 hidden.", _FLOAT),
    schema.column("low", "Lower end of its 95% confidence interval; null with fewer than 6 trials.", _FLOAT),
    schema.column("high", "Upper end of it.", _FLOAT),
    schema.column("replayed", "The same in a replay of the profiled windows; null where these lack the place.", _FLOAT),
    schema.column("effect", "on the critical path, hidden, or undecided: the interval contains 0.5.", _TEXT),
)


@trace_fact
def logged_trials(trace: Trace) -> pl.DataFrame:
    """Steps of trials by the rank's metrics log, without those of values that no trial has.

    Columns step, step_ns, delay_ns (0: not delayed), place (index of `conventions.PERTURBED_PLACES`), delayed_rank.
    """
    logged = trace.metrics.filter(pl.col("name").is_in(_LOGGED), pl.col("value").is_finite()).drop_nulls()
    if logged["name"].n_unique() < len(_LOGGED):
        return schema.empty(_TRIAL_ROWS)
    wide = logged.pivot("name", index="step", values="value", aggregate_function="last").drop_nulls().sort("step")
    step_ns, delay_ns, place, rank = (pl.col(name) for name in _LOGGED)
    is_possible = (
        (step_ns > 0) & delay_ns.is_between(0, step_ns)
        & place.is_in([float(code) for code in range(len(conventions.PERTURBED_PLACES))])
        & rank.is_between(0, _MOST_RANKS) & (rank == rank.floor())
    )  # fmt: skip
    rows = wide.filter(is_possible).select("step", step_ns=step_ns, delay_ns=delay_ns, place=place, delayed_rank=rank)
    return schema.conform(rows, _TRIAL_ROWS)


FACTS: tuple[TraceFact, ...] = (logged_trials, *dependency_graph.FACTS)
"""The facts that the table reads."""


@run_fact(table=SENSITIVITY)
def sensitivity(run: Run) -> pl.DataFrame:
    """Sensitivity of the step time to each place and rank that was delayed: columns as SENSITIVITY.

    Empty where no delays were injected.
    """
    rows = []
    for (place_code, rank), trials in trial_samples(run).group_by("place", "rank", maintain_order=True):
        assert isinstance(place_code, int)
        assert isinstance(rank, int)
        place = conventions.PERTURBED_PLACES[place_code]
        delay_ns = round(float(np.median(trials["delay_ns"].to_numpy())))
        estimate, low, high = center(trials["sensitivity"].to_numpy())
        rows.append({
            "place": place,
            "rank": rank,
            "trials": trials.height,
            "delay_ns": delay_ns,
            "sensitivity": estimate,
            "low": low,
            "high": high,
            "replayed": replayed_sensitivity(run, place, rank, delay_ns),
            "effect": _effect(low, high),
        })  # fmt: skip
    return SENSITIVITY.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else SENSITIVITY.empty()


def trial_samples(run: Run) -> pl.DataFrame:
    """Sensitivity in each complete trial. Columns trial, place, rank, delay_ns, sensitivity; by place, rank and trial.

    The time of a step of the job is the median over its ranks. A trial is complete if all of its steps are logged by
    the same number of ranks, and one step has a delay.
    """
    logged = run.table(logged_trials).sort("window").unique(["rank", "step"], keep="last", maintain_order=True)
    steps = logged.with_columns(
        trial=pl.col("step") // conventions.TRIAL_STEPS,
        block=pl.col("step") % conventions.TRIAL_STEPS // conventions.BLOCK_STEPS,
    )
    delayed = steps.filter(pl.col("delay_ns") > 0, pl.col("rank") == pl.col("delayed_rank"))
    delays = delayed.filter(pl.len().over("trial") == 1).select(
        "trial", "place", "rank", "delay_ns", delayed_block="block", delayed_step="step"
    )
    is_first_of_block = pl.col("delayed_step") % conventions.BLOCK_STEPS == 0
    job = steps.group_by("trial", "block", "step").agg(pl.col("step_ns").median(), ranks=pl.len())
    timed = job.join(delays.filter(is_first_of_block), on="trial")
    is_delayed = pl.col("block") == pl.col("delayed_block")
    sums = timed.group_by("trial", "place", "rank", "delay_ns").agg(
        excess_ns=pl.col("step_ns").filter(is_delayed).sum() - pl.col("step_ns").filter(~is_delayed).sum(),
        is_complete=(pl.len() == conventions.TRIAL_STEPS) & (pl.col("ranks").n_unique() == 1),
    )
    complete = sums.filter("is_complete").sort("place", "rank", "trial")
    return complete.select("trial", "place", "rank", "delay_ns", sensitivity=pl.col("excess_ns") / pl.col("delay_ns"))


def center(samples: Floats) -> tuple[float, float | None, float | None]:
    """Hodges-Lehmann estimate of the center of samples, and its 95% interval (Wilcoxon's signed ranks).

    Samples of a difference in drawn order are symmetric around it whatever the noise, and single slow steps move it
    little. The interval is null with fewer than MIN_TRIALS samples.

    >>> center(np.array([0.8, 1.0, 1.2, 1.1, 0.9, 1.0, 30.0]))[0]
    1.05
    """
    count = min(len(samples), _MOST_SAMPLES)
    # Of more samples, means of neighbouring ones: all pairs of ten thousand would not fit into memory.
    values = np.array([part.mean() for part in np.array_split(samples, count)])
    first, second = np.triu_indices(count)
    means = np.sort((values[first] + values[second]) / 2)
    estimate = round(float(np.median(means)), 9)
    if count < MIN_TRIALS:
        return estimate, None, None
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(1, math.floor(count * (count + 1) / 4 - _NORMAL_QUANTILE * spread))
    return estimate, float(means[outside - 1]), float(means[-outside])


def replayed_sensitivity(run: Run, place: str, rank: int, delay_ns: int) -> float | None:
    """Sensitivity in replays of the profiled windows with such a delay in every fourth step; null without the place.

    As in the training, a delay has the next steps to reach the other ranks.
    """
    lost_ns, delay_count = 0.0, 0
    for graph in savings.graphs_of(run):
        places = nodes_at(graph, place, rank)
        for offset in range(min(conventions.TRIAL_STEPS, len(places))):
            nodes = places[offset :: conventions.TRIAL_STEPS]
            delayed = dependency_graph.replay(with_delays(graph, place, nodes, delay_ns))
            lost_ns += _job_ns(graph, delayed) - _job_ns(graph, graph.replay)
            delay_count += len(nodes)
    return lost_ns / (delay_count * delay_ns) if delay_count and delay_ns else None


def with_delays(graph: Graph, place: str, nodes: Ints, delay_ns: int) -> Graph:
    """Graph with a delay before some host calls.

    On a CPU run, a node that waits for a collective is the call that follows the wait, and so does the delay; before a
    wait, at the place collective, the collective goes on meanwhile. On a GPU, the node is the waiting call itself.
    """
    has_wait_before = place != conventions.COLLECTIVE_PLACE and not graph.on_device
    is_after_wait = np.isin(nodes, graph.edges.waiting[graph.edges.kind == dependency_graph.SYNC]) & has_wait_before
    chain_ns = graph.chain_ns.copy()
    chain_ns[nodes[~is_after_wait]] += delay_ns
    waiting = nodes[is_after_wait]
    return replace(graph, chain_ns=chain_ns).with_durations(waiting, graph.own_ns[waiting] + delay_ns)


def nodes_at(graph: Graph, place: str, rank: int) -> Ints:
    """The first host call at a place of a rank in each inner step of the window, in order; shape (steps,).

    When the first step begins, nothing is queued that could hide a delay; the last one ends before others feel it.
    Data that is loaded without operators has no call of its own: the place then is the first call of the step. Without
    spans of forward, as in a script that was not changed, forward is the first call outside of all phases.
    """
    calls = graph.frame.select(
        "rank", "step", "phase", "start_ns", at=pl.int_range(pl.len(), dtype=pl.Int64), is_host=pl.col("what") == HOST
    ).filter(pl.col("rank") == rank, pl.col("is_host"), pl.col("step").is_not_null())
    inner = calls.filter(pl.col("step") > pl.col("step").min(), pl.col("step") < pl.col("step").max())
    if place == conventions.COLLECTIVE_PLACE:
        at_place = inner.filter(pl.col("at").is_in(_waiting_nodes(graph)))
    elif place == conventions.DATA:
        at_place = inner
    else:
        at_place = inner.filter(pl.col("phase") == place)
        if place == conventions.FORWARD and at_place.is_empty():
            at_place = inner.filter(pl.col("phase").is_null())
    firsts = at_place.sort("step", "start_ns", "at").unique("step", keep="first", maintain_order=True)
    nodes = firsts["at"].to_numpy()
    return np.asarray(nodes[graph.chain[nodes] >= 0], np.int64)


def _waiting_nodes(graph: Graph) -> Ints:
    """The ranks' nodes that wait for the end of a collective."""
    is_end = np.zeros(len(graph.chain), bool)
    is_end[graph.parts["done"].to_numpy()] = True
    edges = graph.edges
    is_wait = (edges.waiting < graph.count) & (edges.awaited >= 0) & is_end[edges.awaited]
    return edges.waiting[is_wait]


def _job_ns(graph: Graph, played: Replay) -> float:
    """Time of all steps of a window: the median over ranks, each on its slowest device, in ns."""
    steps = savings.step_durations(graph, played, unchanged=graph.replay)
    ranks = steps.group_by("rank", "device").agg(pl.col("replayed_ns").sum()).group_by("rank").agg(pl.all().max())
    return float(np.median(ranks["replayed_ns"].to_numpy())) if ranks.height else 0.0


def _effect(low: float | None, high: float | None) -> str:
    if low is not None and low > LIMIT:
        return CRITICAL
    return HIDDEN if high is not None and high < LIMIT else UNDECIDED
