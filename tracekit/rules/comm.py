"""Judgements of communication."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import conventions, units
from tracekit.analysis import breakdown, checkpoint, communication, strategy
from tracekit.rule import Finding, Rule, Severity
from tracekit.rules import remedies, typical
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 20
_MARKEDLY = 1.5  # how many times as much as the least exposed rank is worth telling


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Communication that no compute hides.

    What it does: reports runs in which a collective runs while its device computes nothing for more than
    `max_exposed_ratio` of the step; it is an error above `error_exposed_ratio`.

    Why it costs: a device that waits for a collective earns nothing. What compute hides is free.

    How it is measured: per rank and step, the union of all collectives minus the union of all compute, over the
    step's device window. Of each rank its typical step is judged, the one with the median share; the worst rank's is
    quoted. Steps that save a checkpoint are left out, they are CKPT001's.

    How to fix: start gathers earlier (explicit prefetch) and reduce later, use larger units, or send less. The fix
    named depends on the strategy (from the manifest, else by the spans in the trace) and on the collective that is
    exposed most.

    Blind spots: a collective that waits for a slow peer counts as communication; where ranks differ much, the finding
    says so. On a CPU run compute is the union of dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[Fact, ...]] = (
        breakdown.by_step,
        checkpoint.save_spans,
        communication.exposed,
        strategy.marks,
    )
    max_exposed_ratio: float = 0.2
    error_exposed_ratio: float = 0.6

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run all of whose steps save cannot be judged."""
        if _steps(run).is_empty() and run.table(breakdown.by_step).height:
            return (
                "every profiled step saves a checkpoint, so communication was not judged; profile steps between saves."
            )
        return None

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for the run if the worst rank's typical step exceeds the threshold."""
        steps = _steps(run)
        each = typical.of_each(steps, "exposed_ratio")
        over = each.filter(pl.col("exposed_ratio") > self.max_exposed_ratio)
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        collectives = _collectives(run).join(over.select("rank"), on="rank", how="semi")
        yield Finding(
            self.code,
            Severity.ERROR if worst["exposed_ratio"] > self.error_exposed_ratio else Severity.WARNING,
            _message(worst) + _compared(worst, each),
            _fix(run, worst, typical.here(collectives, worst)),
            impact=worst["exposed_ratio"],
            cost_ns=worst["exposed_communication_ns"] if worst["step"] is not None else 0,
            confidence=0.9,
            ranks=tuple(over["rank"].unique().sort().to_list()),
            steps=tuple(steps["step"].drop_nulls().unique().sort().to_list()),
            evidence=_evidence(worst, collectives),
        )


def _steps(run: Run) -> pl.DataFrame:
    """Return the breakdown of the steps that save no checkpoint on any rank, with `exposed_ratio`."""
    saving = run.table(checkpoint.save_spans).select("window", "step")
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0)
    plain = steps.join(saving, on=["window", "step"], how="anti", nulls_equal=True)
    return plain.with_columns(
        (pl.col("exposed_communication_ns") / pl.col("duration_ns")).alias("exposed_ratio"),
    )


def _collectives(run: Run) -> pl.DataFrame:
    """Return the exposed collectives of those steps, the most exposed first."""
    exposed = run.table(communication.exposed).filter(
        pl.col("exposed_ns") > 0, pl.col("phase").ne_missing(conventions.CHECKPOINT)
    )
    judged = _steps(run).select("window", "rank", "step", "device").unique()
    return exposed.join(judged, on=judged.columns, how="semi", nulls_equal=True).sort(
        "exposed_ns", "rank", "start_ns", descending=[True, False, False]
    )


def _message(worst: dict[str, Any]) -> str:
    return (
        f"{units.share(worst['exposed_ratio'])} of the step is communication that no compute hides: "
        f"{units.duration(worst['exposed_communication_ns'])} of {units.duration(worst['duration_ns'])} in "
        f"{typical.in_words(worst)}; compute hides {units.share(_hidden_ratio(worst))} of its communication."
    )


def _compared(worst: dict[str, Any], each: pl.DataFrame) -> str:
    least = each.row(-1, named=True)
    if worst["exposed_ratio"] < _MARKEDLY * least["exposed_ratio"] or least["rank"] == worst["rank"]:
        return ""
    return (
        f" On rank {least['rank']} it is {units.share(least['exposed_ratio'])}: part of the rest may be waiting for "
        "slower ranks."
    )


def _evidence(worst: dict[str, Any], collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the quoted step's collectives, that step as a whole, then the most exposed of other steps and ranks."""
    whole = pl.DataFrame(
        [
            {name: worst[name] for name in typical.PLACE}
            | {"name": "whole step", "op": "whole step"}
            | {"exposed_ns": worst["exposed_communication_ns"], "step_ns": worst["duration_ns"]}
        ],
        schema_overrides={name: collectives.schema[name] for name in typical.PLACE},
    )
    own = typical.here(collectives, worst)
    others = collectives.join(own, on=["window", "rank", "lane", "start_ns"], how="anti")
    parts = [own.head(_EVIDENCE_ROWS), whole, others.head(_EVIDENCE_ROWS)]
    return pl.concat(parts, how="diagonal").select(*collectives.columns, "step_ns")


def _hidden_ratio(worst: dict[str, Any]) -> float:
    return float(worst["overlapped_ns"] / worst["communication_ns"]) if worst["communication_ns"] else 0.0


def _fix(run: Run, worst: dict[str, Any], own: pl.DataFrame) -> str:
    time = own.group_by("op").agg(pl.col("exposed_ns").sum()).sort("exposed_ns", "op", descending=[True, False])
    op = time["op"][0] if time.height else None
    gloo = bool(own["name"].str.starts_with("gloo:").any())
    return remedies.against_exposure(strategy=strategy.of_run(run), op=op, gloo=gloo, hidden_ratio=_hidden_ratio(worst))
