"""Answers of `tracekit whatif` about an open run: replayed once, then kept for as long as the run is held open."""

import itertools
from collections.abc import Callable, Sequence

from dashboard import run_facts, run_store
from dashboard.run_catalog import RunEntry
from tracekit.model.run import Run
from tracekit.replay.graph import causes, dependency_graph, strategies, what_if
from tracekit.replay.graph import savings as saving
from tracekit.replay.graph.hsdp import NodeSpec
from tracekit.replay.graph.savings import Saving
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf


def replay(entry: RunEntry, on_progress: Callable[[float, str], None]) -> None:
    """Replay the run with nothing changed and without each cause, once. Raises TracekitError.

    `on_progress(ratio, what)` is told how much is done and what is done next, where it was not done before.
    """

    def made(run: Run) -> bool:
        steps = len(run.sources) + len(causes.CAUSES)
        read = itertools.count(1)
        run.measure(dependency_graph.FACTS, lambda _: on_progress(next(read) / steps, "Reading the traces"))
        for done, name in enumerate(causes.CAUSES, len(run.sources)):
            on_progress(min(done / steps, 1.0), f"Replaying without {name}")
            saving.saving(run, name)
        return True

    run_facts.kept(entry, "whatif", made)


def without(entry: RunEntry, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None) -> WhatIf:
    """Return what the run would be without each cause named, or all that save anything. Raises TracekitError."""
    held = run_store.open_run(entry)
    with held.lock:
        return what_if.answer(held.run, names, gpu_hour_price=gpu_hour_price)


def together(entry: RunEntry, names: tuple[str, ...], *, gpu_hour_price: float | None = None) -> Answer:
    """Return what the run would be without all of these causes at once, two or more. Raises TracekitError."""
    held = run_store.open_run(entry)
    with held.lock:
        return what_if.answer_combined(held.run, names, gpu_hour_price=gpu_hour_price)


def savings(entry: RunEntry, several: Sequence[tuple[str, ...]]) -> list[Saving]:
    """Return what a step would save without each of these sets of causes. Raises TracekitError."""
    held = run_store.open_run(entry)
    with held.lock:
        return [saving.combined_saving(held.run, names) for names in several]


def predicted(entry: RunEntry, strategy: str, node: NodeSpec | None) -> Prediction:
    """Return what a step would take under another strategy. Raises TracekitError, also where none can tell."""
    return run_facts.kept(
        entry, ("predicted", strategy, node), lambda run: strategies.predict_strategy(run, strategy, node)
    )


def other_network(entry: RunEntry, times: float) -> Prediction:
    """Return what a step would take on links that carry `times` as much. Raises TracekitError."""
    return run_facts.kept(entry, ("other network", times), lambda run: strategies.predict_network(run, times))


def recomputing_less(entry: RunEntry, layers: int) -> Prediction:
    """Return what a step would take with so many recomputed layers fewer. Raises TracekitError."""
    return run_facts.kept(
        entry, ("recomputing less", layers), lambda run: strategies.predict_less_recomputation(run, layers)
    )
