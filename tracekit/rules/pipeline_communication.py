"""Rules on communication in pipelines: sharding that communicates for every micro-batch, and slow links."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.parallelism import pipeline_bubbles, pipeline_communication
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40


@dataclass(frozen=True)
class ShardedMicroBatches(Rule):
    """ZeRO stage 2 or 3 under pipeline parallelism: gradients or weights communicated for every micro-batch.

    What it does: reports data-parallel reduce-scatters or all-gathers that run for `min_micro_batches` or more
    micro-batches of a step, at least half of them. It is a warning if they make the pipeline `min_lost_ratio`
    longer than those of one micro-batch would, else information.

    Why it costs: a pipeline runs many micro-batches per step. ZeRO stage 1 reduces gradients once per step; stage 2
    reduces them, and stage 3 (FSDP with resharding) also gathers weights, for each micro-batch. Pipeline stages already
    divide gradients and weights, so sharding them further saves little memory. DeepSpeed refuses stages 2 and 3 here.

    How it is measured: each all-gather and reduce-scatter of a data-parallel axis belongs to the last action of the
    pipeline that started before it on its rank. The recorded actions are scheduled again on links without cost, with
    the exposed time of these collectives in them and right before them, and with that of one micro-batch: the cost is
    the difference.

    How to fix: shard the optimizer only: ZeRO stage 1 (ZeroRedundancyOptimizer, zero_optimization.stage 1,
    --use-distributed-optimizer). With FSDP keep weights (reshard_after_forward=False) and reduce gradients at the last
    micro-batch only (set_requires_gradient_sync).

    Blind spots: needs the axis of the groups. Collectives that run ahead are attributed to the first
    micro-batches.
    """

    code: ClassVar[str] = "PIPE004"
    facts: ClassVar[tuple[TraceFact, ...]] = (*pipeline_communication.MICRO_BATCH_FACTS,)
    min_micro_batches: int = 3
    min_lost_ratio: float = 0.01

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if collectives recur with the micro-batches."""
        rows = run.table(pipeline_communication.sharded_micro_batches)
        often = rows.filter(
            pl.col("with_calls") >= self.min_micro_batches, pl.col("with_calls") * 2 >= pl.col("micro_batches")
        )
        passes = run.table(pipeline_communication.micro_batch_passes)
        if often.is_empty() or passes.is_empty():
            return
        ops = often.group_by("rank", "step", "axis").agg(
            pl.col("op").unique().sort(), pl.col("with_calls", "micro_batches").max(), pl.col("bytes").sum()
        )
        worst = median_row(ops, "bytes", "rank", "step")
        costly = median_row(passes, "lost_ns", "duration_ns")
        lost_ns, duration_ns = costly["lost_ns"], costly["duration_ns"]
        ratio = lost_ns / max(1, duration_ns)
        names = "s and ".join(worst["op"]).replace("_", "-").capitalize()
        stage = 3 if "all_gather" in worst["op"] else 2
        yield Finding(
            self.code,
            Severity.WARNING if ratio >= self.min_lost_ratio else Severity.INFO,
            f"{names}s of {worst['axis']} run for {worst['with_calls']} of {worst['micro_batches']} micro-batches, as "
            f"with ZeRO stage {stage}: {units.size(worst['bytes'])} per step on rank {worst['rank']}. The pipeline "
            f"takes {units.duration(lost_ns)} of {units.duration(duration_ns)} ({units.share(ratio)}) longer than if "
            "they ran for one.",
            "Shard the optimizer only (ZeRO stage 1: ZeroRedundancyOptimizer, zero_optimization.stage 1, "
            "--use-distributed-optimizer): gradients are then reduced once per step. With FSDP: "
            "fully_shard(reshard_after_forward=False) and set_requires_gradient_sync(False) but for the last "
            "micro-batch.",
            impact=min(1.0, ratio),
            cost_ns=lost_ns,
            confidence=0.8,
            ranks=distinct(often, "rank"),
            steps=distinct(often, "step"),
            evidence=largest_first(often, "lost_ns", "rank", "step").head(_EVIDENCE_ROWS),
            is_of_window=worst["step"] is None,
        )


