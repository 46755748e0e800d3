"""Rules on late ranks: a straggler, a late group, ranks that straggle in turn or occasionally."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute.excess_time import EXTRA, LARGER, LATE, LONGER, SLOWER, ExcessTime
from tracekit.analysis.host import cpu_contention
from tracekit.analysis.parallelism import device_comparison, late_ranks, rank_places, stragglers
from tracekit.analysis.parallelism import outlier_steps as single_stalls
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown, log_contents
from tracekit.model import units
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.device_time import STRAGGLER, UNEVEN_WORK
from tracekit.replay.graph.causes.stalls import OCCASIONAL_STRAGGLER, Removal
from tracekit.rules import late_work, outlier_steps, quoted_step, recurrence
from tracekit.rules.advice import DeviceAdvice
from tracekit.rules.device_slowdowns import compare_late_devices
from tracekit.rules.further_stragglers import further_stragglers, without_ranks
from tracekit.rules.late_work import Reason, Subject
from tracekit.rules.model_parallel import OverloadedExperts, overloaded_ranks
from tracekit.rules.quoted_step import describe_loss
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40
_STEP = ("window", "step")
_MOST = 0.5
_MIN_LATEST_RATIO = 2 / 3
"""Share of the waiting from which a rank is named; below, a second one may be as late (Megatron: 52% and 42%)."""
_MIN_OF_LATEST = 0.1
"""Share of the waiting for the latest rank below which another one is not named: it is last by chance."""
_MAX_NAMED = 3
_FEW_STEPS = 2
"""Steps of which the range is their spread: quartiles of two are interpolated, and one may be four times the other."""
_WITHOUT_PYTORCH = (
    "Give each rank the same amount of work, and check the host of the late one: other processes on its cores, input "
    "and output, clocks and temperature of its device (nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE)."
)
_MOST_BEYOND_WAIT = 2
"""How many times as long as ranks are awaited their calls may take longer: what differs by more is not why they are."""
_MIN_RECURRING = 3
"""Delays from which they recur: one of each of two ranks may be two pauses (faults/no-prefetch)."""
_MORE_THAN_LEAD = 1.5
"""How many times as far above the mean as above the second rank the longest compute is from which work is uneven."""


@dataclass(frozen=True)
class Straggler(Rule):
    """A straggler: a rank that arrives late at collectives in most steps, while the others are idle.

    What it does: reports a rank for which the others lose more than `min_wait_ratio` of the step, in at least
    `min_steps_ratio` of the steps since the first such step, and in more than one. It names what the rank takes longer
    for: calls that the others do not have, larger inputs, slower kernels, or a late host. Ranks that arrive late
    together, such as those of one node, belong to RANK004.

    Why it costs: a collective moves data only after the last rank arrives, so one slow rank slows all.

    How it is measured: collectives are matched across ranks, with clocks aligned by their ends. The wait of a rank in
    collectives is attributed to the last rank with a trace, as far as the waiting rank computes nothing meanwhile, or
    is idle in collectives for longer than the late rank is: where compute overlaps the wait, the following collectives
    start late instead. Extra time that the late rank itself spends in collectives is a slow link (RANK002) and
    subtracted. In each step the median over the other ranks counts. More than half of all waiting in collectives must
    be for this rank, or its own work must take longer than that of the others by half of the loss. Ranks that another
    straggler hides, or outweighs, are found in the waiting that remains without that one, if their own work takes
    longer; what they cost alone may be nothing, and the claim says so. Where the loss varies by more than
    `max_spread_ratio` (interquartile range over median; of two steps, their difference over the mean) between steps, it
    may be noise that meets this rank by chance: then it is reported if the probability is at most `max_chance` that
    some rank is the latest as often though all are late alike. Differences below the clock error are ignored. Steps
    that save are left out. Where no steps are marked, or only one, the window's collectives are divided into four
    parts: the rank must have most of the waiting in three of them, and no single collective more than a quarter of it.
    A rank that is late because it waited for a rank of another process group passes the blame on to that one; so does a
    rank that waited longer for sends and receives of its pipeline than the other ranks of its stage did. The cost is
    the saving of a replay in which nobody waits for the rank (`tracekit whatif`): while the others wait, their hosts
    run ahead, so that part of the waiting is hidden. Where the late host loads data, synchronizes, allocates or saves
    for longer than the others, or its device is idle for longer meanwhile, or later because that host alone waited for
    it, and that has a warning, it is the cost without that; and without a single stall of the rank (STEP001) that most
    of the waiting is for. Below `min_cost_ratio` of the step, or where the others would wait even less without another
    rank, the finding is information; that rank is the one for which they wait most in all steps, or in those without a
    single stall (STEP001). Waits between pipeline stages do not count: they are the pipeline's bubble. Ranks that are
    late because their experts are overloaded belong to EP001. Where the metrics log has counters of the GPUs (`record
    --device-metrics`), the clock of the late rank is compared with the median of the others in the late steps: below
    97% in at least half of them, its hardware is slower, and the message names the throttle reason that most of the
    others do not have.

    How to fix: remove extra calls, or divide them among the ranks; give each rank as many tokens (packing, bucketing by
    length, balanced experts). Where the GPU is slower, remove the cause: cooling, power supply, power limit, a clock
    setting. Where the host is late, see what Python does before the launches, and which other processes run (HOST001,
    HOST003). Without counters, record with `--device-metrics`, or move the rank to another node, to separate hardware
    from data.

    Blind spots: needs traces of several ranks of a group and three shared collectives; a rank without a trace may
    arrive even later. Delays that move between ranks, as with uneven data, belong to RANK003. A rank that another
    collective delayed is blamed for the part of the delay that its peers do not have.
    """

    code: ClassVar[str] = "RANK001"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *late_ranks.FACTS, *OverloadedExperts.facts, *device_comparison.FACTS, *outlier_steps.OutlierStep.facts,
    )  # fmt: skip
    finding_facts: ClassVar[tuple[TraceFact, ...]] = (
        *late_ranks.EXCESS_FACTS, log_contents.reading_issues, *cpu_contention.FACTS,
    )  # fmt: skip
    min_wait_ratio: float = 0.03
    min_steps_ratio: float = 0.75
    max_spread_ratio: float = 0.6
    max_chance: float = 0.05
    min_cost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per straggling rank."""
        yield from (self._finding(run, late) for late in self.persistent(run) if len(late["late_ranks"]) == 1)

    def persistent(self, run: Run) -> Iterator[dict[str, Any]]:
        """Yield the median step of each rank, or of ranks that are late together for one cause, that straggles.

        First those for which most of the waiting is, then `further_stragglers`.
        """
        yield from _stragglers(run, Straggler(**{field.name: getattr(self, field.name) for field in fields(self)}))

    def candidates(self, run: Run, min_share: float) -> Iterator[dict[str, Any]]:
        """Yield late ranks as `persistent`, for which more than `min_share` of all waiting is in most steps."""
        costs = run.table(stragglers.straggler_costs)
        overloaded = overloaded_ranks(run) if costs.height else frozenset()
        for (_,), rank_steps in costs.group_by("late_rank", maintain_order=True):
            late = tuple(rank_steps["late_ranks"][0])
            if rank_places.is_of_stages(run, list(late)) or overloaded.issuperset(late):
                continue
            worst = self._persistent(run, rank_steps.sort("order"), min_share)
            if worst is None or _is_late_by_chance(run, late, rank_steps, worst):
                continue
            parts = [late] if len(late) == 1 else late_ranks.divide_late_group(run, late, worst["late"].select(_STEP))
            yield from (worst | {"late_ranks": part, "group": late} for part in parts)

    def _persistent(self, run: Run, rank_steps: pl.DataFrame, min_share: float) -> dict[str, Any] | None:
        """The median step of a rank that is late in most steps since its first late one; else None.

        Without marked steps, or of a single one, the worst window in which the rank is late throughout.
        """
        late = rank_steps.filter(pl.col("lost_ratio") >= self.min_wait_ratio)
        if rank_steps["step"].is_null().all() or rank_steps.height == 1:
            throughout = _led_throughout(run, self.min_steps_ratio)
            late = late.join(throughout, on=["window", "late_rank"], maintain_order="left")
            if late.is_empty():
                return None
            return largest_first(late, "lost_ratio", "order").row(0, named=True) | {"late": late}
        late = late.filter(pl.col("share") > min_share)
        if late.height < 2:
            return None
        since = rank_steps.filter(pl.col("order") >= late["order"][0])
        if late.height < self.min_steps_ratio * since.height or since.height * 3 < rank_steps.height:
            return None
        is_steady = _spread_ratio(since["lost_ratio"]) <= self.max_spread_ratio
        sides = len(run.ranks) / len(rank_steps["late_ranks"][0])
        if not is_steady and _chance(late.height, since.height, sides) > self.max_chance:
            return None
        return median_row(since, "lost_ns", "order") | {"late": late, "since": since.height, "first": since["step"][0]}

    def _finding(self, run: Run, worst: dict[str, Any]) -> Finding:
        late: pl.DataFrame = worst["late"]
        is_of_window, is_in_parts = worst["step"] is None, "since" not in worst
        ranks = tuple(worst["late_ranks"])
        stragglers_before: tuple[int, ...] = worst.get("stragglers_before", ())
        late_calls = without_ranks(run, worst.get("stragglers_before", ())).table(stragglers.late_calls)
        waits = late_calls.filter(pl.col("late_rank") == worst["late_rank"])
        if worst["late_rank"] not in ranks:  # the calls name the first of the group, with which this rank is late
            waits = waits.with_columns(late_rank=pl.lit(ranks[0], waits.schema["late_rank"]))
        in_step = quoted_step.is_of(worst, _STEP)
        wait_tables = [largest_first(waits.filter(rows), "wait_ns", "start_ns") for rows in (in_step, ~in_step)]
        several = len(ranks) > 1
        name = units.numbers("rank", ranks)
        place = rank_places.shared_place(run, ranks) if several else None
        is_latest = "stragglers_before" in worst or worst["group"] in _latest_groups(run)
        late_steps = late.select(_STEP)
        named = name.capitalize() if place is None else f"{place[0].upper()}{place[1:]} ({name})"
        others = late_work.names(ranks, run.ranks)
        tail = f", and {'the others wait' if len(run.ranks) - len(ranks) > 1 else f'{others} waits'} for "
        tail += "them" if several else "it"
        subject = Subject(named, others, several, tail)
        hidden = tuple(rank for rank in worst["group"] if rank not in ranks)
        left_out = (*hidden, *stragglers_before)
        excess = late_ranks.excess_time(run, late_ranks.of_steps(ranks, late_steps), left_out=left_out)
        lost_ns = worst["lost_ns"] if not hidden or excess is None else min(worst["lost_ns"], max(excess.total_ns, 0))
        reason = _reason(run, ranks, excess, lost_ns, subject)
        apart = ""
        if hidden:
            apart = f" {units.numbers('rank', hidden).capitalize()} {'are' if len(hidden) > 1 else 'is'} late at the "
            apart += "same collectives for another reason: that one is to be repaired too."
        if stragglers_before:
            apart += f" This waiting is without {units.numbers('rank', stragglers_before)}, late for another reason."
        devices, advice = compare_late_devices(run, ranks, late_steps, reason)
        if is_in_parts:
            whole = "the window" if is_of_window else quoted_step.place(worst["step"])
            steps = f"{whole}, and most of the waiting is for it in {worst['led']} of {worst['parts']} parts of it"
        else:
            steps = f"{quoted_step.place(worst['step'])}, and in {late.height} of {worst['since']} steps "
            steps += f"since step {worst['first']}"
        sums = wait_tables[0].group_by("op", "unit", "phase").agg(pl.col("wait_ns").sum())
        longest = largest_first(sums, "wait_ns", "op", "unit", "phase").row(0, named=True)
        unit = f" of {longest['unit']}" if longest["unit"] else ""
        phase = f" in {longest['phase']}" if longest["phase"] else ""
        op = (longest["op"] or "collective").replace("_", "-")
        return Finding(
            self.code,
            Severity.WARNING if is_latest else Severity.INFO,
            f"The other ranks lose {describe_loss(worst)} to waiting for {name} in {steps}.{_idle(worst)} "
            f"{'They arrive' if several else 'It arrives'} last at {worst['late_calls']} of {worst['calls']} "
            f"collectives, with the longest waits at the {op}{unit}{phase}.{reason.evidence}{apart}{devices}",
            advice,
            impact=min(1.0, lost_ns / max(1, worst["duration_ns"])),
            cost_ns=lost_ns,
            confidence=(0.8 if worst["is_whole"] else 0.7) - (0.1 if is_in_parts else 0.0),
            ranks=ranks,
            steps=distinct(late, "step"),
            what_if=WhatIf(STRAGGLER, self.min_cost_ratio) if is_latest else None,
            evidence=pl.concat(rows.head(_EVIDENCE_ROWS) for rows in wait_tables).select(
                "window", "rank", "step", "phase", "unit", "op", "late_rank", "start_ns", "dur_ns", "wait_ns"
            ),
            claim=reason.claim,
            subject=name,
            is_of_window=is_of_window,
        )


