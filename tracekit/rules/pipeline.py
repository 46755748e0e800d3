"""Rules on pipeline bubbles: more than the schedule's, unequal stages, and a schedule that makes large ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute.excess_time import EXTRA, LATE
from tracekit.analysis.parallelism import (
    late_ranks,
    pipeline_balance,
    pipeline_bubbles,
    pipeline_communication,
    rank_places,
    tensor_parallel,
)
from tracekit.analysis.parallelism.pipeline_balance import Balance
from tracekit.analysis.parallelism.pipeline_stages import PIPELINE
from tracekit.analysis.quality import trace_quality
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules import late_work, quoted_step
from tracekit.rules.advice import DeviceAdvice
from tracekit.rules.late_work import Subject
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40
FACTS: tuple[TraceFact, ...] = (
    *pipeline_bubbles.FACTS,
    *collective_instances.PEER_FACTS,
    *rank_places.FACTS,
    *pipeline_communication.MICRO_BATCH_FACTS,
    *late_ranks.FACTS,
    tensor_parallel.links,
)


@dataclass(frozen=True)
class PipelineBubble(Rule):
    """Pipeline bubbles above what the schedule and its micro-batches allow.

    What it does: reports pipelines that take `min_lost_ratio` of their time longer than the same forwards and backwards
    would in the same order, if each started as soon as its input is complete. It says how much of that is sends and
    receives, and how much the host. It is a warning from `warning_lost_ratio`, and below that if transfers between
    stages are slow: less than `slow_network_bytes_per_ns` GB/s between nodes, or than `min_link_ratio` of what the
    device's NVLink carries inside a node. Else it is information.

    Why it costs: while a rank waits for activations or gradients that another rank has computed already, its device is
    idle, and the delay propagates from stage to stage.

    How it is measured: the recorded actions of all ranks are scheduled again with their own durations on links without
    cost; the cost is the difference to the recorded time from the first action to the last. The message quotes the
    median step. What a slow link costs is subtracted (PIPE005), and what waiting for weights costs that are
    gathered for each micro-batch (PIPE004). Delays between the completion of an input and the action that needs it are
    communication where the rank sends or receives meanwhile, otherwise the host.

    How to fix: communication: post receives one micro-batch ahead and sends without waiting (batch_isend_irecv, an
    interleaved schedule with overlap_p2p_comm), keep neighboring stages inside a node, or send less (bf16, scatter-
    gather over the tensor-parallel ranks). Host: launch ahead (fewer synchronizations between micro-batches, CUDA
    graphs), load data before the first micro-batch.

    Blind spots: needs the traces of all ranks of a pipeline. On a CPU run a stage's threads compete for cores, which
    counts as longer actions.
    """

    code: ClassVar[str] = "PIPE001"
    facts: ClassVar[tuple[TraceFact, ...]] = FACTS
    min_lost_ratio: float = 0.03
    warning_lost_ratio: float = 0.05
    slow_network_bytes_per_ns: float = 5.0
    min_link_ratio: float = 0.25

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the median step loses enough."""
        passes = _passes(run)
        if passes.is_empty():
            return
        links_ns = int(run.table(pipeline_communication.links)["saved_ns"].max() or 0)  # type: ignore[arg-type]
        gathers_ns = int(run.table(pipeline_communication.micro_batch_passes)["delayed_ns"].max() or 0)  # type: ignore[arg-type]
        worst = median_row(passes, "lost_ratio", "duration_ns")
        lost_ns = max(0, worst["lost_ns"] - links_ns - gathers_ns)
        if lost_ns < self.min_lost_ratio * worst["duration_ns"]:
            return
        is_communication = worst["communication_ns"] >= worst["host_ns"]
        # The bandwidth of transfers between stages, where it is slow for links between nodes, or inside one.
        min_rates = {False: self.slow_network_bytes_per_ns * 1e9}
        if link := tensor_parallel.link_bandwidth(run, 2):
            min_rates[True] = self.min_link_ratio * link
        rates = pipeline_communication.transfer_rates(run) if is_communication else {}
        rate = min((rate for inside, rate in rates.items() if rate < min_rates.get(inside, 0.0)), default=None)
        is_warning = rate is not None or lost_ns >= self.warning_lost_ratio * worst["duration_ns"]
        fast_advice = _OVERLAP if is_communication else _LAUNCH
        parts = f"{units.share(worst['communication_share'])} of it while ranks send or receive"
        yield Finding(
            self.code,
            Severity.WARNING if is_warning else Severity.INFO,
            f"The pipeline takes {units.duration(lost_ns)} of {units.duration(worst['duration_ns'])} "
            f"({units.share(lost_ns / worst['duration_ns'])}) longer than its schedule allows in "
            f"{quoted_step.place(worst['step'])}, {parts}. Ranks are idle for {units.share(worst['bubble_ratio'])} of "
            f"it; without delays between ranks, the same actions leave {units.share(worst['ideal_bubble_ratio'])}."
            + (f" Transfers between stages only reach {units.rate(rate)}." if rate else ""),
            _SLOW if rate else fast_advice,
            impact=min(1.0, lost_ns / worst["duration_ns"]),
            cost_ns=lost_ns,
            confidence=0.7,
            claim="Pipeline stages wait for sends and receives" if is_communication else "Hosts delay pipeline stages",
            ranks=distinct(_rows_of(run, worst), "rank"),
            steps=distinct(passes, "step"),
            evidence=_evidence(run, worst),
            is_of_window=worst["step"] is None,
        )


