"""What a step would take without a cause of lost time, as `Run.what_if` returns it."""

from collections.abc import Callable, Mapping

import polars as pl

from tracekit.library.answer import Answer
from tracekit.model import escaping, units
from tracekit.replay.graph import what_if
from tracekit.report import html_fragments, text
from tracekit.report import what_if as report
from tracekit.report.render import json
from tracekit.report.render import text as render_text


class WhatIf(Answer):
    """The saving per step without each cause, by replay of the steps on their dependency graph."""

    def __init__(self, run: str, answers: what_if.WhatIf) -> None:
        """Show the answers for a run of this name."""
        self.run = run
        self.answers = answers

    def to_frame(self) -> pl.DataFrame:
        """One row per cause, the largest saving first: columns `report.what_if.COLUMNS`."""
        return report.as_table(self.answers)

    def as_html(self) -> str:
        """The replay against the recording, a row per cause, and the causes without an answer."""
        answers = self.answers
        replayed = f"replayed without changes {units.duration(answers.replayed_ns)} ({answers.replay_error_ratio:+.1%})"
        headline = html_fragments.headline(
            f"{self.run}: mean step {units.duration(answers.step_ns)}; {replayed}",
            report.caveat(answers),
            "good" if answers.is_reproduced else "warning",
        )
        rows = [(answer.name, answer.unavailable_reason) for answer in answers.unavailable]
        unavailable = escaping.html_table(("without", "cannot be computed, because"), rows) if rows else ""
        return headline + report.as_html(answers) + unavailable

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML, JSON and text."""
        return {
            ".html": lambda: self.as_page(self.run, "What if", "Savings per step, by replay"),
            ".json": lambda: json.render(report.document(self.answers, (), run=self.run)),
            ".txt": lambda: str(self),
        }

    def __str__(self) -> str:
        return render_text.render(report.document(self.answers, (), run=self.run), width=text.WIDTH)

    def __repr__(self) -> str:
        return f"<WhatIf of {self.run}: {units.count(len(self.answers.answers), 'cause')}>"
