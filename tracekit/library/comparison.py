"""Two runs compared, as `Run.compare` returns it."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracekit.errors import InputError
from tracekit.library.answers import DocumentAnswer
from tracekit.model.run import Run
from tracekit.regression import comparison as comparing
from tracekit.regression import scaling as sizes
from tracekit.regression import step_change as explaining
from tracekit.regression.comparison import RunSamples
from tracekit.regression.scaling import ScalingComparison, ScalingSide
from tracekit.report import (
    baseline_json,
    charts,
    comparison,
    json,
    query_rows,
    scaling,
    shared_view,
    step_change,
)
from tracekit.report.document import Document

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Comparison(DocumentAnswer):
    """Whether a run is better or worse than its reference, metric by metric."""

    def __init__(self, compared: comparing.Comparison) -> None:
        """Show a comparison."""
        self.compared = compared

    def to_frame(self) -> pl.DataFrame:
        """One row per metric: reference and candidate in the metric's own unit, change, low, high, verdict."""
        rows = [dataclasses.asdict(change) | {"verdict": change.verdict.value} for change in self.compared.changes]
        return pl.DataFrame(rows, infer_schema_length=None)

    def document(self) -> Document:
        """The verdict, the contributions to the change of the step, and a row per metric."""
        return comparison.document(self.compared)

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML, Markdown, JSON, text and CSV."""
        return {**super().formats(), ".csv": lambda: comparison.as_csv(self.compared)}

    def __repr__(self) -> str:
        return f"<Comparison of {self.compared.candidate} with {self.compared.reference}>"


class StepComparison(DocumentAnswer):
    """The change of the step by operator, kernel or module; the rows add up to it."""

    def __init__(self, changed: explaining.StepChange) -> None:
        """Show the change of a step."""
        self.changed = changed

    def to_frame(self) -> pl.DataFrame:
        """One row per operator, kernel or module and kind of idle time, the largest change first."""
        return self.changed.rows

    def document(self) -> Document:
        """One sentence, and the rows with the largest changes."""
        return step_change.document(self.changed)

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML, Markdown, JSON, text and CSV."""
        return {**super().formats(), ".csv": lambda: query_rows.as_csv(self.changed.rows)}

    def __repr__(self) -> str:
        compared = self.changed.compared
        return f"<Comparison of {compared.candidate} with {compared.reference} by {', '.join(self.changed.by)}>"


class SizeComparison(DocumentAnswer):
    """Runs of one job of different size: throughput, efficiency, and what each part of the step grew by."""

    def __init__(self, compared: ScalingComparison) -> None:
        """Show a comparison; its first run is the reference."""
        self.compared = compared

    def to_frame(self) -> pl.DataFrame:
        """One row per run: size, throughput, efficiency, and each part of the step in ns."""
        return scaling.as_table(self.compared)

    def document(self) -> Document:
        """A sentence per run, the runs, and the contributions of parts."""
        return scaling.document(self.compared)

    def plot(self) -> "go.Figure":
        """GPU time per token by part, and throughput against perfect scaling."""
        from tracekit.library.notebook_figure import NotebookFigure

        return NotebookFigure.of(charts.scaling(self.compared), self.compared.runs[-1].name, "Scaling")

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML with the figure, Markdown, JSON, text and CSV."""
        return {**super().formats(), ".html": self._page, ".csv": lambda: scaling.as_csv(self.compared)}

    def _page(self) -> str:
        runs = self.compared.runs
        subtitle = f"compared with {self.compared.reference.name}"
        parts: list[shared_view.Part] = [self.as_html(), shared_view.Figure("scaling", self.plot())]
        return shared_view.render(shared_view.SharedView(runs[-1].name, "Comparison", subtitle, parts))

    def __repr__(self) -> str:
        *_, last = self.compared.runs
        return f"<SizeComparison of {last.name} with {self.compared.reference.name}>"


def saved_samples(path: Path) -> RunSamples | None:
    """Samples in a saved JSON report or a baseline; None if the path is neither."""
    if json.is_report(path):
        return json.read(path)
    return RunSamples.of_baseline(baseline_json.read(path)) if baseline_json.is_baseline(path) else None


def compare(reference: Run | RunSamples, candidate: Run, *, allow_different: bool) -> Comparison | SizeComparison:
    """Compare the medians of steps, with 99% intervals; or runs of different size by throughput and efficiency."""
    if isinstance(reference, Run) and sizes.differ_in_size([reference, candidate]):
        sides = [ScalingSide.of(run) for run in (reference, candidate)]
        if not allow_different or sizes.has_efficiency(sides):
            return SizeComparison(sizes.compare_sizes(sides, allow_different=allow_different))
    return Comparison(comparing.compare_runs(reference, candidate, allow_different=allow_different))


def compare_steps(
    reference: Run | RunSamples, candidate: Run, keys: tuple[str, ...], *, allow_different: bool
) -> StepComparison:
    """Explain the change of the step by some of `step_change.KEYS`."""
    if not isinstance(reference, Run):
        raise InputError(f"{reference.name}: a saved report has no operators; by=… needs the traces of both runs")
    unknown = [key for key in keys if key not in explaining.KEYS]
    if unknown:
        raise InputError(f"{unknown[0]}: runs are compared by {', '.join(explaining.KEYS)}")
    before, after = (explaining.RunSteps.of(run) for run in (reference, candidate))
    return StepComparison(explaining.step_change(before, after, keys, allow_different=allow_different))
