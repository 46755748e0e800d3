"""The rule on work that no gradient of its step needs."""

from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import side_work
from tracekit.model import kernel_names, units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.device_time import SIDE_WORK
from tracekit.rules import quoted_step
from tracekit.rules.compute import AvoidableTime
from tracekit.rules.rule import largest_first


@dataclass(frozen=True)
class SideWork(AvoidableTime):
    """Work in every step that no gradient needs: evaluation, metrics, histograms, copies of weights.

    What it does: reports training steps in which operators whose results lead to no gradient take `min_saved_ratio` of
    the step.

    Why it costs: the device (or on a CPU run the host) does nothing else meanwhile; no rank and no step differs, so
    that no comparison shows it.

    How it is measured: operators after the last one of the optimizer in a step, or between the last one that backward
    needs and backward, by the operators that autograd links to backward. Those that write into a tensor which existed
    before are left out, since they may update weights, as are collectives and what other rules on avoidable time
    report. The message quotes the median step of the worst device. Steps that save are left out.

    How to fix: do it in every N-th step, on part of the data, or after the training; fewer quantities in one op
    (torch._foreach_norm); keep copies of weights only where something reads them.

    Blind spots: needs operators with autograd's links (sequence numbers). Work before the loss may feed it and is not
    judged, nor is work that begins the next step. Averages of weights (EMA) write into existing tensors and are not
    judged. Work that a program wants in each step, such as metrics, is reported, too: the cost says what it is worth.
    """

    code: ClassVar[str] = "COMP011"
    cause: ClassVar[Cause] = SIDE_WORK
    claim: ClassVar[str] = "Every step does work that no gradient needs"
    confidence: ClassVar[float] = 0.8
    facts: ClassVar[tuple[TraceFact, ...]] = (side_work.side_work, *save_stages.FACTS)
    min_saved_ratio: float = 0.03

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the operators of the quoted step."""
        rows = loss.rows(run.table(self.facts[0]))
        by_op = rows.group_by("op").agg(pl.col("saved_ns").sum(), pl.len())
        ops = largest_first(by_op, "saved_ns", "op").head(_NAMED_OPS)
        listed = ", ".join(f"{op} ({units.duration(took_ns)})" for op, took_ns in ops.select("op", "saved_ns").rows())
        places = largest_first(rows.group_by("place").agg(pl.col("saved_ns").sum()), "saved_ns", "place")
        line = ""
        lines = rows.drop_nulls("line").group_by("line").agg(pl.col("saved_ns").sum())
        if lines.height:
            line = f" Most are called at {kernel_names.code_line(largest_first(lines, 'saved_ns', 'line')['line'][0])}."
        return (
            f"Operators {places['place'][0]} take {loss}, and no gradient of the step needs their results: {listed}."
            f"{line}",
            "Do this in every N-th step only, on part of the data, or after the training: evaluation, metrics, "
            "histograms and copies of weights need not run in each step.",
        )


_NAMED_OPS = 3
