"""The critical path of a save across ranks, by class of stall.

Ranks synchronize after planning, after writing and at the end. Between two synchronizations each works by itself and
the others wait for the slowest, so each such leg consists of the stages of the rank with most work of its own; waiting
is not work. The remaining time is waiting that no rank's work explains: lack of processors, up to the time in which a
rank was runnable but not running, and beyond that the synchronizations themselves.
"""

from collections.abc import Iterator
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import saves
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run

SERIALIZE, STAGING, WRITE, FSYNC, STRAGGLER, PLAN, GLOBAL_SYNC, CPU_CONTENTION = KINDS = (
    "serialize",
    "device-to-host",
    "write bandwidth",
    "fsync or metadata",
    "straggler",
    "plan or barrier",
    "global sync",
    "lack of processors",
)
BLOCKED, BACKGROUND = "blocked", "background"
COLUMNS = schema.columns(
    "save clock kind rank stage dur_ns whole_ns ratio envelope_ratio bytes", clock=pl.String, ratio=pl.Float64
)
LEGS = {
    conventions.PLAN: 0,
    conventions.STAGE: 1,
    conventions.SERIALIZE: 1,
    conventions.WRITE: 1,
    conventions.FSYNC: 1,
    conventions.FINISH: 2,
}
_KIND_OF = {
    conventions.PLAN: PLAN,
    conventions.STAGE: STAGING,
    conventions.SERIALIZE: SERIALIZE,
    conventions.WRITE: WRITE,
    conventions.FSYNC: FSYNC,
    conventions.FINISH: FSYNC,
}
_STORAGE = (conventions.WRITE, conventions.FSYNC)
# torch.save adds over 1,000 bytes per tensor: a file with this share of overhead contains small tensors.
SMALL_TENSORS_RATIO = 0.2
# A straggler takes twice the others' time for its bytes and files, and they wait for most of the difference.
_STRAGGLER_RATIO = 0.5
_WAITED_RATIO = 0.5


@run_fact
def parts(run: Run) -> pl.DataFrame:
    """Parts of each save; one row per save, clock and kind, the largest first. Columns COLUMNS.

    `clock` is BLOCKED for the training thread, BACKGROUND for the rest. `rank` and `stage` are those with most of that
    kind; `whole_ns` is the longest total over ranks and `ratio` the kind's share of it. `envelope_ratio` is the share
    of the written bytes that is not tensor data, and `bytes` what that rank wrote. With many small tensors, planning
    and waiting count as serializing: both grow with their number.
    """
    lines = run.table(saves.stages)
    if lines.is_empty():
        return schema.empty(COLUMNS)
    clock = pl.when("blocking").then(pl.lit(BLOCKED)).otherwise(pl.lit(BACKGROUND)).alias("clock")
    counts = pl.col("bytes", "files", "calls", "run_delay_ns")
    works = (
        lines.filter(pl.col("stage") != conventions.COMPLETE)
        .group_by("save", clock, "rank", "stage", maintain_order=True)
        .agg(pl.col("dur_ns").sum(), pl.when(counts.is_not_null().any()).then(counts.sum()))
    )
    rows = [
        {"save": save, "clock": clock} | part
        for (save, clock), stages in works.group_by("save", "clock", maintain_order=True)
        for part in _parts(stages)
    ]
    table = pl.DataFrame(rows, schema={name: COLUMNS[name] for name in COLUMNS if name != "ratio"})
    ratio = (pl.col("dur_ns") / pl.col("whole_ns")).alias("ratio")
    return table.with_columns(ratio).select(*COLUMNS).sort("dur_ns", descending=True, maintain_order=True)


@run_fact
def dominant(run: Run) -> pl.DataFrame:
    """Dominant class of each save's stall: the largest row of `parts` per save and clock, same columns."""
    largest = run.table(parts)
    return largest.unique(["save", "clock"], keep="first", maintain_order=True)


