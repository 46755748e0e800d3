"""What a plan of checkpoints says: how often to save, and goodput over numbers of nodes."""

from collections.abc import Sequence

from tracekit.model import units
from tracekit.plan.checkpoint import CheckpointPlan, Scale
from tracekit.report.document import Cells

_HEADER = ("nodes", "a failure every", "goodput", "best interval", "goodput then")
NEAR_RATIO = 0.005
"""Share of the time within which an interval is as good as the best: goodput is flat around its maximum."""


def advice(plan: CheckpointPlan, interval_s: float, mtbf_s: float | None = None) -> str:
    """What to do, in one or two sentences: how often to save where the time between failures is known."""
    interval = units.long_duration(interval_s)
    if plan.best_interval_seconds is None or mtbf_s is None:
        text = f"A save every {interval} blocks training for {units.share(plan.overhead_ratio)} of the time"
        if interval_s < plan.guided_interval_seconds:
            return f"{text}: save every {units.long_duration(plan.guided_interval_seconds)} or less often."
        return f"{text}."
    text = f"Save every {units.long_duration(plan.best_interval_seconds)}"
    if plan.goodput_ratio is not None and plan.best_goodput_ratio is not None:
        is_near = plan.best_goodput_ratio - plan.goodput_ratio <= NEAR_RATIO
        lost, least = (
            f"{units.share(1 - ratio)} of the time" for ratio in (plan.goodput_ratio, plan.best_goodput_ratio)
        )
        if is_near:
            text = f"Save every {interval}: {lost} is lost to saves and failures"
        else:
            text += f": {least} is lost to saves and failures then, and {lost} with a save every {interval}"
    text += "."
    if interval_s > mtbf_s:
        text += f" The job fails every {units.long_duration(mtbf_s)}: more often than it saves."
    return text


def scales(plans: Sequence[Scale]) -> Cells:
    """Goodput over numbers of nodes: a row each."""
    rows = tuple(
        (
            f"{scale.nodes:,}", units.long_duration(scale.mtbf_seconds), _share(scale.plan.goodput_ratio),
            units.long_duration(scale.plan.best_interval_seconds or 0), _share(scale.plan.best_goodput_ratio),
        )
        for scale in plans
    )  # fmt: skip
    return Cells(_HEADER, rows, numbers=(0, 1, 2, 3, 4))


def _share(ratio: float | None) -> str:
    return "" if ratio is None else units.share(ratio)
