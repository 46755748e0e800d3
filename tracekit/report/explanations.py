"""What tables, rules, causes, metrics and terms mean, as documents: each by itself, and lists of them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.errors import InputError
from tracekit.model.table_document import TableDocument
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
        {"name": entry.name, "synonyms": list(entry.synonyms), "meaning": entry.meaning, "details": list(entry.details)}
        for entry in meanings
    ]
    return Document(([Definitions(tuple(rows))],), values=values)


def join(documents: Mapping[str, Document], *, has_headings: bool) -> Document:
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
    return Document(tuple(sections), values=values)


def rules_document(rules: Sequence[RuleDocument]) -> Document:
    """A line per rule, its thresholds below; for programs with documentation and the thresholds' defaults."""
    rows = tuple(row for rule in rules for row in _rows(rule))
    hint = faint("Run tracekit explain CODE for details of one rule.")
    return Document(([Definitions(rows)], [hint]), values=list(map(_rule_values, rules)))


def rule_page(rule: RuleDocument) -> Document:
    """A rule's documentation, and its thresholds with how to set them."""
    paragraphs = [_paragraph(paragraph) for paragraph in rule.documentation.split("\n\n")]
    title = line((rule.code, Emphasis.FAINT), "  ", (rule.name(), Emphasis.STRONG))
    sections = ([title], *paragraphs, *_threshold_sections(rule))
    return Document(sections, values=[_rule_values(rule)])


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


_INTRODUCTION = """\
# Tables and columns

The tables of a run, as `tracekit query`, `tracekit.query` and `Trace` know them. This page is written by
`tracekit explain --kind table --format markdown`.

Times are integer nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; an absent
table is a table without rows. A query sees the rows of all ranks in one table, with the columns `window` and
`rank`; the tables of a `Trace`, which is one rank in one window, do not have these two columns.
"""


def tables_document(tables: Sequence[TableDocument]) -> Document:
    """Each table with its grain and its columns: names, types, units, meanings."""
    values = [
        {
            "name": table.name,
            "grain": table.grain,
            "columns": [
                {"name": column.name, "type": column.type_name, "unit": column.unit or None, "meaning": column.meaning}
                for column in table.columns
            ],
        }
        for table in tables
    ]
    return Document(tuple(map(_section, tables)), values=values)


def _section(table: TableDocument) -> Section:
    rows = [(line(column.name), faint(column.unit_or_type), line(column.meaning)) for column in table.columns]
    return [heading(table.name, f"  one row per {table.grain}"), Definitions(tuple(rows), indent=2)]


def schema_page(tables: Sequence[TableDocument]) -> str:
    """Return the page docs/schema.md."""
    return "\n".join((_INTRODUCTION, tables_as_markdown(tables)))


def tables_as_markdown(tables: Sequence[TableDocument], heading: str = "##") -> str:
    """Return each table under a heading, with what a row is and its columns."""
    parts = []
    for table in tables:
        parts.append(f"{heading} {table.name}\n\nOne row per {table.grain}.\n\n")
        parts[-1] += "| column | type | unit | meaning |\n|---|---|---|---|"
        parts[-1] += "".join(
            f"\n| {column.name} | {column.type_name} | {column.unit} | {column.meaning.replace('|', chr(92) + '|')} |"
            for column in table.columns
        )
        parts[-1] += "\n"
    return "\n".join(parts)
