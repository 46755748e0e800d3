"""``tracekit rules`` and ``tracekit explain``: what is judged, by what thresholds, and what to do about it."""

from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.cli.output import Format, Output, TextOrJson


def rules(*, table_format: TextOrJson = Format.TEXT, out: Output = None) -> None:
    """List the rules and their thresholds."""
    from tracekit.report import rule_catalog
    from tracekit.rules import all_rules

    if table_format is Format.JSON:
        output.emit(rule_catalog.as_json(all_rules()), out)
    else:
        output.emit(rule_catalog.as_text(all_rules(), width=output.width(out), color=output.color(out)), out)


def explain(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Code, name, or the id of a finding.")], out: Output = None
) -> None:
    """Explain a rule: what it does, why it costs, how it is measured, how to fix it, what it cannot see."""
    from tracekit.cli import settings
    from tracekit.report import rule_catalog
    from tracekit.rules import all_rules

    found = settings.find_rule(rule, all_rules())
    output.emit(rule_catalog.explanation(found, width=output.width(out), color=output.color(out)), out)
