"""Judgements of communication."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import compute_gap_causes, contention
from tracekit.analysis.parallelism import strategy
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.rules import communication_fixes, representative_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf
from tracekit.sync import collective_matching

_EVIDENCE_ROWS = 20
_MIN_WAIT_RATIO = 0.02  # share of the step from which on waiting for other ranks is worth telling


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Communication that no compute hides.

    What it does: reports runs in which a collective moves data while its device computes nothing for more than
    `max_exposed_ratio` of the step; it is an error above `error_exposed_ratio`, and from `info_exposed_ratio` on
    information.

    Why it costs: a device that waits for a collective earns nothing. What compute hides is free.

    How it is measured: per rank and step, the union of all collectives minus the union of all compute, over the
    step's device window, less the part in which the rank waits for another to come to the collective: no collective
    that starts earlier makes that shorter, it is RANK001's and RANK003's. Of each rank its typical step is judged, the
    one with the median share; the worst rank's is quoted. Steps that save a checkpoint are left out: CKPT001's.

    How to fix: start gathers earlier (explicit prefetch) and reduce later, use larger units, or send less. The fix
    named depends on the strategy (from the manifest, else by the spans in the trace) and on the collective that is
    exposed most.

    Blind spots: waiting for a rank without a trace, or by less than the residual of the clocks, counts as
    communication. On a CPU run compute is the union of dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[Fact, ...]] = (
        *steps_without_saves.FACTS,
        exposed_communication.exposed,
        breakdown.spans,
        exposed_communication.save_collectives,
        strategy.marks,
        collective_matching.calls,
    )
    info_exposed_ratio: float = 0.1
    max_exposed_ratio: float = 0.2
    error_exposed_ratio: float = 0.6

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run all of whose steps save cannot be judged."""
        if steps_without_saves.steps(run).is_empty() and run.table(breakdown.by_step).height:
            return (
                "every profiled step saves a checkpoint, so communication was not judged; profile steps between saves."
            )
        return None

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for the run if the worst rank's typical step exceeds the threshold."""
        steps = _exposed(run)
        each = representative_step.per_device(steps, "exposed_ratio")
        over = each.filter(pl.col("exposed_ratio") > min(self.info_exposed_ratio, self.max_exposed_ratio))
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        collectives = _collectives(run).join(over.select("rank"), on="rank", how="semi")
        severity = self._severity(worst["exposed_ratio"])
        yield Finding(
            self.code,
            severity,
            _message(worst),
            _fix(run, worst, representative_step.rows_of(collectives, worst)),
            impact=worst["exposed_ratio"],
            cost_ns=worst["exposed_ns"] if worst["step"] is not None else 0,
            confidence=0.9,
            what_if=WhatIf("communication") if severity >= Severity.WARNING else None,
            ranks=tuple(over["rank"].unique().sort().to_list()),
            steps=tuple(steps["step"].drop_nulls().unique().sort().to_list()),
            evidence=_evidence(worst, collectives),
        )

    def _severity(self, exposed_ratio: float) -> Severity:
        if exposed_ratio > self.error_exposed_ratio:
            return Severity.ERROR
        return Severity.WARNING if exposed_ratio > self.max_exposed_ratio else Severity.INFO


