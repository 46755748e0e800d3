"""What each rule says of itself, as a file, so that a command that only shows it imports no rule and no Polars.

``python -m tracekit.rules.documents`` writes the file; a test compares it with the rules.
"""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.model import plugins

if TYPE_CHECKING:
    from tracekit.rules.rule import Rule

FILE = Path(__file__).with_name("documents.json")


@dataclass(frozen=True)
class RuleDocument:
    """A rule's code, name, documentation, and the default of each threshold."""

    code: str
    rule_name: str
    documentation: str
    thresholds: Mapping[str, bool | int | float | str]

    @classmethod
    def of(cls, rule: "type[Rule]") -> "RuleDocument":
        """Return the document of a rule."""
        thresholds: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(rule)}
        return cls(rule.code, rule.name(), inspect.cleandoc(rule.__doc__ or ""), thresholds)

    def name(self) -> str:
        """Return the name, as `Rule.name` does."""
        return self.rule_name

    @property
    def summary(self) -> str:
        """Return the first paragraph of the documentation, on one line."""
        return self.documentation.partition("\n\n")[0].replace("\n", " ")


def all_documents() -> tuple[RuleDocument, ...]:
    """Return the documents of our rules and those of plug-ins, in the order of `registry.all_rules`."""
    if plugins.entry_points(group="tracekit.rules"):
        from tracekit.rules import registry

        return tuple(map(RuleDocument.of, registry.all_rules()))
    return tuple(RuleDocument(**fields) for fields in json.loads(FILE.read_text(encoding="utf-8")))


def as_json() -> str:
    """Return the content of the file."""
    from tracekit.rules import registry

    rows = [dataclasses.asdict(RuleDocument.of(rule)) for rule in registry.RULES]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json(), encoding="utf-8")