@memoize
def _latest_groups(run: Run) -> tuple[tuple[int, ...], ...]:
    """The rank or group that the others wait for most, in all steps and in those without a single stall.

    A stall of one step may be longer than what a rank is late by in all of them: it is STEP001's, and no straggler.
    """
    stalled = run.table(single_stalls.outlier_steps).select(_STEP).unique()
    return (late_ranks.latest(run), late_ranks.latest(run, left_out=stalled))


@memoize
def _stragglers(run: Run, rule: Straggler) -> tuple[dict[str, Any], ...]:
    """The late ranks of `Straggler.persistent`, by the thresholds of a rule."""
    most_awaited = tuple(rule.candidates(run, _MOST))
    others = further_stragglers(
        run, most_awaited, lambda rest: rule.candidates(rest, 0.0), min_excess_ratio=rule.min_wait_ratio
    )
    return (*most_awaited, *others)


def _idle(worst: dict[str, Any]) -> str:
    """Sentence on the idle time of other ranks for late ranks, which pages show, if not the time lost; else ''."""
    idle, lost = units.duration(worst["idle_ns"]), units.duration(worst["lost_ns"])
    if idle == lost:
        return ""
    if worst["idle_ns"] < worst["lost_ns"]:
        return f" They idle for {idle} of it; compute hides the rest of their waiting, which makes them late in turn."
    slower = units.duration(worst["idle_ns"] - worst["lost_ns"])
    return f" They idle for {idle}, of which {slower} is a longer transfer, not lateness."


