"""Slow links between two ranks of an expert-parallel group, by when these leave its all-to-alls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.analysis.parallelism import expert_load
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.rules.rule import Finding, Severity, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40
_STEP = ["window", "step"]
_LINK = ["rank", "peer"]
_MIN_LINKS = 6
"""Links of four ranks: of fewer, one slow link is a third of all, and the median no usual time."""
_FIX = (
    "Run nccl-tests (sendrecv_perf, alltoall_perf) between ranks {ranks} alone. Check the transport (NCCL_DEBUG=INFO), "
    "link errors (ibstat, perfquery, nvidia-smi nvlink -e) and the route between their devices (nvidia-smi topo -m)."
)


@dataclass(frozen=True)
class Thresholds:
    """Code and thresholds of the rule that reports slow links."""

    code: str
    min_slowdown: float
    min_steps_ratio: float
    min_lost_ratio: float


def findings(run: Run, rule: Thresholds) -> Iterator[Finding]:
    """Yield a finding for each link that is slow in most steps: the transfer between its two ranks ends late."""
    if run.table(expert_load.expert_pairs).is_empty():
        return
    links = _links(run)
    step_count = links.select(_STEP).n_unique()
    slow = links.filter(pl.col("ratio") >= rule.min_slowdown)
    for (rank, peer), rows in slow.group_by(_LINK, maintain_order=True):
        if rows.height >= max(2, rule.min_steps_ratio * step_count):
            yield _finding(rule, (int(rank), int(peer)), rows, step_count)


def _links(run: Run) -> pl.DataFrame:
    """Time of the transfers over each link in each step, and what is usual for its bytes.

    Columns window, step, rank, peer (of a higher number), transfer_ns, usual_ns, ratio, bytes, duration_ns. A rank
    leaves an all-to-all when all that it sends and receives has arrived: the ends of one link show only where both of
    its ranks leave late. Usual is the median over the links of a step by the bytes of that rank of both which sends or
    receives less, so that overloaded experts are no slow link.
    """
    pairs = run.table(expert_load.expert_pairs).filter(pl.col("rank") != pl.col("peer")).drop_nulls("transfer_ns")
    sums = pairs.group_by(*_STEP, "rank").agg(sent=pl.col("bytes").sum())
    received = pairs.group_by(*_STEP, "peer").agg(received=pl.col("bytes").sum()).rename({"peer": "rank"})
    loads = sums.join(received, on=[*_STEP, "rank"], nulls_equal=True)
    load_bytes = pl.max_horizontal("sent", "received")
    loads = loads.select(*_STEP, "rank", load=load_bytes.clip(1))
    one_way = pairs.filter(pl.col("rank") < pl.col("peer"))
    peer_loads = loads.rename({"rank": "peer", "load": "peer_load"})
    loaded = one_way.join(loads, on=[*_STEP, "rank"], nulls_equal=True).join(
        peer_loads, on=[*_STEP, "peer"], nulls_equal=True
    )
    load = pl.min_horizontal("load", "peer_load")
    usual_ns = (pl.col("transfer_ns") / load).median().over(_STEP) * load
    links = loaded.filter(pl.len().over(_STEP) >= _MIN_LINKS).with_columns(
        usual_ns.round().cast(pl.Int64).alias("usual_ns")
    )
    durations = run.table(breakdown.by_step).group_by(_STEP).agg(pl.col("duration_ns").max())
    timed = links.filter(pl.col("usual_ns") > 0).join(durations, on=_STEP, nulls_equal=True)
    return timed.with_columns(ratio=pl.col("transfer_ns") / pl.col("usual_ns")).sort(*_STEP, *_LINK)


def _finding(rule: Thresholds, ranks: tuple[int, int], rows: pl.DataFrame, step_count: int) -> Finding:
    excess = rows.with_columns(extra_ns=pl.col("transfer_ns") - pl.col("usual_ns"))
    worst: dict[str, Any] = median_row(excess, "extra_ns", "step")
    lost_ratio = worst["extra_ns"] / worst["duration_ns"]
    pair = " and ".join(map(str, ranks))
    return Finding(
        rule.code,
        Severity.WARNING if lost_ratio >= rule.min_lost_ratio else Severity.INFO,
        f"What ranks {pair} exchange in all-to-alls takes {worst['ratio']:.1f} times as long as between other ranks: "
        f"{units.duration(worst['transfer_ns'])} instead of {units.duration(worst['usual_ns'])} in step "
        f"{worst['step']} (the median by this measure), in {rows.height} of {step_count} steps.",
        _FIX.format(ranks=pair),
        impact=min(1.0, lost_ratio),
        cost_ns=worst["extra_ns"],
        confidence=0.7,
        ranks=ranks,
        steps=distinct(rows, "step"),
        evidence=largest_first(excess, "extra_ns", "step").head(_EVIDENCE_ROWS),
        subject=f"link of ranks {pair}",
        claim=f"The link between ranks {pair} is slower than those between other ranks",
        is_of_window=worst["step"] is None,
    )
