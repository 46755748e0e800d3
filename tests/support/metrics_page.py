"""The page docs/metrics.md, from the registry of metrics."""

from tracekit.regression.metrics import all_metrics
from tracekit.report.render import markdown

_METRICS_PAGE = """\
# Metrics

What `tracekit compare`, `check --baseline`, budgets, history and the dashboard compare runs by. Settings and options
may leave out the unit of a name: `step_time`. Another distribution adds a metric by the entry point group
`tracekit.metrics`: an object `tracekit.regression.metrics.Metric` with a function that measures it. This page is made
from the registry `METRICS`.
"""


def metrics_page() -> str:
    """Return the page docs/metrics.md: every registered metric, and how a change of it is judged."""
    header = ["metric", "label", "unit", "one sample per", "over ranks", "better", "fails a check", "meaning"]
    rows = [
        [
            f"`{metric.key}`",
            metric.label,
            metric.unit.name,
            metric.scope.value,
            metric.over_ranks.value if metric.has_rank_values else "",
            "lower" if metric.lower_is_better else "higher",
            "yes" if metric.fails_check else "",
            metric.meaning,
        ]
        for metric in all_metrics().values()
    ]
    return f"{_METRICS_PAGE}\n{markdown.table(header, rows)}\n"