@dataclass(frozen=True)
class UnbalancedStages(Rule):
    """Unbalanced stages: one stage of the pipeline takes longer, and all others wait for it.

    What it does: reports the stage that takes longest, by how much, and how layers should be divided instead, if that
    shortens the pipeline by `min_lost_ratio`. A stage whose layers take `min_slowdown` times as long as those of other
    stages is reported with what it costs, whether or not layers can be moved; one all of whose kernels are slower
    alike, as on a slow device, also below that, from `warning_lost_ratio`. The stage must be slow in `min_steps_ratio`
    of the steps. Below `warning_lost_ratio` it is information.

    Why it costs: in the steady state every micro-batch passes through every stage, so the pipeline is as fast as its
    slowest one. All other ranks are idle for the difference, once per micro-batch.

    How it is measured: the time of a stage is that of its forwards and backwards in a step, the median over replicas
    and steps, without replicas of late ranks, and without idle time in collectives that wait for late ranks, gather
    weights or scatter gradients; where ranks of a stage have no trace, without idle time in any collective. With the
    layers of each stage from run.json, the time of a layer is known; the output layer counts as many layers as it has
    parameters. Layers are moved one at a time while that shortens the slowest rank. The cost is the difference between
    two schedules of the recorded actions without delay between ranks: with the times as measured, and with the new
    ones; where layers are slow or unknown, with that stage as fast as the others. Its work is compared with theirs by
    operator, as in RANK001.

    How to fix: move the named layers (split points of pipeline_module, --decoder-first-pipeline-num-layers and
    --decoder-last-pipeline-num-layers of Megatron-LM, partition_method of DeepSpeed). Give the first and last stage
    fewer layers if embedding or output layer are large. If the layers themselves are slower, check that stage's
    devices and hosts.

    Blind spots: layers are taken as equal; experts and attention over different lengths are not. A rank that is slow in
    one replica only is a straggler (RANK001). Without layers in run.json, an output layer looks like a slow stage.
    Where ranks of a stage have no trace, one slow rank looks like a slow stage: the finding is information.
    """

    code: ClassVar[str] = "PIPE002"
    facts: ClassVar[tuple[TraceFact, ...]] = FACTS
    finding_facts: ClassVar[tuple[TraceFact, ...]] = late_ranks.EXCESS_FACTS
    min_lost_ratio: float = 0.005
    warning_lost_ratio: float = 0.02
    min_slowdown: float = 1.15
    min_steps_ratio: float = 0.75

    def _is_slow_device(self, run: Run, balance: Balance) -> bool:
        """Whether all kernels of the slowest stage are slower alike, and the others wait for it for long enough.

        Layers and their sizes make single kernels longer, a slow device all of them: then less is enough.
        """
        if balance.slow_saved_ns < self.warning_lost_ratio * balance.duration_ns:
            return False
        return pipeline_balance.uniform_slowdown(run, balance.slowest) > 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding on the slowest stage."""
        if run.table(pipeline_bubbles.pipeline_bubbles).is_empty():
            return
        balance = pipeline_balance.balance(run)
        if balance is None:
            return
        stage = balance.slowest
        is_slow = balance.slowdown(stage) >= self.min_slowdown or self._is_slow_device(run, balance)
        saved_ns = max(balance.saved_ns, balance.slow_saved_ns) if is_slow else balance.saved_ns
        lost_ratio = saved_ns / max(1, balance.duration_ns)
        if lost_ratio < self.min_lost_ratio or _slow_steps_ratio(run, balance, stage) < self.min_steps_ratio:
            return
        rows = run.table(pipeline_bubbles.pipeline_bubbles)
        ranks = distinct(rows.filter(pl.col("stage") == stage), "rank")
        of_rank = [other for other in balance.of_same_rank(stage) if balance.slowdown(other) >= self.min_slowdown]
        stages = sorted({stage, *of_rank}) if is_slow else [stage]
        stage_text = units.numbers("Stage", stages)
        is_alone = bool(collective_instances.ranks_without_peers(run))
        is_warning = lost_ratio >= self.warning_lost_ratio and not is_alone
        why = f" It has {balance.layers[stage]} of {sum(balance.layers)} layers." if balance.layers else ""
        if is_slow and balance.layers:
            slowdown = max(map(balance.slowdown, stages))
            whose = "Their" if len(stages) > 1 else "Its"
            why = f" {whose} layers take {slowdown:.2f} times as long as those of other stages."
        several = len(stages) > 1
        subject = Subject(
            stage_text, "the other stages", several, f", and the others wait for {'them' if several else 'it'}"
        )
        has_more = bool(balance.layers) and not is_slow
        excess = None if has_more else late_ranks.excess_of_stages(run, stages)
        reason = late_work.reason(run, excess, subject, lost_ns=saved_ns, balanced_ratio=1 - 1 / len(balance.stage_ns))
        claim = f"{stage_text} has {balance.layers[stage]} of {sum(balance.layers)} layers" if has_more else ""
        takes = f"{stage_text} {'take' if several else 'takes'} longer than the other stages"
        yield Finding(
            self.code,
            Severity.WARNING if is_warning else Severity.INFO,
            f"{stage_text} ({units.numbers('rank', ranks)}) "
            f"{'take up to' if len(stages) > 1 else 'takes'} {balance.ratio(stage):.2f} times as long as the other "
            f"stages: {units.duration(balance.stage_ns[stage])} per step, and the others wait "
            f"{units.duration(saved_ns)} of {units.duration(balance.duration_ns)} ({units.share(lost_ratio)}) for "
            f"{'them' if len(stages) > 1 else 'it'}."
            f"{why}{reason.evidence if reason else ''}{_ALONE if is_alone else ''}",
            reason.fix if reason and reason.kind in (EXTRA, LATE) else _move(run, balance, ranks, is_slow),
            claim=f"{claim or takes}{subject.tail}" if reason is None else reason.claim,
            impact=min(1.0, lost_ratio),
            cost_ns=saved_ns,
            confidence=0.8 if balance.layers else 0.6,
            ranks=ranks,
            steps=distinct(rows, "step"),
            evidence=rows.filter(pl.col("stage").is_in(stages))
            .select(
                "window",
                "rank",
                "step",
                "stage",
                "start_ns",
                "forward_ns",
                "backward_ns",
                "imbalance_ns",
                dur_ns="duration_ns",
            )
            .head(_EVIDENCE_ROWS),
            subject=f"stage {stage}",
            is_of_window=rows["step"].is_null().all(),
        )


@dataclass(frozen=True)
class FewMicroBatches(Rule):
    """Too few micro-batches for the length of the pipeline.

    What it does: reports pipelines whose schedule itself leaves ranks idle for more than `max_bubble_ratio` of the
    time, even with equal stages and no delay between ranks. With fewer than `few_per_rank` micro-batches for each rank
    of the pipeline, `few_bubble_ratio` is enough: interleaved and zero-bubble schedules have smaller bubbles. It says
    what twice the micro-batches, or two stages a rank, would leave, and the memory that costs.

    Why it costs: a pipeline of p ranks fills and drains once per step: p − 1 of m + p − 1 parts of the time are idle.

    How it is measured: the recorded actions of all ranks are scheduled with the mean time of all forwards and all
    backwards, on links without cost. Twice the micro-batches, each half as large, or twice the stages per rank halve
    that bubble: the cost is half of it.

    How to fix: divide the batch into more micro-batches (n_microbatches, --micro-batch-size), raise the batch
    (gradient accumulation), use an interleaved schedule (ScheduleInterleaved1F1B,
    --num-layers-per-virtual-pipeline-stage) or a zero-bubble one, or fewer pipeline stages.

    Blind spots: smaller micro-batches can make kernels less efficient, which is not priced. One micro-batch in each
    iteration that was found by repetition is not judged: it may be what repeats.
    """

    code: ClassVar[str] = "PIPE003"
    facts: ClassVar[tuple[TraceFact, ...]] = (*FACTS, trace_quality.data_quality)
    max_bubble_ratio: float = 0.33
    few_per_rank: float = 1.5
    few_bubble_ratio: float = 0.1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the schedule's own bubble is above the threshold."""
        passes = _passes(run)
        if passes.is_empty():
            return
        worst = median_row(passes, "even_ratio", "duration_ns")
        p, v, m = worst["pipeline_ranks"], worst["stages_per_rank"], worst["micro_batches"]
        if m == 1 and "steps_from_repetition" in run.table(trace_quality.data_quality)["kind"]:
            return  # what repeats is the micro-batch, not the step
        if worst["even_ratio"] <= (self.few_bubble_ratio if m < self.few_per_rank * p else self.max_bubble_ratio):
            return
        cost_ns = worst["even_ns"] // 2
        after = worst["even_ratio"] / (2 - worst["even_ratio"])
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{m} micro-batches are few for {p} pipeline ranks: the schedule itself leaves ranks idle for "
            f"{units.share(worst['even_ratio'])} of the time in {quoted_step.place(worst['step'])}. "
            f"{2 * m} micro-batches of half the size, or {2 * v} stages a rank, would leave {units.share(after)} and "
            f"save {units.duration(cost_ns)} of {units.duration(worst['duration_ns'])}.",
            f"Divide the batch into {2 * m} micro-batches (n_microbatches, --micro-batch-size): under 1F1B activations "
            f"take half the memory. Or {2 * v} stages a rank (ScheduleInterleaved1F1B, "
            f"--num-layers-per-virtual-pipeline-stage): activations take {_memory(p, 2 * v) / _memory(p, v):.2f} times "
            "the memory, and twice as many messages are sent. A larger batch of more micro-batches needs no more "
            "memory under 1F1B.",
            impact=min(1.0, cost_ns / worst["duration_ns"]),
            cost_ns=cost_ns,
            confidence=0.8,
            claim=f"{m} micro-batches are too few for {p} pipeline ranks",
            ranks=distinct(_rows_of(run, worst), "rank"),
            steps=distinct(passes, "step"),
            evidence=_evidence(run, worst),
            is_of_window=worst["step"] is None,
        )


