"""Answers of a run: its findings, what-ifs and timeline. Each shows itself in a notebook and is saved by suffix."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from html import escape
from pathlib import Path

import polars as pl

from tracekit.errors import InputError, RuleError
from tracekit.model import run as model
from tracekit.model import units
from tracekit.model.run import OnTrace
from tracekit.model.trace import TraceFact
from tracekit.regression import gate
from tracekit.replay.graph import what_if as replayed
from tracekit.report import html, html_fragments, json, phrases, shared_view, text, what_if
from tracekit.report.ci import code_locations, comment, sarif
from tracekit.report.document import Document
from tracekit.report.render import html as render_html
from tracekit.report.render import json as render_json
from tracekit.report.render import markdown as render_markdown
from tracekit.report.render import text as render_text
from tracekit.rules import engine, rule
from tracekit.rules.rule import Rule

COLUMNS: Mapping[str, pl.DataType] = {
    "code": pl.String(), "name": pl.String(), "severity": pl.String(),
    "sentence": pl.String(), "message": pl.String(), "fix": pl.String(),
    "cost_ns": pl.Int64(), "cost_ratio": pl.Float64(), "cost_bytes": pl.Int64(), "is_upper_bound": pl.Boolean(),
    "confidence": pl.Float64(), "ranks": pl.List(pl.Int64()), "steps": pl.List(pl.Int64()), "id": pl.String(),
}  # fmt: skip
_HEIGHT_PX = 720


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


class Answer(ABC):
    """An answer about one run or two."""

    @abstractmethod
    def as_html(self) -> str:
        """Pieces of HTML, without their style sheet."""

    @abstractmethod
    def formats(self) -> Mapping[str, Callable[[], str]]:
        """The formats that `save` writes: suffix of a file -> its text."""

    def save(self, path: str | Path) -> Path:
        """Write the answer to a file in the format of its suffix. Raises InputError for another suffix."""
        path, formats = Path(path), self.formats()
        if path.suffix not in formats:
            raise InputError(f"{path}: unknown format {path.suffix or 'without a suffix'}; use {', '.join(formats)}")
        try:
            path.write_text(formats[path.suffix](), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}; name another file") from None
        return path

    def _repr_html_(self) -> str:
        return f"<style>{html_fragments.style()}</style><div>{self.as_html()}</div>"


class DocumentAnswer(Answer):
    """An answer that is a document: every renderer writes it."""

    @abstractmethod
    def document(self) -> Document:
        """What the answer says."""

    def as_html(self) -> str:
        """The document as pieces of HTML, without their style sheet."""
        return render_html.fragment(self.document())

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML, Markdown, JSON and text."""
        return {
            ".html": lambda: render_html.render(self.document()),
            ".md": lambda: render_markdown.render(self.document()),
            ".json": lambda: render_json.render(self.document()),
            ".txt": lambda: str(self),
        }

    def __str__(self) -> str:
        return render_text.render(self.document(), width=text.WIDTH)


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
                finding.sentence,
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


class WhatIf(DocumentAnswer):
    """The saving per step without each cause, by replay of the steps on their dependency graph."""

    def __init__(self, run: str, answers: replayed.WhatIf) -> None:
        """Show the answers for a run of this name."""
        self.run = run
        self.answers = answers

    def document(self) -> Document:
        """The run and its replay, and a line per cause."""
        return what_if.document(self.answers, (), run=self.run)

    def to_frame(self) -> pl.DataFrame:
        """One row per cause, the largest saving first: columns `report.what_if.COLUMNS`."""
        return what_if.as_table(self.answers)

    def __repr__(self) -> str:
        return f"<WhatIf of {self.run}: {units.count(len(self.answers.answers), 'cause')}>"


class Timeline(Answer):
    """Every slice of a run, with the evidence of its findings: the timeline of the dashboard in one HTML page."""

    def __init__(self, report: Report, max_bytes: int) -> None:
        """Show the run of a report; its compressed slices take at most `max_bytes`."""
        self.report = report
        self.max_bytes = max_bytes

    @cached_property
    def page(self) -> str:
        """The page: it holds its scripts and its data, needs no server and makes no request."""
        return shared_view.render(shared_view.timeline_view(self.report, self.report.run, {}, self.max_bytes))

    def as_html(self) -> str:
        """The page in a frame. Its scripts cannot reach the notebook, nor the notebook's style sheet the timeline."""
        style = f"width:100%;height:{_HEIGHT_PX}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.page)}"></iframe>'

    def _repr_html_(self) -> str:
        return self.as_html()

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML."""
        return {".html": lambda: self.page}

    def __repr__(self) -> str:
        return f"<Timeline of {self.report.run.name}>"