def _spread_ratio(losses: pl.Series) -> float:
    """Interquartile range of losses over their median; of two, their difference over the mean.

    >>> round(_spread_ratio(pl.Series([0.07, 0.21])), 2), round(_spread_ratio(pl.Series([0.07, 0.14, 0.21])), 2)
    (1.0, 0.5)
    """
    quantiles = (0.25, 0.5, 0.75) if len(losses) > _FEW_STEPS else (0.0, 0.5, 1.0)
    low, middle, high = (losses.quantile(q, "linear") or 0.0 for q in quantiles)
    return (high - low) / middle if middle else 0.0


def _chance(late_count: int, count: int, sides: float) -> float:
    """Probability that one of some ranks is late in this many of the steps, or more, if all are late alike.

    >>> round(_chance(4, 4, 8), 4), _chance(2, 2, 2)
    (0.002, 0.5)
    """
    ratio = 1 / max(sides, 1)
    tail = (math.comb(count, k) * ratio**k * (1 - ratio) ** (count - k) for k in range(late_count, count + 1))
    return min(1.0, sides * sum(tail))


def _led_throughout(run: Run, min_parts_ratio: float) -> pl.DataFrame:
    """Return the ranks for which most of the waiting is in most parts of a window, none of it mainly in one call."""
    is_late = pl.col("led") >= min_parts_ratio * pl.col("parts")
    return run.table(stragglers.late_parts).filter(is_late & (pl.col("largest_ratio") * stragglers.PARTS <= 1))


_RECORD = (
    "Record a window of {ranks} and of another rank with the profiler (tracekit record -- python train.py) to see what "
    "takes longer; check GPU clocks, temperature and other jobs on the node."
)
_LAUNCHED_LATE = (
    " Collectives are launched late: {} of the waiting is for collectives that start directly after launch."
)
_MIN_LAUNCHED_LATE = 0.25


def _reason(run: Run, ranks: tuple[int, ...], excess: ExcessTime | None, lost_ns: int, subject: Subject) -> Reason:
    """What the late ranks take longer for, by their work; else by when their collectives are launched.

    Of unknown kind where neither shows it.
    """
    if log_contents.has_collectives_only(run):
        claim = f"{subject.name} {subject.verb('arrives', 'arrive')} late at collectives{subject.tail}"
        return Reason(
            "", claim, " What comes before was not recorded.", _RECORD.format(ranks=units.numbers("rank", ranks))
        )
    balanced_ratio = 1 - len(ranks) / len(run.ranks)
    if reason := late_work.reason(run, excess, subject, lost_ns=lost_ns, balanced_ratio=balanced_ratio):
        return reason
    who = units.numbers("rank", ranks)
    ratio = late_ranks.launched_late_ratio(run, ranks)
    if ratio >= _MIN_LAUNCHED_LATE:
        claim = f"{subject.has} host launches collectives late{subject.tail}"
        evidence = _LAUNCHED_LATE.format(units.share(ratio))
        return Reason(LATE, claim, evidence, late_work.SLOW_HOST.suited_to(run).format(ranks=who))
    claim = f"{subject.name} {subject.verb('arrives', 'arrive')} late at collectives{subject.tail}"
    return Reason("", claim, "", late_work.UNKNOWN.suited_to(run).format(ranks=who))