_OVERLAP = (
    "Overlap sends and receives with compute: post receives one micro-batch ahead, do not wait for sends "
    "(batch_isend_irecv; overlap_p2p_comm of an interleaved schedule), keep neighboring stages inside a node, or send "
    "less: bf16 activations, scatter-gather over the tensor-parallel ranks."
)
_SLOW = (
    "Find out why transfers between stages are slow: NCCL_DEBUG=INFO shows the transport (NET/Socket instead of "
    "NET/IB, SHM instead of P2P), nvidia-smi topo -m and ibstat the links, nccl-tests (sendrecv_perf) their speed. "
    "Until then, send less (bf16 activations, scatter-gather over the tensor-parallel ranks)."
)
_LAUNCH = (
    "Let the host launch ahead: no synchronization (.item(), printing a loss) between micro-batches, data loaded "
    "before the first one, CUDA graphs or larger micro-batches if kernels are short."
)


def _memory(ranks: int, stages: int) -> float:
    """Return the first stage's activations relative to 1F1B (arXiv 2205.05198, section 4.2.3)."""
    return 1 + (ranks - 1) / (ranks * stages) if stages > 1 else 1.0


def _passes(run: Run) -> pl.DataFrame:
    """Return one row per pass of a pipeline: its time, means over ranks of the bubble, and what the schedule allows.

    A pass has no row if its recorded actions wait for each other in a circle, or take no time.
    """
    rows = run.table(pipeline_bubbles.pipeline_bubbles)
    cases = (
        run.table(pipeline_bubbles.schedule_cases)
        .group_by(PIPELINE)
        .agg(pl.col("even_duration_ns", "stages_duration_ns").first(), pl.col("even_ns").mean().round().cast(pl.Int64))
    )
    lost_ns = (pl.col("duration_ns") - pl.col("ideal_duration_ns")).clip(0)
    means = rows.unique([*PIPELINE, "rank"]).group_by(PIPELINE).agg(
        pl.col("start_ns", "duration_ns", "ideal_duration_ns").first(),
        pl.col("pipeline_ranks", "stages_per_rank", "micro_batches").first(),
        pl.col("bubble_ratio", "ideal_bubble_ratio").mean(),
        pl.col("communication_ns", "host_ns").sum(),
    )  # fmt: skip
    both = pl.col("communication_ns").clip(0) + pl.col("host_ns").clip(0)
    return (
        means.filter(pl.col("ideal_duration_ns") > 0)
        .join(cases, on=PIPELINE, nulls_equal=True)
        .with_columns(
            lost_ns.alias("lost_ns"),
            (lost_ns / pl.col("duration_ns")).alias("lost_ratio"),
            (pl.col("even_ns") / pl.col("even_duration_ns")).alias("even_ratio"),
            pl.when(both > 0)
            .then(pl.col("communication_ns").clip(0) / both)
            .otherwise(0.0)
            .alias("communication_share"),
        )
        .sort(PIPELINE)
    )


