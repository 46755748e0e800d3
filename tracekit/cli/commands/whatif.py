"""``tracekit whatif``: what a step would take without one cause of lost time."""

from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Format, Output, TextOrJson
from tracekit.cli.run_loading import RunArgument, UseCache
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.replay.graph.hsdp import NodeSpec


def whatif(
    run: RunArgument,
    *,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="CAUSE", help="Take this cause away; repeatable. All that save, if none."),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Also take all causes named by --without away at once.")
    ] = False,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="Predict another strategy: yafsdp, fsdp2 or hsdp.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", metavar="N", help="For hsdp: GPUs of a node.")] = 8,
    node_bandwidth: Annotated[
        float | None,
        typer.Option("--node-bandwidth", metavar="B", help="For hsdp: bus bandwidth inside a node, bytes a second."),
    ] = None,
    recompute_fewer: Annotated[
        int | None, typer.Option("--recompute-fewer", metavar="N", help="Predict N recomputed layers fewer.")
    ] = None,
    network_times: Annotated[
        float | None, typer.Option("--network-times", metavar="X", help="Predict links that carry X times as much.")
    ] = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option("--gpu-hour-price", metavar="X", help="Of one GPU, to tell money per day.")
    ] = None,
    table_format: TextOrJson = Format.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Replay each step on its dependency graph with one cause taken away, and say what it saves.

    The replay knows durations, order, waits and the host's time between its calls, and nothing of when work began. Its
    first line says how well it reproduces the recorded steps with nothing changed. Savings of causes overlap.
    """
    from tracekit.replay.graph import causes, dependency_graph, strategies, what_if
    from tracekit.report import what_if as told

    names = tuple(causes.find(name).name for name in without or ())
    opened = run_loading.open_run(run, cache=cache)
    with output.progress() as bar:
        opened.measure(dependency_graph.FACTS, bar.trace_callback(len(opened.sources)))
    predictions = []
    if strategy is not None:
        predictions.append(strategies.predict_strategy(opened, strategy, _node(gpus_per_node, node_bandwidth)))
    if recompute_fewer is not None:
        predictions.append(strategies.predict_less_recomputation(opened, recompute_fewer))
    if network_times is not None:
        predictions.append(strategies.predict_network(opened, network_times))
    asks = bool(names) or not predictions
    found = what_if.answer(opened, names, gpu_hour_price=gpu_hour_price, with_causes=asks)
    both = what_if.answer_combined(opened, names, gpu_hour_price=gpu_hour_price) if together else None
    write = told.as_json if table_format is Format.JSON else told.as_text
    output.emit(write(found, predictions, both, run=opened.name, price=gpu_hour_price), out)


def _node(gpus: int, bytes_per_s: float | None) -> "NodeSpec | None":
    from tracekit.replay.graph.hsdp import NodeSpec

    if gpus < 1:
        raise InputError(f"--gpus-per-node is {gpus}; it must be 1 or more")
    if bytes_per_s is None:
        return None
    if not 0 < bytes_per_s < float("inf"):
        raise InputError(f"--node-bandwidth is {bytes_per_s}; it must be above 0")
    return NodeSpec(gpus, bytes_per_s)
