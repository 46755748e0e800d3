"""``tracekit compare``: did it get better or worse, or can these steps not tell?"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Output
from tracekit.cli.run_loading import UseCache
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.regression.comparison import Comparison
    from tracekit.regression.limits import Limit

LIMIT_CROSSED = 1


class ComparisonFormat(StrEnum):
    """What a comparison can be written as."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def compare(
    reference: Annotated[str, typer.Argument(metavar="A", help="What to compare with: a run, or a saved JSON report.")],
    candidate: Annotated[str, typer.Argument(metavar="B", help="What to judge: a run, or a saved JSON report.")],
    *,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="BAR",
            help="Exit with 1 where B is worse by more: 'step_time>3%', 'idle>5ms'. Repeatable.",
        ),
    ] = None,
    comparison_format: Annotated[
        ComparisonFormat, typer.Option("--format", help="How to write it.")
    ] = ComparisonFormat.TEXT,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare even where model, world size or device differ.")
    ] = False,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Compare two runs by the medians of their steps, with 95% intervals.

    The verdict on each metric is better, worse, same or cannot tell. A bar is crossed only by a change that the
    interval says is more than noise. Exits with 4 where the runs cannot be compared.
    """
    from tracekit.regression import comparison as comparing
    from tracekit.regression import limits as bars
    from tracekit.report import comparison as told

    wanted = [bars.parse(text) for text in fail_if or []]
    sides = [run_loading.comparison_side(path, cache=cache) for path in (reference, candidate)]
    found = comparing.compare(*sides, allow_different=allow_different)
    if comparison_format is ComparisonFormat.JSON:
        output.emit(told.as_json(found), out)
    elif comparison_format is ComparisonFormat.MARKDOWN:
        output.emit(told.as_markdown(found), out)
    else:
        output.emit(told.as_text(found, width=output.width(out), color=output.color(out)), out)
    _judge(wanted, found)


def _judge(wanted: "list[Limit]", found: "Comparison") -> None:
    from tracekit.report import comparison as told

    by_metric = {change.metric: change for change in found.changes}
    missing = [bar.text for bar in wanted if bar.metric not in by_metric]
    if missing:
        raise InputError(f"--fail-if {missing[0]}: not measured in both runs; compare shows what is")
    for bar in wanted:
        output.notify(told.limit_verdict(bar, by_metric[bar.metric]))
    if any(bar.is_exceeded(by_metric[bar.metric]) for bar in wanted):
        raise typer.Exit(LIMIT_CROSSED)
