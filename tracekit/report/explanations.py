"""What rules, causes, metrics and terms mean, as documents: each by itself, and lists of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.errors import InputError
from tracekit.report.document import Definitions, Document, Emphasis, Line, Section, faint, heading, line
from tracekit.rules.documents import RuleDocument

SECTIONS = ("What it does", "Why it costs", "How it is measured", "How to fix", "Blind spots")
GLOSSARY = "glossary.md"
_GLOSSARY_ROW = re.compile(r"^\| (?!term \|)([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Meaning:
    """What a name means in a sentence, and more about it in further ones."""

    name: str
    meaning: str
    details: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()


def terms() -> tuple[Meaning, ...]:
    """Terms of the glossary. Raises InputError if the installation has none."""
    package = Path(__file__).parent
    for path in (package / GLOSSARY, package.parents[1] / "docs" / GLOSSARY):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return tuple(Meaning(term, meaning) for term, meaning in _GLOSSARY_ROW.findall(text))
    raise InputError("this installation has no glossary; install tracekit again")


def meanings_document(meanings: Sequence[Meaning]) -> Document:
    """A line per name, what more there is to say of it below."""
    rows = [
        row
        for entry in meanings
        for row in [
            (heading(entry.name), faint(", ".join(entry.synonyms)), line(entry.meaning)),
            *((line(""), line(""), faint(sentence)) for sentence in entry.details),
        ]
    ]
    values = [
        {
            "name": entry.name,
            "synonyms": list(entry.synonyms),
            "meaning": entry.meaning,
            "details": list(entry.details),
        }
        for entry in meanings
    ]
    return Document(([Definitions(tuple(rows))],), values=values, is_ascii=False)


def joined(documents: Mapping[str, Document], *, has_headings: bool) -> Document:
    """Documents by kind as one; for programs a list in which each entry has its kind."""
    sections = [
        section
        for kind, document in documents.items()
        for section in [*([[heading(kind)]] if has_headings else []), *document.sections]
    ]
    values = [
        {"kind": kind} | entry
        for kind, document in documents.items()
        if isinstance(document.values, list)
        for entry in document.values
    ]
    return Document(tuple(sections), values=values, is_ascii=False)


def rules_document(rules: Sequence[RuleDocument]) -> Document:
    """A line per rule, its thresholds below; for programs with documentation and the thresholds' defaults."""
    rows = tuple(row for rule in rules for row in _rows(rule))
    hint = faint("Run tracekit explain CODE for details of one rule.")
    return Document(([Definitions(rows)], [hint]), values=list(map(_rule_values, rules)), is_ascii=False)


def rule_page(rule: RuleDocument) -> Document:
    """A rule's documentation, and its thresholds with how to set them."""
    paragraphs = [_paragraph(paragraph) for paragraph in rule.documentation.split("\n\n")]
    title = line((rule.code, Emphasis.FAINT), "  ", (rule.name(), Emphasis.STRONG))
    sections = ([title], *paragraphs, *_threshold_sections(rule))
    return Document(sections, values=[_rule_values(rule)], is_ascii=False)


def _rule_values(rule: RuleDocument) -> dict[str, object]:
    return {
        "code": rule.code,
        "name": rule.name(),
        "summary": rule.summary,
        "documentation": rule.documentation,
        "thresholds": rule.thresholds,
    }


def _rows(rule: RuleDocument) -> Iterator[tuple[Line, ...]]:
    yield faint(rule.code), heading(rule.name()), line(rule.summary)
    values = "  ".join(f"{name} = {_value_text(value)}" for name, value in rule.thresholds.items())
    if values:
        yield line(""), line(""), faint(values)


def _threshold_sections(rule: RuleDocument) -> Iterator[Section]:
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
