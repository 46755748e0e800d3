"""Judgements of ranks against each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import match, units
from tracekit.analysis import breakdown, causes, checkpoint, instances, waiting
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 40
_KEY = ("window", "step")


@dataclass(frozen=True)
class Straggler(Rule):
    """A rank that comes late to collectives again and again, while the others stand idle.

    What it does: reports a rank for which the others wait, without computing, for more than `min_wait_ratio` of the
    step, in at least `min_steps_ratio` of the steps from the first in which they do, and in more than one.

    Why it costs: a collective begins to move data when the last rank has come, so one slow rank slows all.

    How it is measured: collectives are found again on all ranks and clocks aligned by their ends. The part of a gap in
    compute in which a rank waits in a collective for the last to come is put to that rank's account; in each step the
    median over the other ranks counts. Of all waiting in collectives, hidden or not, more than half must be for it.
    Differences below the residual of the clocks are not told. Steps that save are left out.

    How to fix: look at what the late rank does before it comes: a slower or hotter device (clocks, nvidia-smi -q -d
    PERFORMANCE), more work (uneven batches or experts), a busy host (HOST001, HOST003), a neighbour on its node. Swap
    the node to tell hardware from data.

    Blind spots: needs the traces of all ranks of a group and three collectives that they share. Delays that move from
    rank to rank, as of uneven data, are no one's. A rank that is late because another collective held it up is blamed.
    """

    code: ClassVar[str] = "RANK001"
    facts: ClassVar[tuple[Fact, ...]] = (
        waiting.compute_gap_causes,
        match.calls,
        breakdown.by_step,
        checkpoint.save_spans,
    )
    min_wait_ratio: float = 0.05
    min_steps_ratio: float = 0.75

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per straggling rank."""
        pieces = run.across(waiting.compute_gap_causes_across).filter(pl.col("cause") == causes.PEER)
        accounts = _accounts(run, pieces)
        for (rank,), mine in accounts.group_by("peer_rank", maintain_order=True):
            worst = self._persists(mine)
            if worst is not None:
                yield self._finding(int(str(rank)), worst, mine, pieces)

    def _persists(self, mine: pl.DataFrame) -> dict[str, Any] | None:
        """Return the typical step of a rank that is late in most steps since it first was; None for one that is not."""
        late = mine.filter((pl.col("wait_ratio") >= self.min_wait_ratio) & (pl.col("share") > _MOST))
        if late.height < 2:
            return None
        first = late.sort("order").row(0, named=True)["order"]
        since = mine.filter(pl.col("order") >= first)
        if late.height < self.min_steps_ratio * since.height or since.height * 3 < mine.height:
            return None
        ordered = since.sort("wait_ratio", "order")
        return ordered.row((ordered.height - 1) // 2, named=True) | {"late": late.height, "since": since.height}

    def _finding(self, rank: int, worst: dict[str, Any], mine: pl.DataFrame, pieces: pl.DataFrame) -> Finding:
        late = mine.filter(pl.col("wait_ratio") >= self.min_wait_ratio)
        blamed = pieces.filter(pl.col("peer_rank") == rank)
        quoted = blamed.filter(pl.col("window") == worst["window"], pl.col("step") == worst["step"])
        others = blamed.join(quoted, on=["window", "rank", "start_ns"], how="anti")
        shown = [each.sort("dur_ns", "start_ns", descending=[True, False]) for each in (quoted, others)]
        first = mine.filter(pl.col("order") == late["order"].min()).row(0, named=True)
        return Finding(
            self.code,
            Severity.WARNING,
            f"Rank {rank} comes late: the other ranks stand idle for it for {units.duration(worst['waited_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['wait_ratio'])}) in the typical step "
            f"({worst['step']}), in {worst['late']} of {worst['since']} steps since step {first['step']}.",
            f"See what rank {rank} does before it comes: device clocks and temperature, uneven work, a busy host "
            "(HOST001, HOST003), neighbours on its node; swap the node to tell hardware from data.",
            impact=min(1.0, worst["wait_ratio"]),
            cost_ns=worst["waited_ns"],
            confidence=0.8,
            ranks=(rank,),
            steps=tuple(late["step"].unique().sort().to_list()),
            evidence=pl.concat([shown[0].head(_EVIDENCE_ROWS), shown[1].head(_EVIDENCE_ROWS)]).select(*_EVIDENCE),
            subject=f"rank {rank}",
        )


@dataclass(frozen=True)
class UnevenRanks(Rule):
    """Ranks that wait for each other, and no one of them is to blame alone.

    What it does: reports runs in which the ranks stand idle in collectives for others to come for more than
    `min_wait_ratio` of the step on average, where it is not one rank for which they wait.

    Why it costs: every rank goes at the pace of the one that is slowest at that moment, and the slowest changes.

    How it is measured: as RANK001 does, all waiting taken together, averaged over the ranks; the typical step is
    quoted. Silent where more than half of the waiting in most steps is for one and the same rank: that is RANK001's.
    In a run of one step RANK001 says nothing, so this does. Steps that save are left out.

    How to fix: give ranks the same work (pack sequences to one length, balance experts), and hosts the same pace: what
    makes single ranks late at times is gc, a data loader, neighbours on the node. HOST001 and HOST003 name ranks whose
    host is late. Fewer collectives per step meet fewer delays.

    Blind spots: needs the traces of all ranks of a group and three collectives that they share. Waiting below the
    residual of the clocks is not told. What would be saved by evening out is at most what is said.
    """

    code: ClassVar[str] = "RANK003"
    facts: ClassVar[tuple[Fact, ...]] = Straggler.facts
    min_wait_ratio: float = 0.1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the typical step exceeds the threshold and no rank is to blame alone."""
        pieces = run.across(waiting.compute_gap_causes_across).filter(pl.col("cause") == causes.PEER)
        steps = _steps(run)
        means = _waits(steps, pieces)
        worst = means.sort("wait_ratio", "order").row((means.height - 1) // 2, named=True) if means.height else None
        if worst is None or worst["wait_ratio"] <= self.min_wait_ratio or _has_one_to_blame(_accounts(run, pieces)):
            return
        quoted = pieces.filter(pl.col("window") == worst["window"], pl.col("step") == worst["step"])
        waited = _shares(quoted)
        longest = quoted.group_by("rank").agg(pl.col("dur_ns").sum()).sort("dur_ns", "rank", descending=[True, False])
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Ranks wait for each other: for {units.duration(worst['waited_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['wait_ratio'])}) in the typical step "
            f"({worst['step']}) a rank stands idle on average until others come, {_in_words(waited)}.",
            f"See what makes {_named(waited)} late: uneven work (sequence lengths, experts), or a host that falls "
            "behind at times (HOST001, HOST003, gc, neighbours on its node).",
            impact=min(1.0, worst["wait_ratio"]),
            cost_ns=worst["waited_ns"],
            confidence=0.7,
            ranks=tuple(longest["rank"].sort().to_list()),
            steps=tuple(means.filter(pl.col("wait_ratio") > self.min_wait_ratio)["step"].unique().sort().to_list()),
            evidence=quoted.sort("dur_ns", "start_ns", descending=[True, False])
            .head(_EVIDENCE_ROWS)
            .select(*_EVIDENCE),
        )


_MOST = 0.5
_NAMED = 3
_EVIDENCE = ("window", "rank", "step", "phase", "unit", "peer_rank", "collective_id", "start_ns", "dur_ns")


def _has_one_to_blame(accounts: pl.DataFrame) -> bool:
    """Whether most waiting is for one and the same rank in most steps, of which there are several."""
    most = accounts.filter(pl.col("share") > _MOST).group_by("peer_rank").len()
    steps = accounts["order"].n_unique()
    return steps > 1 and bool((most["len"] * 2 > steps).any())


def _waits(steps: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return how long the ranks wait in each step on average: the columns of `_steps`, waited_ns, wait_ratio."""
    total = pieces.group_by(_KEY).agg(pl.col("dur_ns").sum())
    return (
        steps.join(total, on=_KEY, how="left", maintain_order="left")
        .with_columns((pl.col("dur_ns").fill_null(0) // pl.col("rank")).cast(pl.Int64).alias("waited_ns"))
        .with_columns((pl.col("waited_ns") / pl.col("duration_ns")).alias("wait_ratio"))
    )


def _shares(pieces: pl.DataFrame) -> list[tuple[int, float]]:
    """Return for which ranks most of the waiting is, and its share, the most first."""
    total = int(pieces["dur_ns"].sum())
    by_peer = pieces.drop_nulls("peer_rank").group_by("peer_rank").agg(pl.col("dur_ns").sum())
    most = by_peer.sort("dur_ns", "peer_rank", descending=[True, False]).head(_NAMED)
    return [(rank, waited_ns / total) for rank, waited_ns in most.select("peer_rank", "dur_ns").iter_rows()]


def _in_words(shares: list[tuple[int, float]]) -> str:
    if not shares:
        return "for whom cannot be told within what the clocks allow"
    return "most for " + ", ".join(f"rank {rank} ({units.share(share)})" for rank, share in shares)


def _named(shares: list[tuple[int, float]]) -> str:
    return "ranks " + ", ".join(str(rank) for rank, _ in shares) if len(shares) > 1 else "single ranks"


def _steps(run: Run) -> pl.DataFrame:
    """Return the steps that save on no rank, numbered by `order`: their median duration_ns, and rank, how many ran."""
    saving = run.table(checkpoint.save_spans).drop_nulls("step").select(_KEY).unique()
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0).drop_nulls("step")
    steps = steps.group_by(_KEY).agg(pl.col("duration_ns").median().cast(pl.Int64), pl.col("rank").n_unique())
    return steps.join(saving, on=_KEY, how="anti").sort(_KEY).with_columns(pl.int_range(pl.len()).alias("order"))


def _accounts(run: Run, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return for each step and rank that others waited for how long their median did: waited_ns, wait_ratio, share.

    share is the rank's of all waiting for known ranks in the step, hidden or not; order numbers the steps.
    """
    steps = _steps(run)
    per_rank = pieces.drop_nulls("peer_rank").group_by(*_KEY, "peer_rank", "rank").agg(pl.col("dur_ns").sum())
    known = per_rank.select(pl.col("peer_rank").unique())
    waits = (
        per_rank.group_by(*_KEY, "peer_rank")
        .agg(pl.col("dur_ns").sort(descending=True).alias("each"))
        # The median over all other ranks: those without a row waited 0.
        .join(steps.select(*_KEY, pl.col("rank").alias("ranks")), on=_KEY)
        .with_columns(pl.col("each").list.get((pl.col("ranks").cast(pl.Int64) - 1) // 2, null_on_oob=True))
        .select(*_KEY, "peer_rank", pl.col("each").fill_null(0).alias("waited_ns"))
    )
    keys = [*_KEY, "peer_rank"]
    every = steps.join(known, how="cross").join(waits, on=keys, how="left").join(_in_all(run), on=keys, how="left")
    waited = pl.col("waited_ns").fill_null(0)
    return (
        every.with_columns(waited.alias("waited_ns"))
        .with_columns(
            (waited / pl.col("duration_ns")).alias("wait_ratio"),
            pl.col("share").fill_null(0.0),
        )
        .sort("peer_rank", "order")
    )


def _in_all(run: Run) -> pl.DataFrame:
    """Return for each step and rank its share of all waiting in collectives for ranks that are known."""
    last = run.across(instances.instances).select("window", "instance", pl.col("last_rank").alias("peer_rank"))
    waits = run.across(instances.waits).join(last.drop_nulls(), on=["window", "instance"])
    every = waits.group_by(*_KEY, "peer_rank").agg(pl.col("wait_ns").sum())
    share = pl.col("wait_ns") / pl.col("wait_ns").sum().over(_KEY)
    return every.select(*_KEY, "peer_rank", share.fill_nan(0.0).alias("share"))