def _parts(stages: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the kinds of one save on one clock, each with its time, and the rank and stage with most of it."""
    totals = stages.filter(pl.col("stage") == conventions.TOTAL)
    whole_ns: int = max(totals["dur_ns"].to_list(), default=0)
    path = critical_path(stages)
    if not whole_ns or path.is_empty():
        return
    rank = path.filter(pl.col("leg") == 1)["rank"].first()
    straggling_ns = _excess_ns(stages, rank)
    envelope = _envelope_ratio(stages, rank)
    spent: dict[str, list[tuple[int, int, str]]] = {}
    for row in path.iter_rows(named=True):
        kind, took_ns = _KIND_OF[row["stage"]], row["dur_ns"]
        if row["stage"] == conventions.FSYNC and row["calls"]:
            kind = GLOBAL_SYNC
        elif row["stage"] in _STORAGE and straggling_ns:
            late_ns = min(took_ns, straggling_ns)
            spent.setdefault(STRAGGLER, []).append((late_ns, row["rank"], row["stage"]))
            straggling_ns, took_ns = straggling_ns - late_ns, took_ns - late_ns
        elif kind == PLAN and envelope > SMALL_TENSORS_RATIO:
            kind = SERIALIZE
        spent.setdefault(kind, []).append((took_ns, row["rank"], row["stage"]))
    left_ns = max(0, whole_ns - int(path["dur_ns"].sum()))
    delays = totals.drop_nulls("run_delay_ns").sort("run_delay_ns", "rank", descending=[True, False])
    for delayed, delay_ns in delays.select("rank", "run_delay_ns").head(1).rows():
        crowded_ns = min(left_ns, delay_ns)
        left_ns -= crowded_ns
        spent[CPU_CONTENTION] = [(crowded_ns, delayed, conventions.WAIT)]
    waits = stages.filter(pl.col("stage") == conventions.WAIT).sort("dur_ns", "rank", descending=[True, False])
    waiting = SERIALIZE if envelope > SMALL_TENSORS_RATIO else PLAN
    spent.setdefault(waiting, []).append((left_ns, next(iter(waits["rank"]), 0), conventions.WAIT))
    written = stages.filter(pl.col("stage") == conventions.WRITE)
    for kind, pieces in spent.items():
        _, main_rank, stage = max(pieces, key=lambda piece: piece[0])
        yield {
            "kind": kind,
            "rank": main_rank,
            "stage": stage,
            "dur_ns": sum(piece[0] for piece in pieces),
            "whole_ns": whole_ns,
            "envelope_ratio": envelope,
            "bytes": written.filter(pl.col("rank") == main_rank)["bytes"].first(),
        }


def critical_path(stages: pl.DataFrame) -> pl.DataFrame:
    """Stages on the critical path of one save: in each leg, those of the rank with most work.

    `stages` has columns rank, stage, dur_ns; adds leg and leg_ns, the work of that rank in it.
    """
    leg = pl.col("stage").replace_strict(LEGS, default=None, return_dtype=pl.Int64).alias("leg")
    work = stages.with_columns(leg).drop_nulls("leg")
    legs = work.group_by("leg", "rank").agg(pl.col("dur_ns").sum().alias("leg_ns"))
    slowest = legs.sort("leg", "leg_ns", "rank", descending=[False, True, False]).unique("leg", keep="first")
    return work.join(slowest, on=["leg", "rank"]).sort("dur_ns", "rank", descending=[True, False])


def _excess_ns(stages: pl.DataFrame, rank: Any) -> int:
    """Slowest rank's extra time in writing and syncing over what others take for as many bytes and files.

    Normalized, since ranks may write different amounts: under ZeRO-1 the first data-parallel rank writes a third more.
    """
    excess_ns = 0.0
    took_ns = 0
    for stage, per in ((conventions.WRITE, "bytes"), (conventions.FSYNC, "files")):
        rows = stages.filter((pl.col("stage") == stage) & (pl.col(per) > 0))
        rank_rows, other_rows = rows.filter(pl.col("rank") == rank), rows.filter(pl.col("rank") != rank)
        if rank_rows.is_empty() or other_rows.is_empty():
            continue
        usual = (other_rows["dur_ns"] / other_rows[per]).median()
        took_ns += rank_rows["dur_ns"][0]
        excess_ns += rank_rows["dur_ns"][0] - rank_rows[per][0] * float(str(usual))
    waits = stages.filter((pl.col("stage") == conventions.WAIT) & (pl.col("rank") != rank))
    waited_ns = max(waits["dur_ns"].to_list(), default=0)
    straggles = excess_ns > _STRAGGLER_RATIO * took_ns and waited_ns > _WAITED_RATIO * excess_ns
    return round(excess_ns) if straggles else 0


def _envelope_ratio(stages: pl.DataFrame, rank: Any) -> float:
    sizes = dict(stages.filter(pl.col("rank") == rank).select("stage", "bytes").rows())
    staged, written = sizes.get(conventions.STAGE), sizes.get(conventions.WRITE)
    return max(0.0, 1 - staged / written) if staged and written else 0.0
