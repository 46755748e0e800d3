"""``tracekit compare``: whether a run is better or worse than another, or the difference is inconclusive."""

from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import (
    AllowDifferent,
    DocumentFormat,
    DocumentFormatOption,
    OutputOptions,
    UseCache,
    expand_options,
)
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.regression.comparison import Comparison
    from tracekit.regression.thresholds import Limit

LIMIT_CROSSED = 1


@expand_options
def compare(
    reference: Annotated[
        str, typer.Argument(metavar="A", help="The reference: a run, a saved JSON report or a baseline.")
    ],
    candidate: Annotated[str, typer.Argument(metavar="B", help="The run, saved JSON report or baseline to judge.")],
    *,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT", help="Exit with 1 if B is worse by more than this: 'step_time>3%', 'idle>5ms'. Repeatable."
        ),
    ] = None,
    document_format: DocumentFormatOption = DocumentFormat.TEXT,
    allow_different: AllowDifferent = False,
    cache: UseCache = True,
    output_options: OutputOptions,
) -> None:
    """Compare two runs by the medians of their steps, with 99% confidence intervals.

    The verdict on each metric is better, worse, same or inconclusive. A --fail-if limit is exceeded only by a
    significant change. Exit code 4: the runs cannot be compared.
    """
    from tracekit.regression import comparison as comparing
    from tracekit.regression import thresholds
    from tracekit.report import comparison as report

    parsed = [thresholds.parse_limit(text) for text in fail_if or []]
    sides = [run_loading.comparison_side(path, cache=cache) for path in (reference, candidate)]
    comparison = comparing.compare(*sides, allow_different=allow_different)
    output_options.write_as(document_format, report, comparison)
    _judge(parsed, comparison)


def _judge(limits: "list[Limit]", comparison: "Comparison") -> None:
    from tracekit.report import comparison as report

    by_metric = {change.metric: change for change in comparison.changes}
    missing = [limit.text for limit in limits if limit.metric not in by_metric]
    if missing:
        raise InputError(f"--fail-if {missing[0]}: not measured in both runs; compare lists the metrics that are")
    for limit in limits:
        output.notify(report.limit_verdict(limit, by_metric[limit.metric]))
    if any(limit.is_exceeded(by_metric[limit.metric]) for limit in limits):
        raise typer.Exit(LIMIT_CROSSED)
