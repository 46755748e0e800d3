"""The rules themselves as documents: all of them, or one explained."""

from collections.abc import Iterator, Sequence

from tracekit.report.document import Definitions, Document, Emphasis, Line, Section, faint, heading, line
from tracekit.rules.documents import RuleDocument

SECTIONS = ("What it does", "Why it costs", "How it is measured", "How to fix", "Blind spots")


def document(rules: Sequence[RuleDocument]) -> Document:
    """A line per rule, its thresholds below; for programs with documentation and the thresholds' defaults."""
    values = [
        {
            "code": rule.code,
            "name": rule.name(),
            "summary": rule.summary,
            "documentation": rule.documentation,
            "thresholds": rule.thresholds,
        }
        for rule in rules
    ]
    rows = tuple(row for rule in rules for row in _rows(rule))
    hint = faint("Run tracekit explain CODE for details of one rule.")
    return Document(([Definitions(rows)], [hint]), values=values, is_ascii=False)


def explanation(rule: RuleDocument) -> Document:
    """A rule's documentation, and its thresholds with how to set them."""
    paragraphs = [_paragraph(paragraph) for paragraph in rule.documentation.split("\n\n")]
    title = line((rule.code, Emphasis.FAINT), "  ", (rule.name(), Emphasis.STRONG))
    return Document(([title], *paragraphs, *_thresholds(rule)))


def _rows(rule: RuleDocument) -> Iterator[tuple[Line, ...]]:
    yield faint(rule.code), heading(rule.name()), line(rule.summary)
    values = "  ".join(f"{name} = {_value_text(value)}" for name, value in rule.thresholds.items())
    if values:
        yield line(""), line(""), faint(values)


def _thresholds(rule: RuleDocument) -> Iterator[Section]:
    if rule.thresholds:
        texts = [f"{name} = {_value_text(value)}" for name, value in rule.thresholds.items()]
        settings = f"tracekit check RUN --set {rule.code}.{texts[0].replace(' = ', '=', 1)}"
        how = f"{settings}, or [tool.tracekit.rules.{rule.code}] in pyproject.toml"
        lines = [Line((text,), indent=2) for text in texts]
        yield [heading("Thresholds"), *lines, Line(((how, Emphasis.FAINT),), indent=2)]


def _paragraph(text: str) -> Section:
    """A paragraph of a docstring: prose reflowed, the section it opens strong, indented lines as they are."""
    lines = text.splitlines()
    if any(written.startswith((" ", "-", "*")) for written in lines):
        return [Line((written,), indent=2) for written in lines]
    prose = " ".join(lines)
    section = next((name for name in SECTIONS if prose.startswith(name)), "")
    return [Line(((section, Emphasis.STRONG), prose.removeprefix(section)), indent=2)]


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)