@dataclass(frozen=True)
class SlowPipelineLink(Rule):
    """A slow link between two stages of a pipeline.

    What it does: reports two neighboring stages between which results take `min_slowdown` times as long as over other
    links of the same kind, by more than the error of both ranks' clocks, if that costs `min_lost_ratio` of the
    pipeline's time; it is a warning from `warning_lost_ratio`.

    Why it costs: each micro-batch passes the link twice; the stage that receives it waits, and so do all later stages.

    How it is measured: where a rank was waiting already when its input was complete on the neighboring rank, the
    time until its action starts is that of the transfer: waiting for the neighbor is not in it. Links inside a node
    are compared with each other, and links between nodes; also with the same link of other replicas. At most a
    quarter of the transfers may be less than `min_slowdown` times as slow. The cost is the difference between two
    schedules of the recorded actions, with the link's median time and with the usual one.

    How to fix: check the link: nvidia-smi topo -m and nvlink -s inside a node; ibstat, link errors and NCCL_IB_HCA
    between nodes; NCCL_DEBUG=INFO shows the transport of each peer. Move the node out of the pipeline meanwhile.

    Blind spots: a pipeline with one link of its kind has nothing to compare with. Nodes are known by GPUs per node in
    run.json or by device indices. The time includes the launch of the action.
    """

    code: ClassVar[str] = "PIPE005"
    facts: ClassVar[tuple[TraceFact, ...]] = pipeline_communication.FACTS
    min_slowdown: float = 3.0
    min_lost_ratio: float = 0.002
    warning_lost_ratio: float = 0.01

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per pair of stages with a slow link."""
        if run.table(pipeline_bubbles.pipeline_bubbles).is_empty():
            return
        links = _with_clock_errors(run, run.table(pipeline_communication.links).drop_nulls("usual_ns"))
        slow = links.filter(
            pl.col("low_ns") >= self.min_slowdown * pl.col("usual_ns"),
            pl.col("low_ns") - pl.col("usual_ns") > pl.col("clock_error_ns"),
            pl.col("saved_ns") >= self.min_lost_ratio * pl.col("duration_ns"),
        )
        pair = pl.concat_list(
            pl.min_horizontal("source_stage", "rank_stage"), pl.max_horizontal("source_stage", "rank_stage")
        )
        for (stages,), rows in slow.with_columns(pair.alias("pair")).group_by("pair", maintain_order=True):
            yield self._finding(rows, stages, distinct(run.table(pipeline_bubbles.pipeline_bubbles), "step"))

    def _finding(self, rows: pl.DataFrame, stages: object, steps: tuple[int, ...]) -> Finding:
        worst = largest_first(rows, "saved_ns", "rank").row(0, named=True)
        first, second = list(stages) if isinstance(stages, (list, pl.Series)) else (0, 0)
        ratio = worst["saved_ns"] / max(1, worst["duration_ns"])
        ranks = tuple(sorted({*distinct(rows, "rank"), *distinct(rows, "source_rank")}))
        return Finding(
            self.code,
            Severity.WARNING if ratio >= self.warning_lost_ratio else Severity.INFO,
            f"The link between stages {first} and {second} (ranks {units.ranges(ranks)}) is slow: a result takes "
            f"{units.duration(worst['delay_ns'])} from rank {worst['source_rank']} to rank {worst['rank']}, "
            f"{units.duration(worst['usual_ns'])} over similar links. That costs {units.duration(worst['saved_ns'])} "
            f"of {units.duration(worst['duration_ns'])} ({units.share(ratio)}).",
            f"Check the link between ranks {worst['source_rank']} and {worst['rank']}: NCCL_DEBUG=INFO (transport), "
            "nvidia-smi topo -m and nvlink -s inside a node, ibstat and NCCL_IB_HCA between nodes; nccl-tests "
            "(sendrecv_perf) measures it.",
            impact=min(1.0, ratio),
            cost_ns=worst["saved_ns"],
            confidence=0.7,
            ranks=ranks,
            steps=steps,
            evidence=rows.drop("pair").head(_EVIDENCE_ROWS),
            subject=f"stages {first} and {second}",
        )


def _with_clock_errors(run: Run, links: pl.DataFrame) -> pl.DataFrame:
    """Return links with clock_error_ns: by how much the clocks of both ranks may be off, 0 where that is not known."""
    residual_ns = run.offsets.group_by("rank").agg(pl.col("residual_ns").max().fill_null(0))
    for name in ("rank", "source_rank"):
        errors = residual_ns.rename({"rank": name, "residual_ns": f"{name}_error_ns"})
        links = links.join(errors, on=name, how="left", maintain_order="left")
    errors_ns = [pl.col(f"{name}_error_ns").fill_null(0) for name in ("rank", "source_rank")]
    return links.with_columns(pl.sum_horizontal(errors_ns).alias("clock_error_ns")).drop("^.*rank_error_ns$")