@dataclass(frozen=True)
class PreparationGap(Rule):
    """Collectives that start late because of the copies and casts that prepare them, and compute that waits for that.

    What it does: tells, as information, in which runs compute waits more than `min_lost_ratio` of the step for
    collectives that were held up by the own time of their preparation: copy-in, concatenation, cast, divide.

    Why it costs: while a collective is prepared the network idles, and where compute then waits for that collective,
    it waits for its preparation too. What contention adds to the preparation is STREAM001's.

    How it is measured: preparation is what was launched under the same FSDP span before the collective, else what lies
    directly before it on its communication stream. Its time while no collective runs on the device, alone or as long as
    the same kernel takes alone, is set against how long nothing computed for want of the collective or of those that
    follow without a gap: the smaller counts. Steps that save are left out. The typical step of the worst device is
    quoted.

    How to fix: prepare less: parameters and gradients in one flat buffer (YaFSDP), gradients kept in the reduce dtype
    (MixedPrecisionPolicy.reduce_dtype), one divide after backward; or prepare earlier, by prefetching a module ahead
    (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch).

    Blind spots: needs device streams: on a CPU run preparation is compute. Preparation without a sample alone counts
    whole, contention included. Work under other spans and on other streams is not seen as preparation.
    """

    code: ClassVar[str] = "COMM004"
    facts: ClassVar[tuple[Fact, ...]] = (
        compute_gap_causes.chains,
        contention.device_count,
        *steps_without_saves.FACTS,
    )
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step exceeds the threshold."""
        chains = _preparation_chains(run)
        steps = steps_without_saves.losses(run, chains, "lost_ns")
        worst = representative_step.worst(steps, "lost_ratio")
        if worst is None or worst["lost_ratio"] < self.min_lost_ratio:
            return
        lost = steps.filter(pl.col("lost_ratio") >= self.min_lost_ratio)
        own = representative_step.rows_of(chains, worst).sort("lost_ns", "start_ns", descending=[True, False])
        others = chains.join(own, on=["window", "rank", "communication_gap"], how="anti")
        yield Finding(
            self.code,
            Severity.INFO,
            f"Preparing collectives keeps them waiting for {units.duration(int(own['preparation_ns'].sum()))} in "
            f"{representative_step.describe(worst)}, and compute waits {units.duration(worst['lost_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['lost_ratio'])}) for that.",
            "Prepare less: one flat buffer per unit (YaFSDP), gradients in the reduce dtype "
            "(MixedPrecisionPolicy.reduce_dtype); or earlier: set_modules_to_forward_prefetch, "
            "set_modules_to_backward_prefetch.",
            impact=worst["lost_ratio"],
            cost_ns=worst["lost_ns"],
            confidence=0.7,
            ranks=tuple(lost["rank"].unique().sort().to_list()),
            steps=tuple(lost["step"].unique().sort().to_list()),
            evidence=pl.concat([own, others.sort("lost_ns", descending=True).head(_EVIDENCE_ROWS)]),
        )


def _preparation_chains(run: Run) -> pl.DataFrame:
    """Return the chains that preparation opens on devices, with lost_ns, what compute waited for it at most."""
    if not run.table(contention.device_count)["devices"].sum():
        return run.table(compute_gap_causes.chains).clear().with_columns(lost_ns=pl.lit(0, pl.Int64))
    lost_ns = pl.min_horizontal("preparation_ns", pl.col("waited_ns") - pl.col("contention_ns"))
    return run.table(compute_gap_causes.chains).with_columns(lost_ns.alias("lost_ns")).filter(pl.col("lost_ns") > 0)


def _exposed(run: Run) -> pl.DataFrame:
    """Return what of those steps is exposed communication; exposed_ratio leaves out waiting for other ranks."""
    ratio = (pl.col("exposed_ns") / pl.col("duration_ns")).alias("exposed_ratio")
    return steps_without_saves.without_saves(
        run, run.run_table(exposed_communication.exposed_by_step).filter(pl.col("duration_ns") > 0)
    ).with_columns(ratio)


def _collectives(run: Run) -> pl.DataFrame:
    """Return the exposed collectives of those steps, the most exposed first; waiting for ranks is not in exposed_ns."""
    judged = steps_without_saves.steps(run).select("window", "rank", "step", "device").unique()
    return (
        run.run_table(exposed_communication.exposed_transfers)
        .filter(pl.col("exposed_ns") > 0)
        .drop("activity_id", "waited_ns")
        .join(judged, on=judged.columns, how="semi", nulls_equal=True)
        .sort("exposed_ns", "rank", "start_ns", descending=[True, False, False])
    )


def _message(worst: dict[str, Any]) -> str:
    told = (
        f"{units.share(worst['exposed_ratio'])} of the step is communication that no compute hides: "
        f"{units.duration(worst['exposed_ns'])} of {units.duration(worst['duration_ns'])} in "
        f"{representative_step.describe(worst)}; compute hides {units.share(_hidden_ratio(worst))} of its "
        f"communication."
    )
    if worst["waited_ns"] < _MIN_WAIT_RATIO * worst["duration_ns"]:
        return told
    return f"{told} Another {units.duration(worst['waited_ns'])} it waits there for ranks that come later."


def _evidence(worst: dict[str, Any], collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the quoted step's collectives, that step as a whole, then the most exposed of other steps and ranks."""
    whole = pl.DataFrame(
        [
            {name: worst[name] for name in representative_step.KEY}
            | {"name": "whole step", "op": "whole step"}
            | {"exposed_ns": worst["exposed_ns"], "step_ns": worst["duration_ns"]}
        ],
        schema_overrides={name: collectives.schema[name] for name in representative_step.KEY},
    )
    own = representative_step.rows_of(collectives, worst)
    others = collectives.join(own, on=["window", "rank", "lane", "start_ns"], how="anti")
    parts = [own.head(_EVIDENCE_ROWS), whole, others.head(_EVIDENCE_ROWS)]
    return pl.concat(parts, how="diagonal").select(*collectives.columns, "step_ns")


def _hidden_ratio(worst: dict[str, Any]) -> float:
    return float(worst["overlapped_ns"] / worst["communication_ns"]) if worst["communication_ns"] else 0.0


def _fix(run: Run, worst: dict[str, Any], own: pl.DataFrame) -> str:
    time = own.group_by("op").agg(pl.col("exposed_ns").sum()).sort("exposed_ns", "op", descending=[True, False])
    op = time["op"][0] if time.height else None
    gloo = bool(own["name"].str.starts_with("gloo:").any())
    return communication_fixes.fix_for(
        strategy=strategy.of_run(run), op=op, gloo=gloo, hidden_ratio=_hidden_ratio(worst)
    )