@dataclass(frozen=True)
class UnevenRanks(Rule):
    """Ranks that wait for each other, without a single straggler.

    What it does: reports runs in which ranks are idle in collectives for more than `min_wait_ratio` of the step on
    average because other ranks arrive late, and no single rank causes most of it.

    Why it costs: every collective waits for the rank that is slowest at that moment, and the slowest rank changes.

    How it is measured: as in RANK001, but for all late ranks together, averaged over the ranks; the message quotes the
    median step. Not reported if ranks straggle as RANK001 or RANK004 report; steps of RANK005 and those that save are
    left out. The work of the rank that the others wait for most in a step is compared with theirs, as in RANK001. If
    two thirds of the waiting are for one rank in more than half of the steps, or half of all waiting would end if it
    arrived with the second-last one, the finding names it, with the saving of a replay in which nobody waits for it;
    else it says how ranks vary. A named rank is priced as in RANK001: before late launches, which are priced without
    it. Where ranks take turns within a step, calls are compared between the same collectives: at how many each rank is
    last, and what it takes longer for before these. Where ranks vary and more than half of the waiting ends in a replay
    without the causes that have a warning, such as late launches, the finding is information, with the cost of the
    rest. Where ranks take turns, do the same work, and one or two collectives have half of the waiting, it is
    information: single pauses explain it as well. Below `min_wait_ratio`, the rank that the others wait for most is
    information if a replay in which nobody waits for it saves `min_latest_ratio` of the step; a warning if STEP001
    reports a stall of it that is no longer than its pauses in the other steps.

    Where the waiting is shorter, the finding is about uneven work if in each step the rank that computes longest does
    so for `min_uneven_ratio` longer than ranks do in the mean; the cost is the saving of a replay in which all compute
    as long as that.

    How to fix: give ranks the same amount of work (pack sequences to one length, balance experts), and make hosts
    equally fast: single ranks are late at times because of gc, a data loader, or other jobs on the node. HOST001 and
    HOST003 name the ranks. Fewer collectives per step are less exposed to delays.

    Blind spots: needs traces of all ranks of a group and three shared collectives. Waits below the clock error are
    ignored. The reported time is the upper bound of the saving.
    """

    code: ClassVar[str] = "RANK003"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH
    facts: ClassVar[tuple[TraceFact, ...]] = (*Straggler.facts, *stragglers.FACTS, *outlier_steps.OutlierStep.facts)
    finding_facts: ClassVar[tuple[TraceFact, ...]] = (*late_ranks.TURN_FACTS, *cpu_contention.FACTS)
    min_wait_ratio: float = 0.1
    min_uneven_ratio: float = 0.03
    min_latest_ratio: float = 0.03

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the median step exceeds the threshold and there is no single straggler."""
        pieces = stragglers.waiting_pieces(run)
        steps = stragglers.steps(run)
        total = pieces.group_by(_STEP).agg(pl.col("dur_ns").sum())
        waited_ns = (pl.col("dur_ns").fill_null(0) // pl.col("ranks")).cast(pl.Int64)
        means = (
            steps.join(total, on=_STEP, how="left", nulls_equal=True, maintain_order="left")
            .with_columns(waited_ns=waited_ns)
            .with_columns(wait_ratio=pl.col("waited_ns") / pl.col("duration_ns"))
        )
        # What a single rank causes in a few steps is its own finding.
        occasional = run.table(stragglers.occasional_stragglers)
        means = means.join(occasional, on=_STEP, how="anti", nulls_equal=True, maintain_order="left")
        if means.is_empty() or any(late["group"] in _latest_groups(run) for late in Straggler().persistent(run)):
            return
        worst = median_row(means, "wait_ratio", "order")
        if worst["wait_ratio"] > self.min_wait_ratio:
            yield from self._in_turn(run, pieces, means, worst)
            return
        uneven = self._uneven_work(run, means)
        if uneven is not None:
            yield uneven
        elif occasional.is_empty():
            yield from self._most_often(run, means)

    def _in_turn(self, run: Run, pieces: pl.DataFrame, means: pl.DataFrame, worst: dict[str, Any]) -> Iterator[Finding]:
        quoted = largest_first(pieces.filter(quoted_step.is_of(worst, _STEP)), "dur_ns", "start_ns")
        quoted_ns = int(quoted["dur_ns"].sum())
        by_peer = quoted.drop_nulls("peer_rank").group_by("peer_rank").agg(pl.col("dur_ns").sum())
        is_often_late = pl.col("dur_ns") >= _MIN_OF_LATEST * pl.col("dur_ns").max()
        latest = largest_first(by_peer.filter(is_often_late), "dur_ns", "peer_rank").head(_MAX_NAMED)
        most_late = latest["peer_rank"].to_list()
        overloaded = overloaded_ranks(run)
        overloaded_ns = sum(ns for rank, ns in by_peer.iter_rows() if rank in overloaded)
        if overloaded_ns > _MOST * quoted_ns:
            return  # EP001
        shares = [units.share(peer_ns / quoted_ns) for peer_ns in latest["dur_ns"].to_list()]
        parts = [f"{shares[0]} of the waiting", *shares[1:]] if shares else []
        named = [f"rank {rank} ({part})" for rank, part in zip(most_late, parts, strict=True)]
        late_for = f"most for {', '.join(named)}" if named else "for which ranks is within clock error"
        who = f"ranks {', '.join(map(str, most_late))}" if len(most_late) > 1 else "single ranks"
        arrive = "arrive"
        late_steps = means.filter(pl.col("wait_ratio") > self.min_wait_ratio)
        # In each step the rank that the others wait for most is compared with the others.
        waited = pieces.drop_nulls("peer_rank").group_by(*_STEP, rank="peer_rank").agg(pl.col("dur_ns").sum())
        in_steps = waited.join(late_steps.select(_STEP), on=_STEP, how="semi", nulls_equal=True)
        last = largest_first(in_steps, "dur_ns", "rank").unique(_STEP, keep="first", maintain_order=True)
        # If one rank alone is slow, it computes as much longer than the second as than the mean.
        work = _work_of_steps(run)
        uneven_ns, lead_ns = (int(work[name].sum()) // max(1, work.height) for name in ("uneven_ns", "lead_ns"))
        is_uneven = uneven_ns >= max(_MOST * worst["waited_ns"], _MORE_THAN_LEAD * lead_ns, 1)
        latest_rank = None if is_uneven else _mostly_latest(in_steps)
        if latest_rank is None and not is_uneven:
            latest_rank = late_ranks.mostly_awaited(run)
        if latest_rank is not None:
            last = last.filter(rank=latest_rank)
        excess = late_ranks.excess_time(run, last.select(*_STEP, "rank")) if last.height else None
        others = late_work.names(most_late[:1] if latest_rank is None else [latest_rank], run.ranks)
        if latest_rank is None:
            subject = Subject("The last rank", others, tail=f"; by turns {', '.join(named) or who} are last")
        else:
            waits = "the others wait" if len(run.ranks) > 2 else f"{others} waits"
            subject = Subject(f"Rank {latest_rank}", others, tail=f", and {waits} for it")
        balanced_ratio = 1 - 1 / len(run.ranks)
        # The latest rank waits for nobody: each of the others waits for longer than the mean over all ranks.
        others_wait_ns = round(worst["waited_ns"] / balanced_ratio)
        reason = late_work.reason(run, excess, subject, lost_ns=others_wait_ns, balanced_ratio=balanced_ratio)
        turns = ""
        # Of all steps: in those in which a rank is the last one, it is slow.
        suspects = run.ranks if latest_rank is None else (latest_rank,)
        if (factor := _varying_factor(run, suspects, means.select(_STEP), reason)) is not None:
            reason, latest_rank = _varying_times(factor, ", and ranks wait for each other"), None
        if reason is None and latest_rank is None:
            reason, turns = _turns_within_steps(run, in_steps, subject, others_wait_ns)
        pauses = _fewest_of_half(run, pieces.join(late_steps.select(_STEP), on=_STEP, how="semi", nulls_equal=True))
        has_other_work = reason is not None and reason.kind in (EXTRA, LARGER)
        is_explained = has_other_work or factor is not None
        is_by_chance = latest_rank is None and not is_uneven and pauses < _MIN_RECURRING and not is_explained
        doubt = ""
        if is_by_chance:
            doubt = f" Half of the waiting is in {units.count(pauses, 'collective')}: single pauses explain it as well."
        claim = f"Ranks wait for each other by turns, {late_for}"
        ranks = distinct(quoted, "rank") if factor is None else tuple(run.ranks)
        cause = UNEVEN_WORK if is_uneven else None
        if latest_rank is not None:
            claim, ranks = f"Rank {latest_rank} arrives late at collectives{subject.tail}", (latest_rank,)
            who, arrive = f"rank {latest_rank}", "arrives"
            cause = STRAGGLER
            quoted = _waits_for(latest_rank, pieces.join(late_steps.select(_STEP), on=_STEP, how="semi"), worst)
            ratio = int(in_steps.filter(rank=latest_rank)["dur_ns"].sum()) / max(1, int(in_steps["dur_ns"].sum()))
            count = units.count(late_steps.height, "such step")
            late_for = f"most for rank {latest_rank} ({units.share(ratio)} of the waiting in {count})"
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Ranks wait for each other: on average, a rank is idle {describe_loss(worst, 'waited_ns')} for late ranks "
            f"in {quoted_step.place(worst['step'])}, {late_for}.{turns}{reason.evidence if reason else ''}{doubt}",
            reason.fix
            if reason
            else f"Check why {who} {arrive} late: uneven work (sequence lengths, experts), or temporary "
            "host delays (HOST001, HOST003, gc, other jobs on the node).",
            impact=min(1.0, worst["wait_ratio"]),
            cost_ns=worst["waited_ns"],
            confidence=0.4 if is_by_chance else 0.7,
            ranks=ranks,
            steps=distinct(late_steps, "step"),
            evidence=quoted.head(_EVIDENCE_ROWS).select(
                "window", "rank", "step", "phase", "unit", "peer_rank", "collective_id", "start_ns", "dur_ns"
            ),
            claim=reason.claim if reason else claim,
            what_if=WhatIf(cause, Straggler.min_cost_ratio) if cause else None,
            is_of_window=worst["step"] is None,
        )

    def _uneven_work(self, run: Run, means: pl.DataFrame) -> Finding | None:
        """The finding on ranks of which another one computes longest in each step; None if they compute alike."""
        work = _work_of_steps(run).join(means.select(_STEP), on=_STEP, how="semi", nulls_equal=True)
        if work.is_empty() or overloaded_ranks(run):
            return None
        lost_ns, step_ns = (int(work[name].sum()) // work.height for name in ("uneven_ns", "duration_ns"))
        if lost_ns < self.min_uneven_ratio * step_ns:
            return None
        slowest = work["rank"].value_counts().sort("count", "rank", descending=[True, False]).head(_MAX_NAMED)
        named = [f"rank {rank} in {units.count(count, 'step')}" for rank, count in slowest.iter_rows()]
        return Finding(
            self.code,
            Severity.WARNING,
            f"The rank that computes longest ({', '.join(named)}) does so for {units.duration(lost_ns)} of "
            f"{units.duration(step_ns)} longer than ranks do in the mean.",
            "Give ranks the same amount of work in each step: pack or bucket sequences by length, form batches by "
            "their number of tokens, balance experts.",
            impact=min(1.0, lost_ns / max(step_ns, 1)),
            cost_ns=lost_ns,
            confidence=0.8,
            ranks=distinct(work, "rank"),
            steps=distinct(work, "step"),
            evidence=largest_first(work, "uneven_ns", *_STEP).head(_EVIDENCE_ROWS),
            claim="The work of ranks is uneven, and the rank that computes longest varies",
            what_if=WhatIf(UNEVEN_WORK, Straggler.min_cost_ratio),
            subject="work",
            is_of_window=bool(work["step"].is_null().all()),
        )

    def _most_often(self, run: Run, means: pl.DataFrame) -> Iterator[Finding]:
        """Yield information on the rank, or group, that the others wait for most, if a replay without it saves enough.

        Chance may make it the latest: it is not the same in most steps, or there are few.
        """
        latest = late_ranks.latest(run)
        costs = run.table(stragglers.straggler_costs).join(means.select(_STEP), on=_STEP, how="semi", nulls_equal=True)
        rows = (
            costs.filter(pl.col("late_ranks") == pl.lit(list(latest), pl.List(pl.Int64))) if latest else costs.clear()
        )
        if rows.is_empty() or rank_places.is_of_stages(run, list(latest)) or overloaded_ranks(run).issuperset(latest):
            return
        lost_ns, step_ns = int(rows["lost_ns"].sum()) // rows.height, int(rows["duration_ns"].sum()) // rows.height
        name = units.numbers("rank", latest)
        waits = run.table(stragglers.late_calls).filter(pl.col("late_rank") == rows["late_rank"][0])
        count = rows.filter(pl.col("share") > _MOST).height
        yield Finding(
            self.code,
            Severity.INFO,
            f"The other ranks wait for {name} longer than for any other, but not by a time that recurs: it causes most "
            f"of the waiting in {count} of {rows.height} steps, and on average they lose {units.duration(lost_ns)} of "
            f"{units.duration(step_ns)}.",
            f"Record more steps to see whether {name} is late again and again, and check its host and device at the "
            "moments of the evidence.",
            impact=min(1.0, lost_ns / max(1, step_ns)),
            cost_ns=lost_ns,
            confidence=0.5,
            ranks=latest,
            steps=distinct(rows, "step"),
            evidence=largest_first(waits, "wait_ns", "start_ns")
            .head(_EVIDENCE_ROWS)
            .select("window", "rank", "step", "phase", "unit", "op", "late_rank", "start_ns", "dur_ns", "wait_ns"),
            claim=f"{name.capitalize()} {'arrive' if len(latest) > 1 else 'arrives'} last most often",
            what_if=WhatIf(STRAGGLER, self.min_latest_ratio),
            subject="latest",
            is_of_window=bool(rows["step"].is_null().all()),
        )


def _waits_for(rank: int, pieces: pl.DataFrame, worst: dict[str, Any]) -> pl.DataFrame:
    """Pieces of waiting for a rank, those in the quoted step first: there the others may wait for another rank."""
    of_rank = pieces.filter(pl.col("peer_rank").eq_missing(rank))
    in_step = quoted_step.is_of(worst, _STEP)
    return pl.concat(largest_first(of_rank.filter(rows), "dur_ns", "start_ns") for rows in (in_step, ~in_step))


def _varying_factor(run: Run, ranks: Sequence[int], steps: pl.DataFrame, reason: Reason | None) -> float | None:
    """The factor of `cpu_contention.varying_factor` where chance makes each of some ranks late in steps; else None.

    Larger inputs and extra calls are no chance.
    """
    if reason is not None and reason.kind not in (SLOWER, LONGER):
        return None
    factors = [cpu_contention.varying_factor(run, (rank,), steps) for rank in ranks]
    known = [factor for factor in factors if factor is not None]
    return min(known) if known and len(known) == len(factors) else None


def _is_late_by_chance(run: Run, ranks: tuple[int, ...], rank_steps: pl.DataFrame, worst: dict[str, Any]) -> bool:
    """Whether ranks that are late in most steps compute as much as the others, in times that vary on all ranks."""
    if cpu_contention.varying_factor(run, ranks, rank_steps.select(_STEP).unique()) is None:
        return False
    excess = late_ranks.excess_time(run, late_ranks.of_steps(ranks, worst["late"].select(_STEP)))
    return excess is not None and excess.largest in (SLOWER, LONGER)


def _varying_times(factor: float, tail: str) -> Reason:
    """Ranks that wait for each other because times of equal work vary on all of them: no rank is slow."""
    return Reason(
        "",
        f"Times of equal work vary by a factor of {factor:.1f} on all ranks{tail}",
        f" On every rank, a tenth of the ops takes {factor:.1f} times as long or longer as the fastest with the same "
        "inputs, as on cores that are shared by more threads than they can run. No rank is slower than by chance.",
        "Set OMP_NUM_THREADS to the cores divided by the ranks of the host (torchrun sets 1), bind each rank to cores "
        "of its own, and see which other processes run there (top). Record with tracekit record: run.json then states "
        "threads and cores.",
    )


def _turns_within_steps(
    run: Run, waited: pl.DataFrame, subject: Subject, others_wait_ns: int
) -> tuple[Reason | None, str]:
    """What ranks take longer for, each before other collectives of the same steps, and a sentence on their turns.

    `waited` has one row per step and rank that is waited for: window, step, rank, dur_ns. No reason where the work of
    the ranks that are waited for most differs by much less, or by much more, than the others wait for them.
    """
    late_steps = waited.select(_STEP).unique()
    calls = run.table(stragglers.late_calls).join(late_steps, on=_STEP, how="semi", nulls_equal=True)
    last = calls.unique(["window", "instance"]).drop_nulls("late_rank")["late_rank"].value_counts()
    counts = dict(last.iter_rows())
    by_rank = largest_first(waited.group_by("rank").agg(pl.col("dur_ns").sum()), "dur_ns", "rank")
    named = by_rank.head(_MAX_NAMED)
    parts = late_ranks.excess_in_turn(run, late_steps, named["rank"].to_list())
    if not parts or len(counts) < 2:
        return None, ""
    rows = pl.concat(part.rows for part in parts.values()).sort("excess_ns", descending=True, maintain_order=True)
    excess = replace(next(iter(parts.values())), rows=rows, total_ns=int(rows["excess_ns"].sum()))
    lost_ns = round(others_wait_ns * int(named["dur_ns"].sum()) / max(1, int(by_rank["dur_ns"].sum())))
    reason = None
    if excess.total_ns <= _MOST_BEYOND_WAIT * lost_ns:
        balanced_ratio = 1 - 1 / len(run.ranks)
        reason = late_work.reason(run, excess, subject, lost_ns=lost_ns, balanced_ratio=balanced_ratio)
    turns = []
    for rank, part in parts.items():
        longer = late_work.excess_parts(part) if reason else ""
        turns.append(f"rank {rank} is last at {counts.get(rank, 0)}{f' ({longer})' if longer else ''}")
    return reason, f" Of {units.count(sum(counts.values()), 'collective')}, {'; '.join(turns)}."


def _work_of_steps(run: Run) -> pl.DataFrame:
    """How uneven the compute of devices is, by step.

    Columns window, step, rank (that computes longest), uneven_ns and lead_ns (by how much longer than the mean and than
    the second), duration_ns; one row per step. No rows on a CPU run, where ranks share cores, and under pipeline
    parallelism, whose stages have other work.
    """
    by_step = run.table(breakdown.by_step)
    if not breakdown.is_on_device(run) or rank_places.stages(run):
        by_step = by_step.clear()
    of_ranks = by_step.group_by(*_STEP, "rank").agg(pl.col("compute_ns", "duration_ns").max())
    longest = pl.col("compute_ns").max() - pl.col("compute_ns").mean()
    return (
        of_ranks.sort("compute_ns", "rank", descending=[True, False])
        .group_by(_STEP)
        .agg(
            pl.col("rank").first(),
            pl.len().alias("ranks"),
            longest.round().cast(pl.Int64).alias("uneven_ns"),
            (pl.col("compute_ns").first() - pl.col("compute_ns").slice(1, 1).first()).alias("lead_ns"),
            pl.col("duration_ns").median().cast(pl.Int64),
        )
        .filter(pl.col("ranks") > 1)
        .drop("ranks")
        .sort(_STEP)
    )


def _mostly_latest(waited: pl.DataFrame) -> int | None:
    """Rank for which two thirds of the waiting are in more than half of the steps; None if it varies.

    `waited` has one row per step and rank that is waited for: window, step, rank, dur_ns.
    """
    leads = waited.filter(pl.col("dur_ns") > _MIN_LATEST_RATIO * pl.col("dur_ns").sum().over(_STEP))
    counts = leads.group_by("rank").len().filter(pl.col("len") > _MOST * waited.select(_STEP).n_unique())
    return None if counts.is_empty() else int(counts["rank"][0])


def _fewest_of_half(run: Run, pieces: pl.DataFrame) -> int:
    """Fewest collectives that have half of the waiting."""
    calls = run.table(collective_instances.waits).select("window", "rank", "instance", collective_id="activity_id")
    of_instances = pieces.join(calls, on=["window", "rank", "collective_id"])
    waits = of_instances.group_by("window", "instance").agg(pl.col("dur_ns").sum())["dur_ns"].sort(descending=True)
    return int((waits.cum_sum() * 2 < waits.sum()).sum()) + 1


_FIX_WORK = (
    "Find what only {ranks} does in these steps, such as an evaluation, metrics or samples: divide it among the ranks, "
    "do it less often, or let the other ranks train on meanwhile."
)
_FIX_SLOW = DeviceAdvice(
    "Check {ranks} at that time: longer batches or more experts' tokens than on the other ranks, GPU clocks and "
    "temperature, other processes on its cores.",
    "Check {ranks} at that time: longer batches or more experts' tokens than on the other ranks, other processes on "
    "its cores.",
)


@dataclass(frozen=True)
class LateGroup(Straggler):
    """Ranks that straggle together, such as those of one node.

    What it does: reports ranks that arrive late together at collectives, while the others are idle, as one finding
    named by what these ranks share: a node, a replica, a coordinate of another mesh axis, a process group. The others
    lose more than `min_wait_ratio` of the step for them, in at least `min_steps_ratio` of the steps since the first
    such step, by a time that varies by at most `max_spread_ratio`, or too often for chance (`max_chance`). It names
    what the late ranks take longer for: their kernels, or their launches.

    Why it costs: a collective moves data only after the last rank arrives, so one slow node slows all.

    How it is measured: as in RANK001, for ranks together. Ranks are late together if the others would wait at least
    twice as long for all of them as for any one, and would still wait for each one if all but that one came early. In a
    hybrid mesh, where the ranks of a late node have no collective in common with other nodes, each of them must be late
    in its own process groups, and must not wait itself for more than half as long as the other ranks do. At most half
    of the ranks are a late group. Ranks of a group that take longer for different kinds of work are late for different
    causes: each is a finding of RANK001. Nodes come from the host names in file names, else from device indices that
    start again every few ranks, else from the GPUs per node in run.json; axes from the mesh or groups in run.json, else
    from the names of process groups. The cost is the saving of a replay in which nobody waits for these ranks. Below
    `min_cost_ratio` of the step the finding is information.

    How to fix: check what these ranks share before the ranks themselves: power and clocks of the node, its network
    adapters, its CPUs and storage, other jobs on it, the batch of the replica (uneven sequence lengths). Take the node
    out of the job to separate hardware from data.

    Blind spots: needs traces of ranks inside and outside of the group, and three collectives that both join. All ranks
    of a pipeline stage are not reported: how long stages take is what rules on pipelines judge. Waits between stages do
    not count. If more than half of the ranks are late, nobody straggles.
    """

    code: ClassVar[str] = "RANK004"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per group of ranks that straggles."""
        yield from (self._finding(run, late) for late in self.persistent(run) if len(late["late_ranks"]) > 1)


