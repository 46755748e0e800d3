"""``tracekit rules`` and ``tracekit explain``: the rules, their thresholds and their documentation."""

from typing import Annotated

import typer

from tracekit.cli.options import OutputOptions, TableOptions, expand_options


@expand_options
def rules(*, table: TableOptions) -> None:
    """List the rules and their thresholds."""
    from tracekit.report import schema_pages
    from tracekit.rules import documents

    table.write(schema_pages.rules_document(documents.all_documents()))


@expand_options
def explain(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="A rule's code or name, or the id of a finding.")],
    *,
    result: OutputOptions,
) -> None:
    """Explain a rule: what it does, why it costs time, how it measures, how to fix its findings, its blind spots."""
    from tracekit.cli import settings_file
    from tracekit.report import schema_pages
    from tracekit.rules import documents

    result.write_text(schema_pages.explanation(settings_file.find_rule_of_finding(rule, documents.all_documents())))
