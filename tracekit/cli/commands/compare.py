"""``tracekit compare``: whether a run is better or worse than another, or the difference is inconclusive."""

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import AllowDifferent, Format, OutputOptions, RoleName, StepName, UseCache, expand_options
from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracekit.model.run import Run
    from tracekit.model.trace import TraceFact
    from tracekit.regression.comparison import Comparison
    from tracekit.regression.step_change import StepChange
    from tracekit.regression.thresholds import Limit
    from tracekit.report.document import Document

LIMIT_CROSSED = 1
T = TypeVar("T")
_TOP = 20


class ComparisonFormat(StrEnum):
    """Formats of a comparison of two runs."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    CSV = "csv"
    JSON = "json"


@expand_options
def compare(
    reference: Annotated[
        str, typer.Argument(metavar="A", help="The reference: a run, a saved JSON report or a baseline.")
    ],
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="B…", help="The run, saved JSON report or baseline to judge; several runs if their sizes differ."
        ),
    ],
    *,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT", help="Exit with 1 if B is worse by more than this: 'step_time>3%', 'idle>5ms'. Repeatable."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,…",
            help="Explain the change of the step by operator, kernel or module; add path or shapes with commas.",
        ),
    ] = None,
    same_numbers: Annotated[
        bool,
        typer.Option("--same-numbers", help="Exit with 1 if loss or gradient norm of a step differ beyond rounding."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the table of metrics, too.")] = False,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="With --by: show the N largest changes as text.")] = _TOP,
    comparison_format: Annotated[
        ComparisonFormat, typer.Option("--format", help="Output format.")
    ] = ComparisonFormat.TEXT,
    allow_different: AllowDifferent = False,
    cache: UseCache = True,
    step_name: StepName = None,
    role: RoleName = None,
    output_options: OutputOptions,
) -> None:
    """Compare two runs by the medians of their steps, with 99% confidence intervals; or runs of different size.

    The verdict on each metric is better, worse, same or inconclusive. A --fail-if limit is exceeded only by a
    significant change. With --by, the changes of operators, kernels and idle time add up to that of the step. Runs on
    other numbers of GPUs or nodes, or with other batches, are compared by throughput and efficiency. Exit code 4: the
    runs cannot be compared.
    """
    from tracekit.model.run import Run
    from tracekit.regression import comparison as comparing
    from tracekit.regression import scaling, thresholds
    from tracekit.report import comparison, query_rows, step_change
    from tracekit.report import scaling as report

    parsed = [thresholds.parse_limit(text) for text in fail_if or []]
    paths = (reference, *candidates)
    if by is None:
        sides = [run_loading.comparison_side(path, cache=cache, step_name=step_name, role=role) for path in paths]
        runs = [side for side in sides if isinstance(side, Run)]
        if len(runs) == len(sides) and scaling.differ_in_size(runs):
            sized = [run_loading.scaling_side(run) for run in runs]
            # Of different models, or of work that is not known, only the metrics of two runs can be compared.
            if not allow_different or len(runs) > 2 or scaling.has_efficiency(sized):
                by_size = scaling.compare_sizes(sized, allow_different=allow_different)
                _write(report.document(by_size), report.as_csv(by_size), comparison_format, output_options)
                for run in runs[1:] if parsed else ():
                    _judge(parsed, comparing.compare_runs(runs[0], run, allow_different=True))
                return
        compared = comparing.compare_runs(*_require_two(sides), allow_different=allow_different)
        with_metrics = verbose or comparison_format is not ComparisonFormat.TEXT
        document = comparison.document(compared, with_metrics=with_metrics)
        as_csv = comparison.as_csv(compared)
    else:
        opened = partial(run_loading.open_compared_run, cache=cache, step_name=step_name, role=role)
        changed = _step_change(_require_two(paths), by, opened, allow_different=allow_different)
        document, compared = step_change.document(changed, top), changed.compared
        as_csv = query_rows.as_csv(changed.rows)
    _write(document, as_csv, comparison_format, output_options)
    _judge(parsed, compared, same_numbers=same_numbers)


def _write(
    document: "Document", as_csv: str, comparison_format: ComparisonFormat, output_options: OutputOptions
) -> None:
    if comparison_format is ComparisonFormat.CSV:
        output_options.emit(as_csv)
    else:
        output_options.write_in(document, Format(comparison_format.value))


def _require_two(sides: "Sequence[T]") -> "tuple[T, T]":
    if len(sides) != 2:
        raise InputError(
            f"{len(sides)} runs: only runs that differ in GPUs, nodes or batch are compared all at once, and by no "
            "--by; compare two at a time"
        )
    return sides[0], sides[1]


def _step_change(
    paths: tuple[str, str],
    by: str,
    open_run: "Callable[[str, Sequence[TraceFact]], Run]",
    *,
    allow_different: bool,
) -> "StepChange":
    from tracekit.analysis.compute import kernels
    from tracekit.regression import step_change

    keys = output.split_names(by)
    kernels.require_known("--by", keys, step_change.KEYS)
    a, b = (step_change.RunSteps.of(open_run(path, step_change.FACTS)) for path in paths)
    return step_change.step_change(a, b, keys, allow_different=allow_different)


def _judge(limits: "list[Limit]", comparison: "Comparison", *, same_numbers: bool = False) -> None:
    from tracekit.report import comparison as report

    by_metric = {change.metric: change for change in comparison.changes}
    missing = [limit.text for limit in limits if limit.metric not in by_metric]
    if missing:
        raise InputError(f"--fail-if {missing[0]}: not measured in both runs; compare lists the metrics that are")
    for limit in limits:
        output.notify(report.limit_verdict(limit, by_metric[limit.metric]))
    if same_numbers and comparison.numbers is None:
        raise InputError("--same-numbers: no loss or gradient norm of a common step is logged by both runs")
    if same_numbers and comparison.numbers is not None:
        output.notify(report.number_sentence(comparison.numbers))
        if comparison.numbers.first is not None:
            raise typer.Exit(LIMIT_CROSSED)
    if any(limit.is_exceeded(by_metric[limit.metric]) for limit in limits):
        raise typer.Exit(LIMIT_CROSSED)