@dataclass(frozen=True)
class OccasionalStraggler(Rule):
    """A rank for which the others wait in a few steps, because it works longer in these.

    What it does: reports ranks that delay the others in a part of the steps, such as the one rank that evaluates the
    model, or one that collects garbage every few steps, with the steps and what the rank takes longer for in them.

    Why it costs: all other ranks wait meanwhile. Rules on the median step do not see it.

    How it is measured: as in RANK001, the time that the other ranks lose to waiting for the rank, in each step. It
    counts where it is longer than in the rank's usual step by 15% of the median step or more (25% on a CPU run), and
    where more than half of all waiting in the step is for this rank. What it takes longer for is compared with the
    other ranks as in RANK001. Losses below `min_lost_ratio` of the window, and ranks that straggle in most steps, are
    left out. On a CPU run, where other processes slow ranks down, a single step in which the rank runs no more
    operators than usual is information. The cost is the saving of a replay in which the rank takes no longer in these
    steps than in its others, as a mean over all steps. Where that saves nothing, and neither does it in the steps
    before, the finding is information: the rank is no slower there, but others were, or a pause of all ranks ended its
    lead.

    How to fix: divide the evaluation, metrics or samples among the ranks, or do them less often.

    Blind spots: needs three marked steps and traces of several ranks. A window without such a step does not show it:
    record more steps. Stalls of the rank's host, in which it runs no operators, belong to STEP001, overloaded experts
    to EP001. Steps that save are left out.
    """

    code: ClassVar[str] = "RANK005"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *stragglers.FACTS,
        *outlier_steps.OutlierStep.facts,
        *OverloadedExperts.facts,
    )
    finding_facts: ClassVar[tuple[TraceFact, ...]] = (
        *late_ranks.EXCESS_FACTS, log_contents.reading_issues, *cpu_contention.FACTS,
    )  # fmt: skip
    min_lost_ratio: float = 0.03

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per late rank, or group of ranks that are late together."""
        events = run.table(stragglers.occasional_stragglers)
        if events.height:
            steady = [rank for late in Straggler().persistent(run) for rank in late["group"]]
            events = events.filter(~pl.col("late_rank").is_in(steady))
        overloaded = overloaded_ranks(run) if events.height else frozenset()
        for _, rank_events in events.group_by("late_rank", maintain_order=True):
            if overloaded.issuperset(rank_events["late_ranks"][0]):
                continue
            windows = rank_events.unique("window")
            lost_ratio = int(rank_events["lost_ns"].sum()) / max(1, int(windows["window_ns"].sum()))
            if lost_ratio >= self.min_lost_ratio:
                yield self._finding(run, rank_events, lost_ratio, int(windows["steps"].sum()))

    def _finding(self, run: Run, events: pl.DataFrame, lost_ratio: float, steps: int) -> Finding:
        event = largest_first(events, "lost_ns", "window", "step").row(0, named=True)
        ranks = tuple(event["late_ranks"])
        name = units.numbers("rank", ranks)
        has_more_ops = (event["ops_ratio"] or 0) >= trace_quality.MORE_OPS_RATIO
        is_repeated = recurrence.of_count(events.height, steps).is_repeated
        is_sure = has_more_ops or breakdown.is_on_device(run) or is_repeated
        others = late_work.names(ranks, run.ranks)
        in_step = f" in {units.numbers('step', distinct(events, 'step'))}"
        if is_repeated:
            in_step = (
                f" in {events.height} of {steps} steps; {others} {'waits' if len(run.ranks) == 2 else 'wait'} for "
            )
            in_step += "them" if len(ranks) > 1 else "it"
        subject = Subject(name.capitalize(), others, len(ranks) > 1, in_step)
        reason = _occasional_reason(run, ranks, events, subject)
        if (factor := _varying_factor(run, ranks, events.select(_STEP), reason)) is not None:
            tail = f"; {others} wait for {name} in {units.numbers('step', distinct(events, 'step'))}"
            reason, is_sure = _varying_times(factor, tail), False
        waits = run.table(stragglers.late_calls).filter(pl.col("late_rank") == event["late_rank"])
        in_steps = waits.join(events.select("window", "step"), on=["window", "step"], how="semi")
        return Finding(
            self.code,
            Severity.WARNING if is_sure else Severity.INFO,
            f"{outlier_steps.where(event, event['lost_ns'])}the other ranks lose {units.duration(event['lost_ns'])} to "
            f"waiting for {name}{_work(event)}. {recurrence.sentence(events.height, steps)}; it "
            f"takes {units.duration(int(events['lost_ns'].sum()))} in total ({units.share(lost_ratio)} of the time)."
            f"{reason.evidence if reason else ''}",
            reason.fix if reason else (_FIX_WORK if has_more_ops else _FIX_SLOW.suited_to(run)).format(ranks=name),
            impact=min(1.0, lost_ratio),
            cost_ns=int(events["lost_ns"].sum()) // max(1, steps),
            confidence=0.8 if has_more_ops or is_repeated else 0.6,
            ranks=ranks,
            steps=distinct(events, "step"),
            evidence=largest_first(in_steps, "wait_ns", "start_ns")
            .head(_EVIDENCE_ROWS)
            .select("window", "rank", "step", "phase", "unit", "op", "late_rank", "start_ns", "dur_ns", "wait_ns"),
            claim=reason.claim if reason else f"The others wait for {name}{in_step}",
            what_if=WhatIf(OCCASIONAL_STRAGGLER),
            subject=name,
        )


def occasional_removal(run: Run, finding: Finding) -> Removal:
    """Removal in a replay for a finding on an occasional straggler: its ranks take no longer than in other steps."""
    events = run.table(stragglers.occasional_stragglers)
    of_ranks = events.filter(pl.col("late_ranks") == pl.lit(list(finding.ranks), pl.List(pl.Int64)))
    return Removal(OCCASIONAL_STRAGGLER, finding.ranks, steps=tuple(of_ranks.select(_STEP).sort(_STEP).iter_rows()))


def steps_before(run: Run, removal: Removal) -> Removal:
    """The same removal in the step before each in which ranks are late, or in that one if they are late before it, too.

    What a rank takes longer for at the end of a step makes it late in the next one.
    """
    order = stragglers.steps(run).select(*_STEP, before=pl.col("step").shift(1).over("window"))
    late = {(window, step): before for window, step, before in order.iter_rows() if (window, step) in removal.steps}
    begins = {
        (window, step if before is None or (window, before) in late else before)
        for (window, step), before in late.items()
    }
    return replace(removal, steps=tuple(sorted(begins)))


def _occasional_reason(run: Run, ranks: tuple[int, ...], events: pl.DataFrame, subject: Subject) -> Reason | None:
    """What the late ranks take longer for in these steps, or at the end of those before, where the delay begins."""
    lost_ns, balanced_ratio = int(events["lost_ns"].sum()) // events.height, 1 - len(ranks) / len(run.ranks)
    order = stragglers.steps(run).select(*_STEP, before=pl.col("step").shift(1).over("window"))
    before = events.select(_STEP).join(order, on=_STEP, nulls_equal=True).select("window", step="before").drop_nulls()
    for late_steps in (events.select(_STEP), before):
        excess = late_ranks.excess_time(run, late_ranks.of_steps(ranks, late_steps))
        if reason := late_work.reason(run, excess, subject, lost_ns=lost_ns, balanced_ratio=balanced_ratio):
            return reason
    return None


def _work(event: dict[str, Any]) -> str:
    """Clause on what the late rank does more of than in its other steps and than the other ranks."""
    longer_ns = (event["compute_ns"] or 0) - (event["usual_compute_ns"] or 0)
    parts = []
    if longer_ns >= event["lost_ns"] / 2:
        usual = units.duration(event["usual_compute_ns"])
        parts.append(f"computes for {units.duration(event['compute_ns'])} instead of {usual}")
    if (event["ops_ratio"] or 0) >= trace_quality.MORE_OPS_RATIO:
        parts.append(f"runs {event['ops_ratio']:.1f} times as many operators as usual")
    return f", which {' and '.join(parts)}" if parts else ""