def _rows_of(run: Run, row: dict[str, Any]) -> pl.DataFrame:
    return quoted_step.rows_of(run.table(pipeline_bubbles.pipeline_bubbles), row, PIPELINE)


def _evidence(run: Run, row: dict[str, Any]) -> pl.DataFrame:
    rows = _rows_of(run, row).rename({"duration_ns": "dur_ns"})
    ordered = largest_first(rows, "bubble_ns", "rank", "stage").head(_EVIDENCE_ROWS)
    return ordered.select(
        "window", "rank", "step", "stage", "start_ns", "dur_ns", "bubble_ns", "ideal_bubble_ns", "warmup_ns",
        "steady_ns", "cooldown_ns", "communication_ns", "host_ns",
    )  # fmt: skip


def _slow_steps_ratio(run: Run, balance: Balance, stage: int) -> float:
    """Return the share of steps in which a stage exceeds the median of the others by half of its usual excess."""
    place = ["window", "step", "iteration"]
    is_own = pl.col("stage") == stage
    ratio = pl.col("stage_ns").filter(is_own).first() / pl.col("stage_ns").filter(~is_own).median()
    ratios = run.table(pipeline_balance.stage_times).group_by(place).agg(ratio.alias("ratio"))["ratio"]
    slow = ratios >= 1 + (balance.ratio(stage) - 1) / 2
    return int(slow.sum()) / max(1, len(slow))


