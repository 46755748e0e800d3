"""``tracekit explain``: what rules, tables, causes, metrics and terms mean."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli.options import DocumentOptions, Format, expand_options
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.table_document import TableDocument
    from tracekit.regression.metrics import Metric
    from tracekit.replay.graph.causes.cause import Cause
    from tracekit.report.document import Document
    from tracekit.report.explanations import Meaning
    from tracekit.rules.documents import RuleDocument


class Kind(StrEnum):
    """What can be explained."""

    RULE = "rule"
    TABLE = "table"
    CAUSE = "cause"
    METRIC = "metric"
    TERM = "term"


@expand_options
def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A rule (code, name or id of a finding), table, cause, metric or term.",
            show_default=False,
        ),
    ] = None,
    *,
    kind: Annotated[Kind | None, typer.Option(help="Only names of this kind; without NAME, all of them.")] = None,
    result: DocumentOptions,
) -> None:
    """Explain a rule, a table of query, a cause of whatif, a metric of compare or a term; without NAME, list them.

    A rule: what it does, why it costs time, how it measures, how to fix its findings, its blind spots, its thresholds.
    A table: what a row is, and the unit and meaning of each column.
    """
    from tracekit.report import explanations

    if result.document_format is Format.MARKDOWN and kind is Kind.TABLE:
        result.emit(explanations.schema_page(_tables(name, is_page=True)))
        return
    kinds = tuple(Kind) if kind is None else (kind,)
    if name is not None:
        documents = pages(name, kinds)
    elif len(kinds) == 1:
        documents = {kinds[0].value: _LISTS[kinds[0]]()}
    else:
        documents = {kind.value: explanations.meanings_document(_MEANINGS[kind]()) for kind in kinds}
    document = explanations.join(documents, has_headings=len(documents) > 1)
    result.write_document(document)


def pages(name: str, kinds: "Sequence[Kind]") -> "dict[str, Document]":
    """Return what a name means, by kind: a rule and its cause often have one name. Raises ConfigError for none."""
    from tracekit.report import explanations

    if Kind.RULE in kinds and (rule := _rule_of_code(name)):
        return {Kind.RULE.value: explanations.rule_page(rule)}
    documents = {kind.value: page for kind in kinds if (page := _PAGES[kind](name))}
    if not documents:
        raise ConfigError(_unknown(name, kinds))
    return documents


def _unknown(name: str, kinds: "Sequence[Kind]") -> str:
    from tracekit.cli import settings_file
    from tracekit.rules import documents

    codes = [rule.code for rule in documents.all_documents()]
    if Kind.RULE in kinds and (family := [code for code in codes if code.rstrip("0123456789") == name.upper()]):
        return f"{name} is a family of rules: name one of {', '.join(family)}"
    names = [text for kind in kinds for entry in _MEANINGS[kind]() for text in _names(entry)]
    what = kinds[0].value if len(kinds) == 1 else "rule, table, cause, metric or term"
    return f"no {what} is called {name!r}: {settings_file.suggestion(names, name)}"


# Rules --------------------------------------------------------------------------------------------------------------


def _rule_of_code(name: str) -> "RuleDocument | None":
    """Return the rule of a code or of the id of a finding."""
    from tracekit.rules import documents

    code = name.partition("-")[0].upper()
    return next((rule for rule in documents.all_documents() if rule.code == code), None)


def _rule_list() -> "Document":
    from tracekit.report import explanations
    from tracekit.rules import documents

    return explanations.rules_document(documents.all_documents())


def _rule_page(name: str) -> "Document | None":
    from tracekit.report import explanations
    from tracekit.rules import documents

    rule = next((rule for rule in documents.all_documents() if rule.name() == name.lower()), None)
    return None if rule is None else explanations.rule_page(rule)


def _rules() -> "Sequence[Meaning]":
    from tracekit.report.explanations import Meaning
    from tracekit.rules import documents

    return [Meaning(rule.code, rule.summary, synonyms=(rule.name(),)) for rule in documents.all_documents()]


# Tables -------------------------------------------------------------------------------------------------------------


def _tables(name: str | None, *, is_page: bool) -> "Sequence[TableDocument]":
    from tracekit.sql import table_documents

    # docs/schema.md describes only tracekit's own tables, whichever plug-ins are installed.
    tables = table_documents.own_documents() if is_page else table_documents.all_documents()
    return [table_documents.find(name, tables)] if name else tables


def _table_list() -> "Document":
    from tracekit.report import explanations

    return explanations.tables_document(_tables(None, is_page=False))


def _table_page(name: str) -> "Document | None":
    from tracekit.report import explanations

    tables = [table for table in _tables(None, is_page=False) if table.name == name.lower()]
    return explanations.tables_document(tables) if tables else None


def _table_grains() -> "Sequence[Meaning]":
    from tracekit.report.explanations import Meaning

    return [Meaning(table.name, f"One row per {table.grain}.") for table in _tables(None, is_page=False)]


# Causes, metrics and terms ------------------------------------------------------------------------------------------


def _causes() -> "Sequence[Meaning]":
    from tracekit.replay.graph import causes
    from tracekit.report.explanations import Meaning

    return [
        Meaning(cause.name, f"Without it, {cause.summary}.", (f"Rests on {cause.basis}.", f"Prices {_codes(cause)}."))
        for cause in causes.all_causes()
    ]


def _codes(cause: "Cause") -> str:
    codes = ", ".join(cause.codes)
    return f"findings of {codes}" if codes else "no finding"


def _metrics() -> "Sequence[Meaning]":
    from tracekit.regression import metrics
    from tracekit.report.explanations import Meaning

    return [
        Meaning(metric.short, metric.meaning, (_samples(metric),), (metric.key,))
        for metric in metrics.all_metrics().values()
    ]


def _samples(metric: "Metric") -> str:
    better = "less" if metric.lower_is_better else "more"
    return f"In {metric.unit.name}, one sample per {metric.scope.value}; {better} is better."


def _terms() -> "Sequence[Meaning]":
    from tracekit.report import explanations

    return explanations.terms()


def _meaning_list(meanings: "Callable[[], Sequence[Meaning]]") -> "Document":
    from tracekit.report import explanations

    return explanations.meanings_document(meanings())


def _meaning_page(meanings: "Callable[[], Sequence[Meaning]]", name: str) -> "Document | None":
    from tracekit.report import explanations

    entries = [entry for entry in meanings() if name.casefold() in map(str.casefold, _names(entry))]
    return explanations.meanings_document(entries) if entries else None


def _names(entry: "Meaning") -> list[str]:
    """Return the names that an entry explains; one of the glossary explains several together."""
    return [*entry.name.split(", "), *entry.synonyms]


_MEANINGS: "Mapping[Kind, Callable[[], Sequence[Meaning]]]" = {
    Kind.RULE: _rules,
    Kind.TABLE: _table_grains,
    Kind.CAUSE: _causes,
    Kind.METRIC: _metrics,
    Kind.TERM: _terms,
}
_LISTS: "Mapping[Kind, Callable[[], Document]]" = {
    **{kind: partial(_meaning_list, meanings) for kind, meanings in _MEANINGS.items()},
    Kind.RULE: _rule_list,
    Kind.TABLE: _table_list,
}
_PAGES: "Mapping[Kind, Callable[[str], Document | None]]" = {
    **{kind: partial(_meaning_page, meanings) for kind, meanings in _MEANINGS.items()},
    Kind.RULE: _rule_page,
    Kind.TABLE: _table_page,
}
