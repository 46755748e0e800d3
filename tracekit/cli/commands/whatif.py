"""``tracekit whatif``: the predicted step time without one cause of lost time."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import run_loading
from tracekit.cli.options import DocumentOptions, RunOptions, expand_options
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tracekit.model.run import Run
    from tracekit.replay.graph.larger_jobs import Network
    from tracekit.replay.graph.strategies import NodeSpec, Prediction
    from tracekit.report.document import Document


_MOST_GPUS = 1 << 20  # larger_jobs.MOST_GPUS, which costs imports that --help does without


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """What to change in the replay in addition to removing causes."""

    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Predict another strategy: yafsdp, fsdp2 or hsdp.")
    ] = None
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="For hsdp, --gpus: GPUs per node.")] = 8
    node_bandwidth: Annotated[
        float | None, typer.Option(metavar="B", help="For hsdp, --rank-order: bus bandwidth within a node, in bytes/s.")
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=_MOST_GPUS, help="Predict the same job on N GPUs, by more data parallelism."
        ),
    ] = None
    network_bandwidth: Annotated[
        float | None,
        typer.Option(metavar="B", help="For --gpus: bus bandwidth of a ring across nodes, in bytes/s (nccl-tests)."),
    ] = None
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --gpus: a topology file (TOML) with nodes and network.")
    ] = None
    trees: Annotated[
        bool, typer.Option("--trees", help="For --gpus: all-reduces are trees, not rings, as NCCL's across nodes.")
    ] = False
    recompute_fewer: Annotated[
        int | None, typer.Option(metavar="N", help="Predict the effect of recomputing N layers fewer.")
    ] = None
    network_times: Annotated[
        float | None, typer.Option(metavar="X", help="Predict links with X times the bandwidth.")
    ] = None

    axis_times: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=X", help="Predict links of a mesh axis with X times the bandwidth. Repeatable."),
    ] = None
    rank_order: Annotated[
        str | None,
        typer.Option(metavar="A-B-…", help="Predict ranks on nodes in this order of axes, innermost first: tp-dp-pp."),
    ] = None
    micro_batches: Annotated[
        int | None, typer.Option(metavar="N", help="Predict N micro-batches per step, of as many tokens in all.")
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Predict a pipeline's gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev."),
    ] = None
    virtual_stages: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Stages per rank of the predicted schedule.  [default: 2 if interleaved, zbv or dualpipev, else 1]",
            show_default=False,
        ),
    ] = 0
    stage_layers: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Predict these layers per stage, or balanced ones.")
    ] = None

    def predict(self, run: "Run") -> "list[Prediction]":
        """Return the step time with each change. Raises InputError if one cannot be predicted."""
        from tracekit.replay.graph import larger_jobs, pipeline_changes, strategies

        predictions = []
        change = pipeline_changes.PipelineChange(
            self.micro_batches, self.schedule, self.virtual_stages, self.stage_layers
        )
        if not change.is_none:
            predictions.append(pipeline_changes.predict(run, change))
        if self.strategy is not None:
            predictions.append(strategies.predict_strategy(run, self.strategy, self._node()))
        if self.recompute_fewer is not None:
            predictions.append(strategies.predict_less_recomputation(run, self.recompute_fewer))
        if self.network_times is not None:
            predictions.append(strategies.predict_network(run, self.network_times))
        if self.axis_times:
            axes = [text.partition("=") for text in self.axis_times]
            predictions.append(pipeline_changes.predict_axes(run, {axis: _number(times) for axis, _, times in axes}))
        if self.rank_order is not None:
            predictions.append(pipeline_changes.predict_rank_order(run, self.rank_order, self.node_bandwidth))
        if self.gpus is not None:
            predictions.append(larger_jobs.predict(run, self.gpus, self._network()))
        elif self.network_bandwidth is not None or self.topology is not None or self.trees:
            raise ConfigError("--network-bandwidth, --topology and --trees are for --gpus")
        return predictions

    def _network(self) -> "Network":
        from tracekit.plan import topology
        from tracekit.replay.graph.larger_jobs import Network

        if self.topology is None:
            rate = self.network_bandwidth
            if rate is not None and not 0 < rate < float("inf"):
                raise InputError(f"--network-bandwidth is {rate}; it must be above 0")
            return Network(self._node_gpus(), rate, has_trees=self.trees)
        if self.network_bandwidth is not None:
            raise ConfigError("--topology states the network: leave --network-bandwidth out")
        cluster = topology.read(self.topology)
        machine = cluster.hardware
        return Network(cluster.domain_gpus, machine.network_bytes_per_s, 1e9 * machine.network_hop_s, self.trees)

    def _node_gpus(self) -> int:
        if self.gpus_per_node < 1:
            raise InputError(f"--gpus-per-node is {self.gpus_per_node}; it must be 1 or more")
        return self.gpus_per_node

    def _node(self) -> "NodeSpec | None":
        from tracekit.replay.graph.strategies import NodeSpec

        node_gpus = self._node_gpus()
        if self.node_bandwidth is None:
            return None
        if not 0 < self.node_bandwidth < float("inf"):
            raise InputError(f"--node-bandwidth is {self.node_bandwidth}; it must be above 0")
        return NodeSpec(node_gpus, self.node_bandwidth)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--axis-times is AXIS=X, such as tp=2; {text!r} is not a number") from None


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """The critical path of a step, which is shown instead of savings."""

    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Show instead what one step waited for, over all ranks.")
    ] = False
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --critical-path: this step.  [default: the representative one of the slowest rank]"
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --critical-path: N owners, and N rows of slack, as text.  [default: 15]"
        ),
    ] = None

    def document(self, source: RunOptions) -> "Document":
        """Return the critical path of the step. Raises InputError if the run has no such step."""
        from tracekit.replay.graph.critical_path import path
        from tracekit.report import what_if

        run = source.measure(path.FACTS)
        return what_if.path_document(path.critical_path(run, self.step), run=run.name, top=self.top or _TOP)


_TOP = 15


@expand_options
def whatif(
    *,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="CAUSE", help="Remove this cause. Repeatable.  [default: each cause with a saving]"),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Also remove all causes of --without at the same time.")
    ] = False,
    change: ChangeOptions,
    view: PathOptions,
    gpu_hour_price: Annotated[
        float | None, typer.Option(metavar="X", help="Price of one GPU hour; adds the saving per day.")
    ] = None,
    source: RunOptions,
    table: DocumentOptions,
) -> None:
    """Replay each step on its dependency graph without one cause of lost time, and report the saving.

    The replay uses durations, order, waits and host time between calls, but no recorded start times. The first line of
    the result shows how closely it reproduces the recorded steps without a change. The causes of findings come first,
    with the savings that tracekit check states. Savings of several causes overlap.

    --critical-path shows instead what one step waited for, over all ranks: shortening what is not on the path saves
    nothing. The path goes back from the end of the step on its slowest rank, from each host call, kernel or collective
    to what it waited for last. Its parts add up to the step. Least slack is how much later other work could end without
    delaying the step.
    """
    if view.critical_path:
        if without or together or gpu_hour_price is not None or change != ChangeOptions():
            raise ConfigError("--critical-path shows a step as it is: it takes only --step and --top")
        table.write_document(view.document(source))
        return
    if view.step is not None or view.top is not None:
        raise ConfigError("--step and --top are for --critical-path")
    from tracekit.replay.graph import causes, dependency_graph, what_if
    from tracekit.report import what_if as report
    from tracekit.rules import stated_savings

    names = tuple(causes.find(name).name for name in without or ())
    (judged,), _ = run_loading.check_by_settings(
        source.run, dependency_graph.FACTS, cache=source.cache, step_name=source.step_name, role=source.role
    )
    run = judged.run
    predictions = change.predict(run)
    if names or not predictions:
        savings = stated_savings.answer(judged, names, gpu_hour_price=gpu_hour_price)
    else:
        savings = what_if.answer(run, with_causes=False)
    combined = what_if.answer_combined(run, names, gpu_hour_price=gpu_hour_price) if together else None
    document = report.document(savings, predictions, combined, run=run.name, price=gpu_hour_price, explains=bool(names))
    table.write_document(document)
