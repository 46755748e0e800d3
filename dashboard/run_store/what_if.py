"""What-if answers and the critical path of an open run, as `tracekit whatif` gives them. Each raises TracekitError."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import polars as pl

from dashboard.run_store import OpenRun
from tracekit.model.run import Run
from tracekit.replay.graph import causes, dependency_graph, representative_ranks, savings, strategies, what_if
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.critical_path import path
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.replay.graph.strategies import NodeSpec, Prediction
from tracekit.replay.graph.what_if import MIN_SAVED_RATIO, Answer, WhatIf
from tracekit.rules import stated_savings

__all__ = ["MIN_SAVED_RATIO", "Answer", "CriticalPath", "NodeSpec", "Prediction", "WhatIf"]
STRATEGIES, HSDP = strategies.NAMES, strategies.HSDP
_PAUSE_S = 0.01
"""Time for another session that waits for the run: otherwise this one would take its lock again at once."""
hours_per_day = what_if.hours_per_day
worst_error_ratio = savings.worst_error_ratio


def cause_names() -> list[str]:
    """Names of the causes that can be removed from a run, those of plug-ins among them."""
    return [cause.name for cause in causes.run_causes()]


def replay(run: OpenRun, on_progress: Callable[[float, str], None]) -> None:
    """Replay the run unchanged and without each cause, once. `on_progress(ratio, what)` is called before each part.

    Between the parts, other sessions can read the run.
    """
    replayed = run.remember("replayed causes", lambda _: set[str]())
    missing = [cause for cause in causes.run_causes() if cause.name not in replayed]
    small = run.compute(representative_ranks.run_of)  # of a run with many ranks, only these are replayed
    parts = len(small.sources) + len(missing)
    read = itertools.count(1)

    def build(_: Run) -> None:
        small.measure(dependency_graph.FACTS, lambda _: on_progress(min(next(read) / parts, 1.0), "Reading the traces"))

    def replay_without(run: Run, cause: Cause) -> None:
        savings.saving(run, cause.name)
        replayed.add(cause.name)

    if missing:
        run.compute(build)
    for done, cause in enumerate(missing, parts - len(missing)):
        on_progress(done / parts, f"Replaying without {cause.title}")
        run.compute(functools.partial(replay_without, cause=cause))
        time.sleep(_PAUSE_S)


def without(run: OpenRun, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None) -> WhatIf:
    """Return the run without each cause named, or without each that would save anything."""
    return run.compute(lambda _: stated_savings.answer(run.report, names, gpu_hour_price=gpu_hour_price))


def together(run: OpenRun, names: tuple[str, ...], *, gpu_hour_price: float | None = None) -> Answer:
    """Return the run without all of these causes at once, two or more."""
    return run.compute(lambda run: what_if.answer_combined(run, names, gpu_hour_price=gpu_hour_price))


def savings_by_rank(run: OpenRun, sets: Sequence[tuple[str, ...]]) -> pl.DataFrame:
    """Return the step time of each rank without each of these sets of causes, as `savings.by_rank`."""
    return run.compute(lambda run: savings.by_rank([savings.combined_saving(run, names) for names in sets]))


def steps_without(run: OpenRun, names: tuple[str, ...]) -> pl.DataFrame:
    """Return each step of each rank as recorded, replayed, and replayed without these causes."""
    return run.compute(lambda run: savings.combined_saving(run, names).steps)


def critical_path(run: OpenRun, step: int | None = None) -> CriticalPath:
    """Return the critical path of a step, by default of the representative one."""
    return run.remember(("critical path", step), lambda run: path.critical_path(run, step))


def placed_parts(run: OpenRun, result: CriticalPath) -> pl.DataFrame:
    """Return the compact parts of a path with window and trace_start_ns, their start on the clock of their trace."""
    return run.compute(lambda run: path.placed_parts(run, result))


def predict_strategy(run: OpenRun, strategy: str, node: NodeSpec | None) -> Prediction:
    """Return the step time predicted under another strategy."""
    return run.remember(("predicted", strategy, node), lambda run: strategies.predict_strategy(run, strategy, node))


def other_network(run: OpenRun, times: float) -> Prediction:
    """Return the step time predicted on links with `times` the bandwidth."""
    return run.remember(("other network", times), lambda run: strategies.predict_network(run, times))


def recomputing_less(run: OpenRun, layers: int) -> Prediction:
    """Return the step time predicted with so many recomputed layers fewer."""
    return run.remember(("recomputing less", layers), lambda run: strategies.predict_less_recomputation(run, layers))
