"""What-if answers about an open run, as `tracekit whatif` gives them. Each raises TracekitError."""

import itertools
from collections.abc import Callable, Sequence

from dashboard.run_store import OpenRun
from tracekit.model.run import Run
from tracekit.replay.graph import causes, dependency_graph, strategies, what_if
from tracekit.replay.graph import savings as replay_savings
from tracekit.replay.graph.hsdp import NodeSpec
from tracekit.replay.graph.savings import Saving
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf


def replay(run: OpenRun, on_progress: Callable[[float, str], None]) -> None:
    """Replay the run unchanged and without each cause, once. `on_progress(ratio, what)` is called before each part."""

    def replayed(of: Run) -> bool:
        parts = len(of.sources) + len(causes.CAUSES)
        read = itertools.count(1)
        of.measure(dependency_graph.FACTS, lambda _: on_progress(next(read) / parts, "Reading the traces"))
        for done, name in enumerate(causes.CAUSES, len(of.sources)):
            on_progress(min(done / parts, 1.0), f"Replaying without {name}")
            replay_savings.saving(of, name)
        return True

    run.cached("whatif", replayed)


def without(run: OpenRun, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None) -> WhatIf:
    """Return the run without each cause named, or without each that would save anything."""
    return run.compute(lambda of: what_if.answer(of, names, gpu_hour_price=gpu_hour_price))


def together(run: OpenRun, names: tuple[str, ...], *, gpu_hour_price: float | None = None) -> Answer:
    """Return the run without all of these causes at once, two or more."""
    return run.compute(lambda of: what_if.answer_combined(of, names, gpu_hour_price=gpu_hour_price))


def savings(run: OpenRun, sets: Sequence[tuple[str, ...]]) -> list[Saving]:
    """Return what a step would save without each of these sets of causes."""
    return run.compute(lambda of: [replay_savings.combined_saving(of, names) for names in sets])


def predicted(run: OpenRun, strategy: str, node: NodeSpec | None) -> Prediction:
    """Return the step time predicted under another strategy."""
    return run.cached(("predicted", strategy, node), lambda of: strategies.predict_strategy(of, strategy, node))


def other_network(run: OpenRun, times: float) -> Prediction:
    """Return the step time predicted on links with `times` the bandwidth."""
    return run.cached(("other network", times), lambda of: strategies.predict_network(of, times))


def recomputing_less(run: OpenRun, layers: int) -> Prediction:
    """Return the step time predicted with so many recomputed layers fewer."""
    return run.cached(("recomputing less", layers), lambda of: strategies.predict_less_recomputation(of, layers))
