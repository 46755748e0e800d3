"""The findings of a run, as `Run.check` returns them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import polars as pl

from tracekit.errors import RuleError
from tracekit.library.answer import Answer
from tracekit.model import run as model
from tracekit.model.run import OnTrace
from tracekit.model.trace import TraceFact
from tracekit.regression import gate
from tracekit.report import html, json, phrases, text
from tracekit.report.ci import code_locations, comment, sarif
from tracekit.rules import engine, rule
from tracekit.rules.rule import Rule

COLUMNS: Mapping[str, pl.DataType] = {
    "code": pl.String(), "name": pl.String(), "severity": pl.String(), "message": pl.String(), "fix": pl.String(),
    "cost_ns": pl.Int64(), "cost_ratio": pl.Float64(), "cost_bytes": pl.Int64(), "is_upper_bound": pl.Boolean(),
    "confidence": pl.Float64(), "ranks": pl.List(pl.Int64()), "steps": pl.List(pl.Int64()), "id": pl.String(),
}  # fmt: skip


def check(
    run: model.Run,
    rules: Iterable[Rule] | None = None,
    *,
    facts: Iterable[TraceFact] = (),
    on_progress: OnTrace | None = None,
    on_crash: Callable[[str, RuleError], None] | None = None,
) -> "Report":
    """Judge a run by rules, as `tracekit.rules.engine.check` does. The report shows itself in a notebook."""
    judged = engine.check(run, rules, facts=facts, on_progress=on_progress, on_crash=on_crash)
    return Report(**{field.name: getattr(judged, field.name) for field in fields(judged)})


class Report(rule.Report, Answer):
    """The findings of a run by severity and cost, what could not be judged, and the input files."""

    def to_frame(self) -> pl.DataFrame:
        """One row per finding: columns COLUMNS.

        cost_ns is the time that a step loses, by replay or as the rule measures it (`is_upper_bound`: at most);
        cost_ratio its share of step time.
        """
        rows = [
            (
                finding.code,
                phrases.rule_name(finding.code),
                finding.severity.label,
                finding.message,
                finding.fix,
                finding.cost_ns,
                finding.impact,
                finding.cost_bytes,
                finding.is_upper_bound,
                finding.confidence,
                list(finding.ranks),
                list(finding.steps),
                finding.id,
            )
            for finding in self.findings
        ]
        return pl.DataFrame(rows, schema=dict(COLUMNS), orient="row")

    def as_html(self) -> str:
        """The HTML report without its figures."""
        return html.as_fragment(self, self.run)

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML, Markdown, JSON, text, and SARIF for code hosts."""
        judged = gate.judge(self, fail_on=None)
        checkout = code_locations.Checkout(code_locations.repository_root(Path.cwd()))
        return {
            ".html": lambda: html.render(self, self.run),
            ".md": lambda: comment.render([judged], checkout),
            ".json": lambda: json.render(self, self.run),
            ".txt": lambda: text.render(self, self.run),
            ".sarif": lambda: sarif.render([judged], checkout),
        }

    def __str__(self) -> str:
        return text.render(self, self.run)

    def __repr__(self) -> str:
        return f"<Report on {self.run.name}: {phrases.severity_counts(self.findings)}>"
