"""Which rules cannot judge a run at all, because what they measure was not recorded."""

from collections.abc import Iterable, Iterator

import polars as pl

from tracekit.analysis.quality import trace_quality
from tracekit.model.run import Run
from tracekit.rules.rule import TIMED_FAMILIES, Rule, family

_WITHOUT_DEVICE = "no device activity was recorded, so times are of the host and were not judged (see DATA001)."
_WITHOUT_HOST = "CPU activity was not recorded, so the host was not judged (see DATA001)."
_WITHOUT_WORK = "no work was recorded, so nothing was judged (see DATA001)."
_REASONS = (
    ("no_work", TIMED_FAMILIES, _WITHOUT_WORK),
    ("no_device_activity", TIMED_FAMILIES, _WITHOUT_DEVICE),
    ("no_host_activity", ("HOST",), _WITHOUT_HOST),
)
"""Issue of a trace, and the families of rules that cannot judge a run all of whose traces have it."""

FACTS = (trace_quality.data_quality,)


def blind_spots(run: Run, rules: Iterable[Rule]) -> dict[str, str]:
    """Return why rules cannot judge a run, by code; rules that can are left out."""
    reasons = list(_reasons(run))
    return {rule.code: reason for rule in rules for families, reason in reasons if family(rule.code) in families}


def _reasons(run: Run) -> Iterator[tuple[tuple[str, ...], str]]:
    issues = run.table(trace_quality.data_quality)
    for kind, families, reason in _REASONS:
        affected = issues.filter(pl.col("kind") == kind).select("window", "rank").unique().height
        if run.sources and affected == len(run.sources):
            yield families, reason
