"""The rules themselves -> text or JSON."""

import json
from collections.abc import Sequence

from rich.console import RenderableType

from tracekit.report import text_layout
from tracekit.rules.documents import RuleDocument

SECTIONS = ("What it does", "Why it costs", "How it is measured", "How to fix", "Blind spots")


def as_text(rules: Sequence[RuleDocument], *, width: int, color: bool = False) -> str:
    """Return one line per rule, its thresholds below."""
    rows: list[list[RenderableType]] = []
    for rule in rules:
        rows.append([text_layout.dim(rule.code), text_layout.title(rule.name()), text_layout.line(rule.summary)])
        values = "  ".join(f"{name} = {_value_text(value)}" for name, value in rule.thresholds.items())
        rows += [["", "", text_layout.dim(values)]] if values else []
    hint = text_layout.dim("Run tracekit explain CODE for details of one rule.")
    return text_layout.print_to_string([text_layout.grid(rows), "", hint], width=width, color=color)


def as_json(rules: Sequence[RuleDocument]) -> str:
    """Return the rules as a JSON array: code, name, summary, documentation, thresholds with their defaults."""
    rows = [
        {
            "code": rule.code,
            "name": rule.name(),
            "summary": rule.summary,
            "documentation": rule.documentation,
            "thresholds": rule.thresholds,
        }
        for rule in rules
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def explanation(rule: RuleDocument, *, width: int, color: bool = False) -> str:
    """Return a rule's documentation, and its thresholds with how to set them."""
    parts: list[RenderableType] = [
        text_layout.line((rule.code, text_layout.DIM), "  ", (rule.name(), text_layout.BOLD)),
        "",
    ]
    for paragraph in rule.documentation.split("\n\n"):
        parts += [*_paragraph(paragraph), ""]
    values = rule.thresholds
    if values:
        lines = [text_layout.line(f"{name} = {_value_text(value)}") for name, value in values.items()]
        name, value = next(iter(values.items()))
        settings = f"tracekit check RUN --set {rule.code}.{name}={_value_text(value)}"
        lines.append(text_layout.dim(f"{settings}, or [tool.tracekit.rules.{rule.code}] in pyproject.toml"))
        parts += [text_layout.title("Thresholds"), *map(text_layout.indent, lines)]
    return text_layout.print_to_string(parts, width=width, color=color).rstrip() + "\n"


def _paragraph(text: str) -> list[RenderableType]:
    """Return a paragraph of a docstring: prose reflowed, the section it opens in bold, indented lines as they are."""
    lines = text.splitlines()
    if any(line.startswith((" ", "-", "*")) for line in lines):
        return [text_layout.indent(text_layout.line(line)) for line in lines]
    prose = " ".join(lines)
    section = next((heading for heading in SECTIONS if prose.startswith(heading)), "")
    return [text_layout.indent(text_layout.line((section, text_layout.BOLD), prose.removeprefix(section)))]


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)