_SLOW_STAGE = DeviceAdvice(
    "clocks, nvidia-smi -q -d PERFORMANCE; other jobs", "other processes on its cores; other jobs"
)


def _move(run: Run, balance: Balance, ranks: tuple[int, ...], is_slow: bool) -> str:
    stage = balance.slowest
    whose = (
        f"devices and hosts of ranks {units.ranges(ranks)}" if len(ranks) > 1 else f"device and host of rank {ranks[0]}"
    )
    signs = _SLOW_STAGE.suited_to(run)
    check = f"Check the {whose} ({signs}): the layers there are slower. " if is_slow and balance.layers else ""
    if not balance.layers or balance.better_layers == balance.layers:
        share = units.share(1 - 1 / balance.ratio(stage))
        rest = (
            f"Move about {share} of its work to other stages." if not balance.layers else "No whole layer can be moved."
        )
        return f"{check}{rest}"
    moved = [b - n for b, n in zip(balance.better_layers, balance.layers, strict=True)]
    to = [number for number, count in enumerate(moved) if count > 0]
    listed = rank_places.pipeline_of(run.manifest).stage_layers
    last = [
        layers[count:] if number < max(to) else layers[:-count]
        for number, layers in enumerate(listed)
        if (count := moved[number]) < 0
    ]
    names = units.numbers("layer", [layer for layers in last for layer in layers])
    return (
        f"{check}Move {names} to stage "
        f"{', '.join(map(str, to))}: layers per stage {_list(balance.better_layers)} instead of "
        f"{_list(balance.layers)}."
    )


_ALONE = " Not all ranks of its collectives have a trace, so it may be one slow rank rather than the stage."


def _list(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts))
